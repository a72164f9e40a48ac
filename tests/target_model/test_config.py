"""Reading config.json: both spellings, strict checks, sizes from the config alone."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

import configs
from target_model.config import M3Config, default_taps
from target_model.errors import UserError
from target_model.resolve import BUNDLED, target_config
from target_model.sizes import cache_bytes_per_token, count_parameters
from tests.fixtures import TINY_VISION, published_json, tiny_config


def changed(field: str, value: object, section: str = "text_config") -> dict:
    document = published_json(tiny_config())
    places = {
        "": document,
        "text_config": document["text_config"],
        "sparse_attention_config": document["text_config"]["sparse_attention_config"],
    }
    places[section][field] = value
    return document


def test_published_spelling_round_trip():
    config = tiny_config(vision=TINY_VISION, image_token_id=None)
    assert M3Config.from_json(published_json(config)) == config


@pytest.mark.parametrize("source", [BUNDLED / "m3-tiny", Path(configs.__file__).parent / "minimax-m3.json"])
def test_flat_spelling_says_the_same(source: Path, tmp_path: Path):
    """transformers reads the published spelling and writes the flat one."""
    published = M3Config.from_json(source)
    directory = tmp_path / "published"
    directory.mkdir()
    text = (source / "config.json" if source.is_dir() else source).read_text()
    (directory / "config.json").write_text(text)
    AutoConfig.from_pretrained(directory).save_pretrained(tmp_path / "flat")
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert "index_topk_blocks" in flat["text_config"] and "sparse_attention_config" not in flat["text_config"]
    assert M3Config.from_json(tmp_path / "flat") == published


def test_spellings_that_disagree():
    with pytest.raises(UserError, match=r"index_topk_blocks and .*sparse_topk_blocks disagree"):
        M3Config.from_json(changed("index_topk_blocks", 3))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed("hidden_size", 0), "text_config.hidden_size must be an integer of at least 1, not 0"),
        (changed("hidden_size", "64"), "text_config.hidden_size must be an integer"),
        (changed("hidden_size", True), "text_config.hidden_size must be an integer"),
        (changed("rms_norm_eps", 0), "text_config.rms_norm_eps must be above 0"),
        (changed("moe_layer_freq", [0, 1]), "moe_layer_freq has 2 entries, num_hidden_layers is 6"),
        (changed("moe_layer_freq", [0, 0, 1, 1, 1, 2]), "moe_layer_freq must be a list of 0 and 1"),
        (changed("layer_types", ["linear"] * 6), "layer_types must be a list of minimax_m3_sparse and full_attention"),
        (changed("partial_rotary_factor", 0.25), "rotary_dim disagree"),
        (changed("num_key_value_heads", 3), "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (changed("eos_token_id", 300), "eos_token_id 300 lies outside the vocabulary of 300"),
        (changed("eos_token_id", "x"), "eos_token_id must be a token id"),
        (changed("hidden_act", "gelu"), "hidden_act is 'gelu': only 'swigluoai' or 'silu' is supported"),
        (changed("attention_output_gate", True), "attention_output_gate is True"),
        (changed("rope_scaling", {"type": "yarn"}), "rope_scaling is"),
        (changed("sparse_score_type", "mean", "sparse_attention_config"), "sparse_score_type is 'mean'"),
        (changed("sparse_num_index_heads", 4, "sparse_attention_config"), "must equal num_key_value_heads 2"),
        (changed("sparse_index_dim", 32, "sparse_attention_config"), "sparse_index_dim 32 must equal head_dim 16"),
        (changed("sparse_init_block", 2, "sparse_attention_config"), "exceed sparse_topk_blocks 2"),
        (changed("sparse_disable_index_value", [0] * 6, "sparse_attention_config"), "must be 1 on every sparse layer"),
        (changed("index_topk_freq", 0), "index_topk_freq must be an integer of at least 1"),
        (changed("quantization_config", {}, ""), "quantization_config.quant_method None is not supported"),
        (changed("model_type", "llama", ""), "model_type is 'llama'"),
        (changed("text_config", 3, ""), "text_config must be an object"),
    ],
)
def test_errors_name_the_field(document: dict, message: str):
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        M3Config.from_json(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["hidden_size", "rope_theta", "moe_layer_freq", "swiglu_alpha", "eos_token_id"])
def test_missing_fields(field: str):
    document = published_json(tiny_config())
    del document["text_config"][field]
    with pytest.raises(UserError, match=rf"{field} is missing"):
        M3Config.from_json(document)


def test_files_that_are_no_config(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        M3Config.from_json(tmp_path)
    for content in ("{", "[]", "\udcff"):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match="config.json"):
            M3Config.from_json(tmp_path)


def test_default_taps():
    assert default_taps(60) == (2, 30, 57) and default_taps(8) == (2, 4, 5) and default_taps(7) == (2, 3, 4)
    with pytest.raises(UserError, match="6 layers"):
        default_taps(6)


@pytest.mark.parametrize(
    ("options", "reusing"),
    [
        ({}, ""),
        ({"use_index_cache": False, "index_topk_freq": 4}, ""),
        ({"use_index_cache": True}, ""),
        ({"use_index_cache": True, "index_topk_freq": 2}, "35"),
        ({"use_index_cache": True, "index_topk_freq": 3, "index_skip_topk_offset": 1}, "45"),
        ({"use_index_cache": True, "index_topk_freq": 2, "index_topk_pattern": "CSS"}, "34"),
        ({"use_index_cache": True, "index_topk_pattern": "CCCCCCS"}, ""),
    ],
)
def test_which_layers_reuse_a_choice(options: dict, reusing: str):
    """T0's sparse layers are 2..5, of ranks 0..3."""
    document = published_json(tiny_config())
    document["text_config"] |= options
    flags = M3Config.from_json(document).reuses_blocks
    assert "".join(str(layer) for layer, reuses in enumerate(flags) if reuses) == reusing


def test_reuse_of_the_whole_model_leaves_15_layers_computing():
    document = json.loads((Path(configs.__file__).parent / "minimax-m3.json").read_text())
    config = M3Config.from_json(document | {"use_index_cache": True, "index_topk_freq": 4})
    assert sum(config.reuses_blocks) == 42 and sum(config.sparse_layers) - sum(config.reuses_blocks) == 15
    with pytest.raises(UserError, match="no choice to reuse"):
        M3Config.from_json(document | {"use_index_cache": True, "index_topk_pattern": "SC"})


def test_sizes_of_minimax_m3():
    """The published counts, from the config alone."""
    config = target_config("MiniMax-M3")
    count = count_parameters(config)
    in_billions = {part: round(size / 1e9, 3) for part, size in count.parts.items()}
    assert in_billions == {
        "routed_experts": 413.122,
        "attention": 6.417,
        "shared_expert": 3.228,
        "lm_head": 1.229,
        "embed_tokens": 1.229,
        "dense_mlp": 0.679,
        "vision_tower": 0.631,
        "projector": 0.234,
        "indexer": 0.224,
        "router": 0.045,
        "norms": 0.001,
    }
    assert f"{count.total / 1e9:.3f}" == "427.040"
    assert f"{count.active / 1e9:.2f}" == "24.73"
    assert (count.text_tensors, count.vision_tensors) == (22_893, 523)
    assert f"{count.weight_bytes / 1e9:.2f}" == "854.17"
    assert cache_bytes_per_token(config) == 134.25 * 1024
    assert cache_bytes_per_token(config, element_size=1) == 74.25 * 1024
    assert default_taps(config.num_layers) == (2, 30, 57)

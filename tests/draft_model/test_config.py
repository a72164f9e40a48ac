"""The published config.json, both ways."""

import pytest

from draft_model.config import DraftConfig
from target_model.errors import UserError
from tests.draft_model.drafts import draft_config

PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 6144,
    "target_hidden_size": 6144,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "max_position_embeddings": 1048576,
    "vocab_size": 200064,
    "draft_vocab_size": 200064,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "fc_norm": True,
    "norm_output": True,
    "num_aux_hidden_states": 3,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 30, 57]},
}


def test_published_layout_is_read():
    config = DraftConfig.from_json(PUBLISHED)
    assert config.taps == (2, 30, 57) and config.fc_norm and config.norm_output and not config.norm_before_residual
    assert not config.pruned and config.max_position == 1048576


@pytest.mark.parametrize(
    "overrides",
    [{}, {"norm_before_residual": True, "attention_bias": True, "num_kv_heads": 2}, {"draft_vocab_size": 99}],
)
def test_round_trip(overrides):
    config = draft_config(**overrides)
    assert DraftConfig.from_json(config.to_json()) == config


def test_layer_ids_nested_at_the_top_or_by_default():
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    bare = {key: value for key, value in PUBLISHED.items() if key != "eagle_config"}
    assert DraftConfig.from_json(bare | ids).taps == (0, 3, 5)
    assert DraftConfig.from_json(bare | {"eagle_config": ids}).taps == (0, 3, 5)
    assert DraftConfig.from_json(bare, default_taps=(2, 4, 5)).taps == (2, 4, 5)
    with pytest.raises(UserError, match="eagle_aux_hidden_state_layer_ids is missing"):
        DraftConfig.from_json(bare)
    with pytest.raises(UserError, match="differs between eagle_config"):
        DraftConfig.from_json(PUBLISHED | ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "6144"}, "hidden_size must be an integer"),
        ({"fc_norm": 1}, "fc_norm must be true or false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must be null"),
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 draft"),
        ({"draft_vocab_size": 300000}, "exceeds vocab_size"),
        ({"num_key_value_heads": 5}, "evenly"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2"),
    ],
)
def test_what_is_wrong_is_named(change, named):
    with pytest.raises(UserError, match=named):
        DraftConfig.from_json(PUBLISHED | change)


def test_unused_keys_are_reported(caplog):
    DraftConfig.from_json(PUBLISHED | {"fancy_switch": 1, "bos_token_id": 1})
    assert "fancy_switch" in caplog.text and "bos_token_id" not in caplog.text

"""Drafts exchanged with the speculators library itself: its classes load our exports and compute the same logits."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_model.checkpoint import save_draft
from draft_model.export import SPECULATORS_VERSION, Verifier, check_directory, export_draft
from draft_model.importing import read_draft
from draft_model.model import Eagle3Draft
from tests.draft_model.drafts import random_draft

pytest.importorskip(
    "speculators", reason="speculators is not installed (pip install -e '.[interop-speculators]')", exc_type=ImportError
)

ROWS, STEPS = 24, 3
VARIANTS = [
    {},
    {"fc_norm": False, "norm_output": False},
    {"norm_before_residual": True, "num_kv_heads": 2},
    {"draft_vocab_size": 100, "rope_theta": 5000000.0},
    {"attention_bias": True, "norm_output": False, "head_dim": 32},
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    """A tiny Llama on disk: the library reads its verifier's config and weights when it loads a draft."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("verifier")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=8,
        vocab_size=300,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return Verifier(str(path), ["LlamaForCausalLM"], 4096)


def exported(draft: Eagle3Draft, directory: Path, verifier: Verifier) -> Path:
    save_draft(draft, directory / "source")
    found = read_draft(directory / "source", layer_ids="entering")
    export_draft(found, "speculators", directory / "export", verifier, "# card\n")
    return directory / "export"


def theirs(directory: Path):
    """Loaded by the library's own entry point."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    # Exact fp32 attention on the CPU; the default wants a compiler.
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def their_logits(model, aux: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of every unrolled step: the head's output, which the model itself keeps to itself."""
    steps: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: steps.append(output[0]))
    documents = torch.zeros(1, len(tokens), dtype=torch.long)
    model(hidden_states=aux[None], input_ids=tokens[None], document_ids=documents, ttt_steps=STEPS)
    hook.remove()
    return steps


@torch.no_grad()
def our_logits(draft: Eagle3Draft, aux: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The same steps: row i of step k reads tokens[i + k] at position i + 1 + k, the first step's keys up to its own,
    and its own column of later steps.
    """
    rows, groups = len(tokens), draft.config.num_heads // draft.config.num_kv_heads
    causal, own = torch.ones(rows, rows).tril().bool(), torch.eye(rows).bool()
    feature, keys, values, visible, steps = draft.project(aux), [], [], [], []
    for step in range(STEPS):
        ids = torch.cat([tokens[step:], tokens.new_zeros(step)])
        q, k, v, residual = draft.attention_inputs(ids, feature, torch.arange(rows) + 1 + step)
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        visible.append(own if step else causal)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) * draft.config.head_dim**-0.5
        weights = scores.masked_fill(~torch.cat(visible, 1), float("-inf")).softmax(-1)
        state = draft.attention_output(torch.einsum("hqk,khd->qhd", weights, torch.cat(values)), residual)
        steps.append(draft.logits(state))
        feature = draft.next_feature(state)
    return steps


@pytest.mark.parametrize("overrides", VARIANTS)
def test_its_classes_compute_our_logits(tmp_path, verifier, overrides):
    draft = random_draft(**overrides)
    model = theirs(exported(draft, tmp_path, verifier))
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(ROWS, 3 * draft.config.target_hidden_size, generator=generator) * 2
    tokens = torch.randint(0, draft.config.vocab_size, (ROWS,), generator=generator)
    for step, (ours, other) in enumerate(
        zip(our_logits(draft, aux, tokens), their_logits(model, aux, tokens), strict=True)
    ):
        torch.testing.assert_close(ours, other, atol=2e-4, rtol=1e-4, msg=lambda text, k=step: f"step {k}: {text}")
    if draft.config.pruned:
        assert torch.equal(model.d2t, draft.d2t)
    assert model.target_layer_ids == list(draft.config.taps)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_what_it_saves_is_imported(tmp_path, verifier, overrides):
    draft = random_draft(**overrides)
    model = theirs(exported(draft, tmp_path, verifier))
    model.save_pretrained(tmp_path / "saved")
    back = read_draft(tmp_path / "saved")
    source = read_draft(tmp_path / "source", layer_ids="entering")
    assert back.tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert torch.equal(tensor, back.tensors[name]), name
    names = "taps norm_output fc_norm norm_before_residual attention_bias head_dim rope_theta draft_vocab_size".split()
    assert {n: getattr(back.config, n) for n in names} == {n: getattr(draft.config, n) for n in names}


def test_a_wrong_switch_is_seen(tmp_path, verifier):
    draft = random_draft()
    directory = exported(draft, tmp_path, verifier)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_output": False}))
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(ROWS, 192, generator=generator)
    tokens = torch.randint(0, 300, (ROWS,), generator=generator)
    ours, other = our_logits(draft, aux, tokens), their_logits(theirs(directory), aux, tokens)
    torch.testing.assert_close(ours[0], other[0], atol=2e-4, rtol=1e-4)
    assert (ours[1] - other[1]).abs().max() > 0.01


def test_names_it_does_not_know_fail_our_check_first(tmp_path, verifier):
    directory = exported(random_draft(), tmp_path, verifier)
    path = directory / "model.safetensors"
    save_file({n.replace("layers.0.", "midlayer."): t for n, t in load_file(path).items()}, path)
    assert any(
        "layers.0.hidden_norm.weight is missing" in problem for problem in check_directory(directory, "speculators")
    )


def test_the_version_that_exports_name():
    assert SPECULATORS_VERSION.split(".")[:2] == version("speculators").split(".")[:2]

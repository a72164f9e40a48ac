"""A draft with quantised products."""

import copy

import pytest
import torch

from draft_model.quantised import FORMATS, QuantisedLinear, draft_format, quantise_draft, stored_as
from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from target_model.errors import UserError
from target_model.quantised_formats import dequantise, quantise
from tests.fixtures import random_target
from tests.serve.drafts import random_draft


@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_with_the_rounded_weights(name):
    """All products and nothing else: the same as a plain draft that holds the numbers which the format can say."""
    form = draft_format(name)
    plain = random_draft(random_target(), attention_bias=True)
    rounded, quantised = copy.deepcopy(plain), copy.deepcopy(plain)
    quantise_draft(quantised, form)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            packed = quantise(form, module.weight)
            module.weight.data = dequantise(form, packed.values, packed.scale, packed.tensor_scale)
    assert stored_as(quantised) is form and stored_as(plain) is None
    assert quantised.dtype == plain.dtype and quantised.kv_shape == plain.kv_shape
    aux_TA = torch.randn(5, plain.fc.in_features)
    ids_T, positions_T, attended_TQD = torch.arange(5), torch.arange(5), torch.randn(5, plain.config.num_heads, 16)
    outputs = []
    with torch.no_grad():
        for draft in (rounded, quantised):
            feature_TH = draft.project(aux_TA)
            q, k, v, residual = draft.attention_inputs(ids_T, feature_TH, positions_T)
            state_TH = draft.attention_output(attended_TQD, residual)
            outputs.append((feature_TH, q, k, v, state_TH, draft.logits(state_TH[:, None])))
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected)
    assert outputs[1][-1].shape == (5, 1, plain.config.vocab_size)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_on_the_gpu_it_computes_the_same(name, rows):
    """Widths of m3-tiny's draft, which are no multiples of the kernels' tiles; twice the error of bf16 arithmetic."""
    form = draft_format(name)
    for columns, outputs in ((576, 192), (384, 768), (256, 192), (192, 4096)):
        plain = torch.nn.Linear(columns, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
        quantised = QuantisedLinear(plain, form)
        weight = quantised.weight.dequantised(slice(None), torch.float64)
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ weight.T
        allowed = (torch.nn.functional.linear(x, weight.bfloat16()).double() - exact).square().mean().sqrt()
        with torch.no_grad():
            error = (quantised(x).double() - exact).square().mean().sqrt()
        assert error <= 2 * allowed, (columns, outputs)


def test_what_cannot_be_quantised_is_named():
    draft = random_draft(random_target(), intermediate_size=40)
    with pytest.raises(UserError, match="mxfp8: down_proj has 40 columns"):
        quantise_draft(draft, draft_format("mxfp8"))
    assert stored_as(draft) is None and isinstance(draft.fc, torch.nn.Linear)
    with pytest.raises(UserError, match="unknown draft weights 'nvfp4': expected none, mxfp8 or mxfp4"):
        draft_format("nvfp4")
    with pytest.raises(UserError, match="there is no draft"):
        load_engine(EngineOptions(draft=None, draft_weights="mxfp8", device="cpu"))


def test_no_answer_depends_on_it():
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers, sizes = [], []
    for weights in (None, "mxfp4"):
        engine, tokenizer, about = load_engine(EngineOptions(draft_weights=weights, device="cpu", pages=40))
        answers.append(engine.generate([tokenizer.encode("def add(a, b):")], params)[0].token_ids)
        sizes.append("products in mxfp4" in "\n".join(about.lines))
        assert engine.stats()["accepted_tokens"] > 0
    assert answers[0] == answers[1] and sizes == [False, True]

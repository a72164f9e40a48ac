"""The count of operations is what PyTorch counts; the progress line shows what there is."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.draft_model.drafts import random_draft
from tests.train.batches import random_features
from train.flops import peak_flops, step_flops
from train.loss import LossSettings, Teacher, count_rows, step_weights, ttt_loss
from train.progress import numbers
from train.ttt import unroll, valid_rows


@pytest.mark.parametrize("train_head", [True, False])
def test_operations_of_a_step(train_head):
    draft, steps, length = random_draft(), 3, 24
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(train_head)
    features = random_features(draft.config, [[1] * length], [[1] * length], steps)
    rows = valid_rows(features.valid_steps, steps)
    counts = count_rows(features.valid_steps, steps)
    teacher = Teacher(torch.randn(draft.config.vocab_size, draft.config.target_hidden_size), None)
    with FlopCounterMode(display=False) as counter:
        states = unroll(draft, features, rows, "explicit")
        loss, _ = ttt_loss(
            states,
            rows,
            draft.lm_head.weight,
            features.final_state,
            features.valid_steps,
            step_weights(counts, 0.8),
            teacher,
            LossSettings(),
        )
        loss.backward()
    # The explicit attention looks at all keys, also at those that the mask hides, for all rows.
    counted = step_flops(draft.config, length, length, counts.tolist(), train_head)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_progress_line():
    metrics = {"loss": 1.5, "tau_sim": 2.25, "tokens_per_second": 1234.5}
    assert (
        numbers({}, 0) == ""
        and numbers(metrics, 2_000_000) == "loss 1.500  tau_sim 2.25  1,234 tokens/s  2.00 M tokens"
    )
    assert numbers(metrics | {"mfu": 0.456, "gpu_memory": 3 << 30}, 0).endswith("  MFU 46 %  3.0 GiB")
    assert peak_flops(torch.device("cpu")) is None

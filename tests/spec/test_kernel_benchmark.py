"""The floors of the kernel benchmark, and its refusal without a GPU."""

import pytest
import torch

from spec.bench import kernels, msa_cases
from spec.bench.kernel_timing import Machine, Row
from target_model.batch import Batch
from target_model.errors import UserError

MACHINE = Machine("test", bandwidth=4e12, matmul_rate=8e14)


def test_floor_is_the_larger_of_moving_and_multiplying():
    assert MACHINE.floor(4e6, 0) == pytest.approx(1.0)
    assert MACHINE.floor(4e6, 8e9) == pytest.approx(10.0)


def test_work_of_a_decode_step_counts_every_chosen_block_once():
    context = 32 * 1024
    batch = Batch.causal(128, "cpu", [[0]], [context - 1], [list(range(context // 128))])
    blocks = torch.arange(16, dtype=torch.int32).expand(1, 4, 16).contiguous()
    moved, operations = msa_cases.attention_work(batch, blocks)
    assert moved[0] == context * 128 * 2 + 2 * 128 * 4  # index K and the index queries
    assert moved[1] == 4 * 16 * 128 * 128 * 4 + 4 * 128 * 64  # K and V of 16 blocks for 4 heads; q and the result
    assert operations[0] == 2 * 128 * 4 * context
    assert operations[1] == 4 * 128 * 64 * 2048


def test_nodes_that_choose_alike_move_a_block_once():
    batch = Batch.tree(128, "cpu", [[0, 0]], [256], [[0, 1, 2]], [[0, 1]], [[1, 3]])
    alike = torch.tensor([[[0, 2]] * 4] * 2, dtype=torch.int32)
    apart = alike.clone()
    apart[1, :, 0] = 1
    more = msa_cases.attention_work(batch, apart)[0][1] - msa_cases.attention_work(batch, alike)[0][1]
    assert more == 4 * 128 * 128 * 4


def test_line_shows_floor_and_ratios():
    row = Row("decode B1 8k", 20.0, 5.0, 1.0, 1.0, {"index": 12.0}, 40.0, None)
    text = kernels.line(row)
    assert "25 % of floor" in text and "2.00x" in text and "index" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="CUDA device"):
        kernels.main("decode")

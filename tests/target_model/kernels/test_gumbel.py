"""Noise of chosen tokens: the bits of `serve.noise.gumbel`, in the reference to the last one."""

import pytest
import torch

from serve.noise import gumbel
from target_model.kernels import gumbel as gumbel_triton
from target_model.kernels import gumbel_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 1003
SEEDS, CHOICES, POSITIONS = [1, 2**40 + 7, -5, 2**63 - 1, -(2**63)], [0, 1, 2, 300, 0], [0, 11, 500_000, 3, 2**20]


@pytest.mark.parametrize("count", [1, 7, 600])
def test_noise_of_chosen_tokens_is_that_of_the_whole_row(count):
    whole = gumbel(SEEDS, CHOICES, POSITIONS, VOCAB, "cpu")
    ids = torch.randint(VOCAB, (len(SEEDS), count), generator=torch.Generator().manual_seed(count))
    ids[0, 0], ids[1, 0] = VOCAB - 1, 0
    columns = [torch.tensor(x) for x in (SEEDS, CHOICES, POSITIONS)]
    assert torch.equal(gumbel_ref.gumbel_at(*columns, ids), whole.gather(1, ids))
    out = gumbel_triton.gumbel_at(*(x.to(DEVICE) for x in (*columns, ids))).cpu()
    shared = gumbel_triton.gumbel_at(*(x.to(DEVICE) for x in columns), ids.repeat_interleave(3, 0).to(DEVICE)).cpu()
    assert torch.equal(shared, out.repeat_interleave(3, 0))
    torch.testing.assert_close(out, whole.gather(1, ids), rtol=1e-6, atol=2e-7)  # the logarithms differ in the last bit

"""Gumbel noise of chosen tokens.

noise[n, k] = -log(-log(u)),  u = (bits >> 9 + 1/2) / 2^23,  bits = word id % 4 of Philox4x32-10 with the counter
              (id // 4, position[n], choice[n], 0) and the key seed[n],  id = ids[n, k]
N rows, K ids of a row, R keys, each for N / R consecutive rows. A program computes BLOCK ids of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import PDL, begin, cdiv, launch_options, power_of_two, require, require_tensor

# What consecutive rows can have in common.
SETTINGS = {"scale": torch.float32, "temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}
SETTINGS |= {"top_k": torch.int32, "seed": torch.int64, "choice": torch.int64, "position": torch.int64}


@triton.jit
def gumbel_of(bits):
    """Standard Gumbel noise from 32 random bits."""
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def noise_at(seed, choice, position, ids):
    """Noise of the tokens `ids`, int32, of one row, whose seed, choice and position are scalars."""
    same = ids * 0
    w0, w1, w2, w3 = tl.philox(seed, ids >> 2, same + position.to(tl.int32), same + choice.to(tl.int32), same)
    lane = ids & 3
    return gumbel_of(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def noise_tile(seed, choice, position, words):
    """Noise of all tokens of these words, [4 * words], each computed once for the four of them."""
    same = words * 0
    w0, w1, w2, w3 = tl.philox(seed, words, same + position.to(tl.int32), same + choice.to(tl.int32), same)
    return gumbel_of(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * words.shape[0]]))


@triton.jit(do_not_specialize=["share"])
def gumbel_kernel(
    seeds,  # int64 [R]
    choices,  # int64 [R]
    positions,  # int64 [R]
    ids,  # int64 [N, K]
    out,  # fp32 [N, K]
    share,  # N / R
    K,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + n * K + k, mask=k < K, other=0).to(tl.int32)
    r = tl.program_id(0) // share
    noise = noise_at(tl.load(seeds + r), tl.load(choices + r), tl.load(positions + r), token)
    tl.store(out + n * K + k, noise, mask=k < K)


def shared_by(rows: int, **settings: Tensor) -> int:
    """How many consecutive rows each entry of the settings, contiguous [R], is for."""
    entries = len(next(iter(settings.values())))
    require(entries > 0 and rows % entries == 0, f"{rows} rows cannot share {entries} settings")
    for name, x in settings.items():
        require_tensor(name, x, (entries,), (SETTINGS[name],))
    return rows // entries


def gumbel_at(seed_R: Tensor, choice_R: Tensor, position_R: Tensor, ids_NK: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens ids[n, :], fp32 [N, K]: that of `serve.noise.gumbel` in these places.

    All int64. Each of the R keys is for N / R consecutive rows. A seed holds 64 bits, a position is that of the token
    to be chosen; ids are not negative.
    """
    rows, count = ids_NK.shape
    require_tensor("ids", ids_NK, (None, None), (torch.int64,))
    share = shared_by(rows, seed=seed_R, choice=choice_R, position=position_R)
    noise_NK = torch.empty(rows, count, dtype=torch.float32, device=ids_NK.device)
    block = min(256, power_of_two(count))
    gumbel_kernel[(rows, cdiv(count, block))](
        seed_R, choice_R, position_R, ids_NK, noise_NK, share, count, BLOCK=block, PDL=PDL, **launch_options(1, 1)
    )
    return noise_NK

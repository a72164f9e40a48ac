"""Attention of one training-time-test step, two implementations of one definition.

R rows, S tokens, Q query heads, K kv heads, D head dim, C own-column keys. The query of row p at step k attends to the
step-0 keys of the rows p' <= p of its document and, with the same softmax, to its own column: the keys of row p at
steps 1..k, itself included.

    out[p] = softmax([q[p] . k0[p' <= p], q[p] . k1[p], ..., q[p] . kk[p]] * scale) @ [v0[p' <= p], v1[p], ..., vk[p]]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from target_model.kernels import ops
from train.features import DraftBlocks


def explicit_attention(
    q_RSQD: Tensor,
    k0_RSKD: Tensor,
    v0_RSKD: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    documents_RS: Tensor,
    packed: bool,
    scale: float,
    chosen_RQSS: Tensor | None = None,
) -> Tensor:
    """The definition, with all scores in memory: any device, any dtype (softmax in fp32). Returns [R, S, Q, D].

    chosen_RQSS bool: step-0 keys in the blocks that a row attends to; None: all.
    """
    length, groups = q_RSQD.shape[1], q_RSQD.shape[2] // k0_RSKD.shape[2]
    visible = visible_keys(documents_RS) if packed else _causal(length, q_RSQD.device)
    if chosen_RQSS is not None:
        visible = visible & chosen_RQSS
    q_RQSD = q_RSQD.transpose(1, 2) * scale
    k0_RQSD, v0_RQSD = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k0_RSKD, v0_RSKD))
    scores = (q_RQSD @ k0_RQSD.transpose(2, 3)).masked_fill(~visible, float("-inf"))
    if own_k:
        own_k_RQSCD, own_v_RQSCD = (_columns(x, groups) for x in (own_k, own_v))
        own = (own_k_RQSCD @ q_RQSD[..., None])[..., 0]
        scores = torch.cat([scores, own], dim=-1)
    # Half precision rounds only the finished weights.
    wide = scores if scores.dtype == torch.float64 else scores.float()
    weights = wide.softmax(-1).to(q_RSQD.dtype)
    out = weights[..., :length] @ v0_RQSD
    if own_k:
        out = out + (weights[..., None, length:] @ own_v_RQSCD)[..., 0, :]
    return out.transpose(1, 2)


def visible_keys(documents_RS: Tensor) -> Tensor:
    """bool [R, 1, S, S]: the key's row is not behind the query's and lies in the same document."""
    same = documents_RS[:, :, None] == documents_RS[:, None, :]
    return (same & _causal(documents_RS.shape[1], documents_RS.device))[:, None]


def chosen_keys(blocks: DraftBlocks, positions_RS: Tensor, num_heads: int) -> Tensor:
    """bool [R, Q, S, S]: the key's token lies in a block of the query's list. The key of row p is that of the token at
    p + 1.
    """
    lists_RSKN = blocks.lists.long()
    key_block_RS = (positions_RS + 1) // blocks.size
    count = int(torch.maximum(key_block_RS.max(), lists_RSKN.max())) + 1
    member_RSKB = torch.zeros(*lists_RSKN.shape[:3], count + 1, dtype=torch.bool, device=lists_RSKN.device)
    # One place more takes the -1 behind a list's end.
    member_RKSB = member_RSKB.scatter(-1, lists_RSKN.where(lists_RSKN >= 0, count), True).transpose(1, 2)
    heads, length = member_RKSB.shape[1], positions_RS.shape[1]
    keys = key_block_RS[:, None, None].expand(-1, heads, length, -1)
    return member_RKSB.gather(-1, keys).repeat_interleave(num_heads // heads, dim=1)


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _columns(parts: list[Tensor], groups: int) -> Tensor:
    """Own-column keys or values, one [R, S, K, D] a step, as [R, Q, S, C, D]."""
    return torch.stack(parts, dim=3).repeat_interleave(groups, 2).transpose(1, 2)


def flash_attention(
    q_RSQD: Tensor,
    k0_RSKD: Tensor,
    v0_RSKD: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    documents_RS: Tensor,
    packed: bool,
    scale: float,
    segments: "Segments | None" = None,
) -> Tensor:
    """The same through PyTorch's flash attention, without the S x S scores. Packed documents are sequences of their own
    on CUDA (`segments`, by default worked out here) and a mask on a CPU; chosen blocks need the other implementation.
    """
    groups = q_RSQD.shape[2] // k0_RSKD.shape[2]
    mask = None
    if packed and q_RSQD.is_cuda:
        mask = segments or Segments.of(documents_RS)
    elif packed:
        mask = torch.zeros((), dtype=q_RSQD.dtype).masked_fill(~visible_keys(documents_RS), float("-inf"))
    k0, v0 = (x if groups == 1 else x.repeat_interleave(groups, 2) for x in (k0_RSKD, v0_RSKD))
    return _FlashWithColumns.apply(q_RSQD, k0, v0, mask, scale, *own_k, *own_v)


@dataclass(frozen=True)
class Segments:
    """The documents of packed rows, one row after the other: where each begins among the R * S rows and where the last
    ends, int32 [N + 1], and the length of the longest.
    """

    starts: Tensor
    longest: int

    @property
    def place(self) -> tuple[Tensor, Tensor, int, int]:
        """As PyTorch's kernels take it: of the queries and of the keys."""
        return self.starts, self.starts, self.longest, self.longest

    @staticmethod
    def of(documents_RS: Tensor) -> "Segments":
        """Waits for the device. A document is a run of equal numbers."""
        begins_RS = torch.ones_like(documents_RS, dtype=torch.bool)
        begins_RS[:, 1:] = documents_RS[:, 1:] != documents_RS[:, :-1]
        starts = torch.cat([begins_RS.flatten().nonzero()[:, 0], documents_RS.new_tensor([documents_RS.numel()])])
        return Segments(starts.int(), int(starts.diff().max()))


class _FlashWithColumns(torch.autograd.Function):
    """Merges flash attention over the step-0 keys with the own column by their log-sum-exps.

    With the merged output O and log-sum-exp L, the gradient of the part over the step-0 keys is the usual flash
    backward evaluated at (O, L): ds = exp(s - L) * (dO . v - dO . O). So PyTorch's backward kernel is called with the
    merged O and L. The column's keys are never put side by side: a copy of them for every step would be most of a long
    row's memory.
    """

    @staticmethod
    def forward(ctx, q, k0, v0, mask, scale, *own):
        part, lse, state = _flash_forward(*_heads_first(q, k0, v0), mask, scale)
        out = part.transpose(1, 2)
        if own:
            rows = [x.flatten(0, 1).contiguous() for x in (q, out, lse.transpose(1, 2), *own)]
            keys, values = rows[3 : 3 + len(own) // 2], rows[3 + len(own) // 2 :]
            merged, merged_lse = ops.merge_column(*rows[:3], keys, values, scale)
            out, lse = merged.view_as(q), merged_lse.unflatten(0, q.shape[:2]).transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k0, v0, out, lse, *own)
        ctx.state, ctx.scale, ctx.mask = state, scale, mask
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        heads_first = _heads_first(grad_out, q, k0, v0, out)
        dq, dk0, dv0 = _heads_first(*_flash_backward(*heads_first, lse, ctx.mask, ctx.state, ctx.scale))
        if not own:
            return dq, dk0, dv0, None, None
        rows = [x.flatten(0, 1).contiguous() for x in (grad_out, q, out, lse.transpose(1, 2), dq, *own)]
        keys, values = rows[5 : 5 + len(own) // 2], rows[5 + len(own) // 2 :]
        own_dk, own_dv = ops.column_gradient(*rows[:5], keys, values, ctx.scale)
        grads = [x.unflatten(0, q.shape[:2]) for x in (rows[4], *own_dk, *own_dv)]
        return grads[0], dk0, dv0, None, None, *grads[1:]


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[R, S, Q, D] as [R, Q, S, D], and back."""
    return [x.transpose(1, 2) for x in tensors]


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Segments | None, scale: float
) -> tuple[Tensor, Tensor, tuple]:
    """Output [R, Q, S, D], as are q, k and v; its log-sum-exp, fp32 [R, Q, S]; what the backward kernel wants back."""
    if isinstance(mask, Segments):
        rows = [x.flatten(0, 1) for x in _heads_first(q, k, v)]
        out, lse, *state, _ = torch.ops.aten._flash_attention_forward(*rows, *mask.place, 0.0, True, False, scale=scale)
        shape = q.shape[0], q.shape[2]
        return out.unflatten(0, shape).transpose(1, 2), lse.unflatten(1, shape).transpose(0, 1), tuple(state)
    if q.is_cuda:
        out, lse, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, return_debug_mask=False, scale=scale
        )
        return out, lse, (max_q, max_k, seed, offset)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out, lse, ()


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | Segments | None,
    state: tuple,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if isinstance(mask, Segments):
        rows = [x.flatten(0, 1).contiguous() for x in _heads_first(grad, q, k, v, out)]
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        grads = torch.ops.aten._flash_attention_backward(*rows, lse, *mask.place, 0.0, True, *state, scale=scale)
        return tuple(x.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2) for x in grads)
    if q.is_cuda:
        max_q, max_k, seed, offset = state
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )

"""Attention of one training-time-test step, two implementations of one definition.

R rows, S tokens, Q query heads, K kv heads, D head dim, C own-column keys. The query of row p at step k attends to the
step-0 keys of the rows p' <= p of its document and, with the same softmax, to its own column: the keys of row p at
steps 1..k, itself included.

    out[p] = softmax([q[p] . k0[p' <= p], q[p] . k1[p], ..., q[p] . kk[p]] * scale) @ [v0[p' <= p], v1[p], ..., vk[p]]
"""

import torch
from torch import Tensor

from target_model.errors import UserError
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
) -> Tensor:
    """The same through PyTorch's flash attention, without the S x S scores. Document masks (packed) need CPU, and
    chosen blocks the other implementation.
    """
    groups = q_RSQD.shape[2] // k0_RSKD.shape[2]
    heads_first = [x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k0_RSKD, v0_RSKD)]
    mask = None
    if packed:
        if q_RSQD.is_cuda:
            raise UserError(
                "ttt.attention: flash does not mask packed documents on CUDA; use explicit or data.packing=false"
            )
        mask = torch.zeros((), dtype=q_RSQD.dtype).masked_fill(~visible_keys(documents_RS), float("-inf"))
    q_RQSD = q_RSQD.transpose(1, 2)
    if own_k:
        columns = [_columns(x, groups) for x in (own_k, own_v)]
    else:
        columns = [q_RQSD.new_empty(*q_RQSD.shape[:3], 0, q_RQSD.shape[-1])] * 2
    return _FlashWithColumns.apply(q_RQSD, *heads_first, *columns, mask, scale).transpose(1, 2)


class _FlashWithColumns(torch.autograd.Function):
    """Merges flash attention over the step-0 keys with the own column by their log-sum-exps.

    With the merged output O and log-sum-exp L, the gradient of the part over the step-0 keys is the usual flash
    backward evaluated at (O, L): ds = exp(s - L) * (dO . v - dO . O). So PyTorch's backward kernel is called with the
    merged O and L.
    """

    @staticmethod
    def forward(ctx, q, k0, v0, own_k, own_v, mask, scale):
        part, lse0, state = _flash_forward(q, k0, v0, mask, scale)
        if own_k.shape[-2] == 0:
            out, lse = part, lse0
        else:
            own = (own_k.float() @ q.float()[..., None])[..., 0] * scale
            lse = torch.logaddexp(lse0, own.logsumexp(-1))
            weights = (own - lse[..., None]).exp()
            out = part.float() * (lse0 - lse).exp()[..., None] + (weights[..., None, :] @ own_v.float())[..., 0, :]
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k0, v0, own_k, own_v, out, lse, *(x for x in (mask,) if x is not None))
        ctx.state, ctx.scale, ctx.masked = state, scale, mask is not None
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k0, v0, own_k, own_v, out, lse, *rest = ctx.saved_tensors
        mask = rest[0] if ctx.masked else None
        dq, dk0, dv0 = _flash_backward(grad_out, q, k0, v0, out, lse, mask, ctx.state, ctx.scale)
        if own_k.shape[-2] == 0:
            return dq, dk0, dv0, None, None, None, None
        grad = grad_out.float()
        weights = ((own_k.float() @ q.float()[..., None])[..., 0] * ctx.scale - lse[..., None]).exp()
        d_own_v = weights[..., None] * grad[..., None, :]
        d_weights = (own_v.float() @ grad[..., None])[..., 0]
        d_scores = weights * (d_weights - (grad * out.float()).sum(-1, keepdim=True)) * ctx.scale
        dq = dq + (d_scores[..., None, :] @ own_k.float())[..., 0, :].to(dq.dtype)
        d_own_k = d_scores[..., None] * q.float()[..., None, :]
        return dq, dk0, dv0, d_own_k.to(own_k.dtype), d_own_v.to(own_v.dtype), None, None


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float):
    """(output, log-sum-exp fp32 [R, Q, S], what the backward kernel wants back)."""
    if q.is_cuda:
        out, lse, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, return_debug_mask=False, scale=scale
        )
        return out, lse, (max_q, max_k, seed, offset)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out, lse, ()


def _flash_backward(grad: Tensor, q, k, v, out, lse, mask, state: tuple, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        max_q, max_k, seed, offset = state
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )

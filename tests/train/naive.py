"""The training-time test as loops over single rows, straight from its definition."""

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_model.model import Eagle3Draft


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head [D] at one position."""
    half = len(x) // 2
    angle = position * theta ** -(torch.arange(half, dtype=x.dtype) * 2 / len(x))
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def layer_inputs(draft: Eagle3Draft, token: int, feature: Tensor, position: int):
    """q [Q][D], k, v [K][D] and the residual of one row."""
    c = draft.config
    hidden = rms(feature, draft.hidden_norm.weight, c.rms_norm_eps)
    embedded = rms(draft.embed_tokens.weight[token], draft.input_layernorm.weight, c.rms_norm_eps)
    packed = draft.qkv_proj.weight @ torch.cat([embedded, hidden])
    if c.attention_bias:
        packed = packed + draft.qkv_proj.bias
    heads = packed.view(-1, c.head_dim)
    q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
    turn = lambda x: torch.stack([rotate(head, position, c.rope_theta) for head in x])  # noqa: E731
    return turn(q), turn(k), v, hidden if c.norm_before_residual else feature


def naive_unroll(draft: Eagle3Draft, token_ids: list[int], documents: list[int], aux: Tensor, steps: int):
    """{(row, step): normed state [H]} for every row and step whose tokens lie in the row's document."""
    c = draft.config
    length = len(token_ids)
    first = [documents.index(document) for document in documents]
    keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    features: dict[tuple[int, int], Tensor] = {}
    normed: dict[tuple[int, int], Tensor] = {}
    for step in range(steps):
        inputs = {}
        for row in range(length):
            token_at = row + 1 + step
            if token_at >= length or documents[token_at] != documents[row]:
                continue
            if step == 0:
                parts = aux[row].chunk(c.num_aux)
                if c.fc_norm:
                    parts = [rms(p, n.weight, c.rms_norm_eps) for p, n in zip(parts, draft.fc_norm, strict=True)]
                features[row, 0] = draft.fc.weight @ torch.cat(list(parts))
            position = token_at - first[row]
            inputs[row] = layer_inputs(draft, token_ids[token_at], features[row, step], position)
            keys[row, step] = inputs[row][1:3]
        for row, (q, _, _, residual) in inputs.items():
            seen = [keys[other, 0] for other in range(first[row], row + 1)]
            seen += [keys[row, later] for later in range(1, step + 1)]
            heads = []
            for head in range(c.num_heads):
                shared = head // (c.num_heads // c.num_kv_heads)
                scores = torch.stack([q[head] @ k[shared] for k, _ in seen]) / c.head_dim**0.5
                heads.append(scores.softmax(0) @ torch.stack([v[shared] for _, v in seen]))
            attended = draft.o_proj.weight @ torch.cat(heads)
            state = residual + (attended + draft.o_proj.bias if c.attention_bias else attended)
            gate, up = (
                draft.gate_up_proj.weight @ rms(state, draft.post_attention_layernorm.weight, c.rms_norm_eps)
            ).chunk(2)
            state = state + draft.down_proj.weight @ (F.silu(gate) * up)
            normed[row, step] = rms(state, draft.norm.weight, c.rms_norm_eps)
            features[row, step + 1] = normed[row, step] if c.norm_output else state
    return normed


def naive_loss(
    normed: dict[tuple[int, int], Tensor],
    counted: dict[tuple[int, int], int],
    head: Tensor,
    teacher_logits: Tensor,
    kept: Tensor | None,
    decay: float,
    kind: str = "kl",
    eta: float = 3.0,
) -> Tensor:
    """`counted` maps (row, step) to the position whose target distribution judges it, in `teacher_logits`."""
    by_step: dict[int, list[Tensor]] = {}
    for (row, step), position in counted.items():
        full = teacher_logits[position].softmax(-1)
        p = full if kept is None else full[kept]
        q = (head @ normed[row, step]).softmax(-1)
        alpha = torch.minimum(p, q).sum()
        p = p / p.sum()
        loss = (p * (p.log() - q.log())).sum()
        if kind == "lk":
            weight = torch.exp(-eta * alpha.detach())
            loss = weight * loss + (1 - weight) * (1 - alpha)
        by_step.setdefault(step, []).append(loss)
    weights = {step: decay**step for step in by_step}
    means = {step: torch.stack(losses).mean() for step, losses in by_step.items()}
    return sum(weights[step] * means[step] for step in by_step) / sum(weights.values())

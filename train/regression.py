"""A start from least squares: before the first gradient step the draft already is the best linear predictor of the
target's next state.

Y = target hidden H, E = embedding, n(x) = x / rms(x). Three ridge regressions on captured rows, in the units of the
target's final state f:

    G: n(taps[p]) -> f[p]
       becomes fc: the feature means the same as the state that is fed back later
    M: (n(e(x[p+1])), n(G taps)) -> f[p+1] / final norm weight
       becomes attention's value and output projections; refitted on its own first predictions too

Attention carries the linear map because queries equal keys there: a row finds itself (or a row with the same token and
state) and its value is the map of its own input. The MLP and the heads that are not needed start at zero output and are
free to learn.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from target_model.model import TargetModel
from train.features import Features
from train.loss import Teacher

# A row's score with itself is about this much, after the usual 1 / sqrt(head_dim): its softmax is close to one-hot.
_SELF_SCORE = 12.0
_RIDGE = 30.0


@torch.no_grad()
def start_from_regression(
    draft: Eagle3Draft, target: TargetModel, teacher: Teacher, batches: list[Features], seed: int
) -> None:
    """Overwrites fc, attention, MLP output and the scale of the final norm of a fresh draft, in place."""
    config = draft.config
    if not config.fc_norm or config.norm_before_residual or config.attention_bias:
        raise UserError(
            "draft.initialisation=regression needs fc_norm=true, norm_before_residual=false, attention_bias=false"
        )
    gather = _Rows(draft, target)
    fc = _ridge((taps, states[0]) for taps, _, states in gather(batches, 0))
    norm_weight = target.norm.scale.float()

    def first_input(taps: Tensor, embedded: list[Tensor]) -> Tensor:
        return torch.cat([_unit(embedded[0]), _unit(taps @ fc)], dim=-1)

    layer = _ridge((first_input(taps, e), states[1] / norm_weight) for taps, e, states in gather(batches, 1))

    def both_steps() -> Iterator[tuple[Tensor, Tensor]]:
        for taps, embedded, states in gather(batches, 2):
            first = first_input(taps, embedded)
            yield first, states[1] / norm_weight
            fed_back = _unit(_unit(first @ layer) * norm_weight)
            yield torch.cat([_unit(embedded[1]), fed_back], dim=-1), states[2] / norm_weight

    layer = _ridge(both_steps())
    taps, embedded, states = next(gather(batches, 1))
    residual = float((taps @ fc).pow(2).mean().sqrt())
    layer_map = layer.clone()
    layer_map[config.hidden_size :].diagonal().sub_(residual)
    draft.fc.weight.copy_(fc.T)
    _write_attention(draft, layer_map, seed)
    draft.down_proj.weight.zero_()
    predicted = _unit(first_input(taps, embedded) @ layer) * norm_weight
    draft.norm.weight.mul_(_temperature(predicted, states[1], draft, teacher))


def _unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class _Rows:
    """Regression rows of captured features: normed taps [N, A], embeddings of x[p+1], .., final states of p, p+1, .."""

    def __init__(self, draft: Eagle3Draft, target: TargetModel):
        self.num_aux, self.embedding = draft.config.num_aux, target.embed_tokens.weight

    def __call__(self, batches: list[Features], ahead: int) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        for features in batches:
            r, p = (features.valid_steps > max(0, ahead - 1)).nonzero(as_tuple=True)
            taps = torch.cat([_unit(x.float()) for x in features.aux[r, p].chunk(self.num_aux, dim=-1)], dim=-1)
            embedded = [self.embedding[features.token_ids[r, p + 1 + k]].float() for k in range(ahead)]
            yield taps, embedded, [features.final_state[r, p + k].float() for k in range(ahead + 1)]


def _ridge(pairs: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """The ridge solution [inputs, outputs] over all pairs of rows."""
    gram = cross = None
    for x, y in pairs:
        if gram is None:
            gram, cross = torch.eye(x.shape[1], device=x.device) * _RIDGE, x.new_zeros(x.shape[1], y.shape[1])
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
    return torch.linalg.solve(gram, cross)


def _write_attention(draft: Eagle3Draft, layer_map: Tensor, seed: int) -> None:
    """`layer_map` [2H, H] through as many kv heads as its rank needs, the strongest directions first."""
    config = draft.config
    dim, groups = config.head_dim, config.num_heads // config.num_kv_heads
    left, scale, right = torch.linalg.svd(layer_map, full_matrices=False)
    used = min(-(-len(scale) // dim), config.num_kv_heads)
    rank = min(len(scale), used * dim)
    q, k, v = draft.qkv_proj.weight.split([config.num_heads * dim, *[config.num_kv_heads * dim] * 2])
    v[:rank] = (left[:, :rank] * scale[:rank].sqrt()).T
    v[rank : used * dim] = 0
    out = (scale[:rank].sqrt()[:, None] * right[:rank]).T
    draft.o_proj.weight.zero_()
    generator = torch.Generator().manual_seed(seed)
    for head in range(used):
        # Orthonormal rows: a unit-rms input of width 2H keeps rms 1 in each of the head's dimensions.
        mixed = torch.linalg.qr(torch.randn(layer_map.shape[0], dim, generator=generator))[0].T.to(q.device)
        mixed = mixed * (_SELF_SCORE / dim**0.5) ** 0.5
        k[head * dim : (head + 1) * dim] = mixed
        for member in range(head * groups, (head + 1) * groups):
            q[member * dim : (member + 1) * dim] = mixed
            columns = out[:, head * dim : (head + 1) * dim] / groups
            draft.o_proj.weight[:, member * dim : member * dim + columns.shape[1]] = columns


def _temperature(predicted: Tensor, state: Tensor, draft: Eagle3Draft, teacher: Teacher) -> float:
    """The scale with the lowest KL: a linear prediction is less certain than its unit length says."""
    sample = slice(0, 1024)
    log_p, _, _ = teacher.distribution(state[sample].to(teacher.head_WH.dtype))
    logits = F.linear(predicted[sample], draft.lm_head.weight.float())

    def divergence(scale: float) -> float:
        return float((log_p.exp() * (log_p - (logits * scale).log_softmax(-1))).sum(-1).mean())

    return min((0.05 * i for i in range(4, 31)), key=divergence)

"""A start from least squares: before the first gradient step the draft is a good predictor of the target's next state.

H hidden, D head dim, n(x) = x / rms(x), e(x) a token's embedding, f[p] the target's final state. On captured rows:

    fc        ridge regression n(taps[p]) -> f[p]: the feature g means the same as the state fed back later
    copying   a row's feature still tells its token, so two heads can look for earlier rows p' whose token x[p'] is the
              query's own x[p+1], and hand out x[p'+1]: query and key are canonical directions of e(x[p]) and n(g[p])
    attention ridge regression (n(e(x[p+1])), n(g[p]), what the two heads copied) -> f[p+1] / final norm weight,
              refitted on its own first predictions too. Its first two parts go through heads in which queries equal
              keys: a row finds itself, and its value is the linear map of its own input

The MLP starts at zero output and is free to learn.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from target_model.model import TargetModel
from train.attention import explicit_attention
from train.features import Features
from train.loss import Teacher

# Score, after 1 / sqrt(D), of a row with the one it looks for: the softmax is close to one-hot among hundreds of keys.
_MATCH = 12.0
_RIDGE = 30.0
_COPY_HEADS = 2
# Copying works up to about this distance: dims that RoPE turns by more than a radian over it are left out.
_REACH = 256


@torch.no_grad()
def start_from_regression(
    draft: Eagle3Draft, target: TargetModel, teacher: Teacher, batches: list[Features], seed: int
) -> None:
    """Overwrites fc, attention, MLP output and the scale of the final norm of a fresh draft, in place."""
    config = draft.config
    if not config.fc_norm or config.norm_before_residual or config.attention_bias or config.num_kv_heads < 3:
        raise UserError(
            "draft.initialisation=regression needs fc_norm=true, norm_before_residual=false, attention_bias=false "
            "and at least 3 kv heads"
        )
    norm_weight = target.norm.scale.float()
    draft.fc.weight.copy_(_ridge(_fc_pairs(draft, features) for features in batches).T)
    draft.qkv_proj.weight.zero_()
    _write_copy_heads(draft, batches)
    layer = _ridge(_Unrolled(draft, features).pair(0, norm_weight) for features in batches)

    def both_steps() -> Iterable[tuple[Tensor, Tensor]]:
        for features in batches:
            unrolled = _Unrolled(draft, features)
            yield unrolled.pair(0, norm_weight)
            unrolled.advance(_unit(unrolled.inputs @ layer) * norm_weight)
            yield unrolled.pair(1, norm_weight)

    layer = _ridge(both_steps())
    last = _Unrolled(draft, batches[-1])
    states, _ = last.pair(0, norm_weight)
    predicted = _unit(states @ layer) * norm_weight
    residual = float(last.feature.pow(2).mean().sqrt())
    layer[config.hidden_size : 2 * config.hidden_size].diagonal().sub_(residual)
    _write_self_heads(draft, layer[: 2 * config.hidden_size], seed)
    _write_output(draft, layer[2 * config.hidden_size :], _copy_heads(draft))
    draft.down_proj.weight.zero_()
    draft.norm.weight.mul_(_temperature(predicted, last.target_states(0), draft, teacher))


def _unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The ridge solution [inputs, outputs] over all pairs of rows."""
    gram = cross = None
    for x, y in pairs:
        if gram is None:
            gram, cross = torch.eye(x.shape[1], device=x.device) * _RIDGE, x.new_zeros(x.shape[1], y.shape[1])
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
    return torch.linalg.solve(gram, cross)


def _fc_pairs(draft: Eagle3Draft, features: Features) -> tuple[Tensor, Tensor]:
    rows = features.documents > 0
    taps = features.aux[rows].float().chunk(draft.config.num_aux, dim=-1)
    return torch.cat([_unit(tap) for tap in taps], dim=-1), features.final_state[rows].float()


class _Unrolled:
    """The draft's first two steps on a batch, up to attention; only the copying heads have weights yet.

    `inputs` [R, S, 2H + copied]: what the layer's linear map reads.
    """

    def __init__(self, draft: Eagle3Draft, features: Features):
        self.draft, self.features = draft, features
        self.k0 = self.v0 = None
        self.step = -1
        self.advance(draft.project(features.aux.float()))

    def advance(self, feature_RSH: Tensor) -> None:
        self.step += 1
        self.feature = feature_RSH
        features, shift = self.features, self.step + 1
        tokens = F.pad(features.token_ids[:, shift:], (0, shift))
        q, k, v, _ = self.draft.attention_inputs(tokens, feature_RSH, features.positions + shift)
        own = ([], []) if self.step == 0 else ([k], [v])
        if self.step == 0:
            self.k0, self.v0 = k, v
        scale = self.draft.config.head_dim**-0.5
        attended = explicit_attention(q, self.k0, self.v0, *own, features.documents, features.packed, scale)
        groups = self.draft.config.num_heads // self.draft.config.num_kv_heads
        copied = attended[:, :, [head * groups for head in _copy_heads(self.draft)]].flatten(-2)
        embedded = self.draft.embed_tokens(tokens)
        self.inputs = torch.cat([_unit(embedded), _unit(feature_RSH), copied], dim=-1)

    def pair(self, step: int, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and wanted outputs of the rows that count at `step`."""
        return self.inputs[self.features.valid_steps > step], self.target_states(step) / norm_weight

    def target_states(self, step: int) -> Tensor:
        rows, places = (self.features.valid_steps > step).nonzero(as_tuple=True)
        return self.features.final_state[rows, places + 1 + step].float()


def _copy_heads(draft: Eagle3Draft) -> range:
    return range(draft.config.num_kv_heads - _COPY_HEADS, draft.config.num_kv_heads)


def _write_copy_heads(draft: Eagle3Draft, batches: list[Features]) -> None:
    """Queries from the embedding, keys from the feature, along the directions in which they agree most."""
    config = draft.config
    hidden, dim = config.hidden_size, config.head_dim

    def moments() -> tuple[Tensor, Tensor, Tensor]:
        total = torch.zeros(3, hidden, hidden, device=draft.fc.weight.device)
        for features in batches:
            rows = features.documents > 0
            token = _unit(draft.embed_tokens(features.token_ids[rows]))
            feature = _unit(draft.project(features.aux[rows].float()))
            for i, (x, y) in enumerate(((token, token), (feature, feature), (token, feature))):
                total[i].addmm_(x.T, y)
        return tuple(total / sum(int((features.documents > 0).sum()) for features in batches))

    tokens, states, both = moments()
    ridge = 1e-3 * torch.eye(hidden, device=tokens.device)
    token_root, state_root = (torch.linalg.cholesky(x + ridge) for x in (tokens, states))
    whitened = torch.linalg.solve_triangular(token_root, both, upper=False)
    whitened = torch.linalg.solve_triangular(state_root, whitened.T, upper=False).T
    left, agreement, right = torch.linalg.svd(whitened)
    queries = torch.linalg.solve_triangular(token_root.T, left, upper=True).T
    keys = torch.linalg.solve_triangular(state_root.T, right.T, upper=True).T
    frequencies = config.rope_theta ** -(torch.arange(dim // 2) * 2 / dim)
    slow = (frequencies * _REACH < 1).nonzero()[:, 0]
    places = torch.cat([slow, slow + dim // 2])
    values = torch.linalg.eigh(tokens).eigenvectors.T.flip(0)
    # The first direction only says that both inputs have a mean.
    start = 1
    for number, head in enumerate(_copy_heads(draft)):
        chosen = slice(start, start + len(places))
        strength = math.sqrt(_MATCH * math.sqrt(dim) / float(agreement[chosen].sum()))
        q, k, v = (torch.zeros(dim, 2 * hidden, device=tokens.device) for _ in range(3))
        q[places[: len(queries[chosen])], :hidden] = queries[chosen] * strength
        k[places[: len(keys[chosen])], hidden:] = keys[chosen] * strength
        v[:, :hidden] = values[number * dim : (number + 1) * dim]
        _write_head(draft, head, q, k, v)
        start = chosen.stop


def _write_self_heads(draft: Eagle3Draft, layer_map: Tensor, seed: int) -> None:
    """`layer_map` [2H, H] through the heads that do not copy, the strongest directions first."""
    dim = draft.config.head_dim
    left, scale, right = torch.linalg.svd(layer_map, full_matrices=False)
    heads = range(min(-(-len(scale) // dim), draft.config.num_kv_heads - _COPY_HEADS))
    rank = min(len(scale), len(heads) * dim)
    values = torch.zeros(len(heads) * dim, layer_map.shape[0], device=layer_map.device)
    values[:rank] = (left[:, :rank] * scale[:rank].sqrt()).T
    outputs = torch.zeros(len(heads) * dim, layer_map.shape[1], device=layer_map.device)
    outputs[:rank] = scale[:rank].sqrt()[:, None] * right[:rank]
    generator = torch.Generator().manual_seed(seed)
    for head in heads:
        # Orthonormal rows: an input of unit rms keeps rms 1 in each of the head's dimensions.
        mixed = torch.linalg.qr(torch.randn(layer_map.shape[0], dim, generator=generator))[0].T.to(layer_map.device)
        mixed = mixed * math.sqrt(_MATCH / math.sqrt(dim))
        _write_head(draft, head, mixed, mixed, values[head * dim : (head + 1) * dim])
    draft.o_proj.weight.zero_()
    _write_output(draft, outputs, heads)


def _write_head(draft: Eagle3Draft, head: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """One kv head and, alike, all query heads that share it; each [D, 2H]."""
    config = draft.config
    dim, groups = config.head_dim, config.num_heads // config.num_kv_heads
    queries, keys, values = draft.qkv_proj.weight.split([config.num_heads * dim, *[config.num_kv_heads * dim] * 2])
    queries.view(config.num_kv_heads, groups, dim, -1)[head] = q
    keys.view(config.num_kv_heads, dim, -1)[head] = k
    values.view(config.num_kv_heads, dim, -1)[head] = v


def _write_output(draft: Eagle3Draft, outputs: Tensor, heads: Iterable[int]) -> None:
    """Output projection [heads * D, H] of some kv heads, shared out among their query heads."""
    config = draft.config
    dim, groups = config.head_dim, config.num_heads // config.num_kv_heads
    places = draft.o_proj.weight.view(config.hidden_size, config.num_kv_heads, groups, dim)
    for head, part in zip(heads, outputs.split(dim), strict=True):
        places[:, head] = part.T[:, None] / groups


def _temperature(predicted: Tensor, state: Tensor, draft: Eagle3Draft, teacher: Teacher) -> float:
    """The scale with the lowest KL: a linear prediction is less certain than its unit length says."""
    sample = slice(0, 1024)
    log_p, _, _ = teacher.distribution(state[sample].to(teacher.head_WH.dtype))
    logits = F.linear(predicted[sample], draft.lm_head.weight.float())

    def divergence(scale: float) -> float:
        return float((log_p.exp() * (log_p - (logits * scale).log_softmax(-1))).sum(-1).mean())

    return min((0.05 * i for i in range(4, 31)), key=divergence)

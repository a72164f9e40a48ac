"""The EAGLE-3 draft: one Llama layer over the target's taps, which predicts the token after next.

Shapes: T rows (any leading dimensions in training), A = taps * target hidden, H hidden, Q query heads, K kv heads, D
head dim, V draft vocabulary. Row t reads the token x[t] and the taps of position t - 1, sits at RoPE position t and
predicts x[t + 1]:

    g      = fc(concat(fc_norm_i(tap_i)))          or, at later draft steps, the fed-back state
    input  = concat(input_layernorm(embed(x[t])), hidden_norm(g))            [2H]
    h      = residual + attention(input), residual = g, or hidden_norm(g) with norm_before_residual
    h      = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h)); the fed-back state is h, or norm(h) with norm_output
"""

import functools

import torch
from torch import Tensor, nn

from draft_model.config import DraftConfig
from target_model.batch import Batch
from target_model.cache import DraftKVShape, LayerCache
from target_model.kernels import ops


class Eagle3Draft(nn.Module):
    """q, k, v and gate, up are stored packed (fewer launches); `checkpoint.py` splits them into the published names."""

    d2t: Tensor | None

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        hidden, heads_dim = config.hidden_size, config.num_heads * config.head_dim
        packed = heads_dim + 2 * config.num_kv_heads * config.head_dim

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=config.rms_norm_eps)

        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        taps = config.num_aux if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(norm(config.target_hidden_size) for _ in range(taps))
        self.fc = nn.Linear(config.num_aux * config.target_hidden_size, hidden, bias=False)
        self.input_layernorm, self.hidden_norm = norm(hidden), norm(hidden)
        self.qkv_proj = nn.Linear(2 * hidden, packed, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads_dim, hidden, bias=config.attention_bias)
        self.post_attention_layernorm = norm(hidden)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.norm = norm(hidden)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        # d2t[i] = target id - i of draft id i, as published; absent for a full vocabulary.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.pruned else None)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype  # the products' weights may be quantised

    @property
    def kv_shape(self) -> DraftKVShape:
        """What the serving cache keeps for one token of the draft."""
        return DraftKVShape(self.config.num_kv_heads, self.config.head_dim, self.dtype)

    def project(self, aux_TA: Tensor) -> Tensor:
        """The layer's feature from the target's taps, concatenated in the order of `config.taps`: [T, A] -> [T, H], in
        the draft's own precision.
        """
        aux_TA = aux_TA.to(self.dtype)
        if self.config.fc_norm:
            parts = aux_TA.chunk(self.config.num_aux, dim=-1)
            aux_TA = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_TA)

    def attention_inputs(
        self, token_ids_T: Tensor, feature_TH: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [T, Q, D], k and v [T, K, D] (q and k rotated to `positions_T`) and the residual [T, H]."""
        config = self.config
        normed_TH = self.hidden_norm(feature_TH)
        residual_TH = normed_TH if config.norm_before_residual else feature_TH
        packed = self.qkv_proj(torch.cat([self.input_layernorm(self.embed_tokens(token_ids_T)), normed_TH], dim=-1))
        heads, counts = packed.unflatten(-1, (-1, config.head_dim)), (config.num_heads, config.num_kv_heads)
        return *ops.rotate_heads(heads, positions_T, self._frequencies(heads.device), *counts), residual_TH

    def _frequencies(self, device: torch.device) -> Tensor:
        return _rope_frequencies(self.config.head_dim, self.config.rope_theta, device)

    def attention_output(self, attended_TQD: Tensor, residual_TH: Tensor) -> Tensor:
        """The layer behind attention: output projection, residual, MLP. Returns h [T, H]."""
        state_TH = residual_TH + self.o_proj(attended_TQD.flatten(-2))
        return state_TH + self.down_proj(ops.silu_product(self.gate_up_proj(self.post_attention_layernorm(state_TH))))

    def forward(self, batch: Batch, feature_TH: Tensor, cache: LayerCache, blocks_TKN: Tensor | None = None) -> Tensor:
        """One served draft step: writes the rows' K and V into the draft's cache, attends through it, returns h [T, H].

        Row of the token at position t: slot t (slot 0 holds nothing), feature of position t - 1. With `blocks_TKN` it
        attends to these blocks (int32, ascending, -1 behind) and all visible guessed rows only. The same as
        `attention_inputs` and `attention_output`, in fewer and fused operations without gradients.
        """
        config = self.config
        scales = self.input_layernorm.weight, self.hidden_norm.weight
        inputs = ops.dual_norm(self.embed_tokens(batch.token_ids), feature_TH, *scales, config.rms_norm_eps)
        residual_TH = inputs[:, config.hidden_size :].contiguous() if config.norm_before_residual else feature_TH
        packed = self.qkv_proj(inputs).unflatten(-1, (-1, config.head_dim))
        q_TQD = ops.rope_write(packed, self._frequencies(packed.device), config.num_heads, cache.k, cache.v, batch)
        scale = config.head_dim**-0.5
        if blocks_TKN is None:
            attended_TQD = ops.paged_attention(q_TQD, cache.k, cache.v, batch, scale, first_slot=1)
        else:
            attended_TQD = ops.sparse_attention(
                q_TQD, cache.k, cache.v, blocks_TKN, batch, scale, first_slot=1, scratch_chosen=False
            )
        attended_TH, post_scale = self.o_proj(attended_TQD.flatten(1)), self.post_attention_layernorm.weight
        normed_TH, state_TH = ops.add_norm(attended_TH, residual_TH, post_scale, config.rms_norm_eps)
        return state_TH + self.down_proj(ops.silu_product(self.gate_up_proj(normed_TH)))

    def next_feature(self, state_TH: Tensor) -> Tensor:
        """What the next draft step takes in place of g."""
        return self.norm(state_TH) if self.config.norm_output else state_TH

    def scores(self, state_TH: Tensor) -> Tensor:
        """Logits over the draft's vocabulary, [T, V], in the dtype of the weights."""
        return self.lm_head(self.norm(state_TH))

    def logits(self, state_TH: Tensor) -> Tensor:
        """The same in fp32."""
        return self.scores(state_TH).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the draft's."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


@functools.cache
def _rope_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """fp32 [dim / 2]. Not a buffer of the module: casting that to bf16 would ruin the angles of long contexts."""
    with torch.inference_mode(False):  # training reads the same table
        return theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)

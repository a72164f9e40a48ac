"""What a step has to read from memory, and the speed-up that this promises.

At small batches a step waits for weights and cache to be read. Of a target: everything dense once; of the routed
experts those that some token chose, with independent routing E * (1 - (1 - k / E) ** n) of E for n tokens of k each; of
the cache K and V of full layers, of sparse layers the chosen blocks (a tree's nodes counted once: they choose nearly
the same ones), and index keys where there is a choice. Of a draft: fc once, its layer, head and cache at every level.
Single rows (embedding, activations, logits) are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from draft_model.model import Eagle3Draft
from serve.tree import TreeConfig
from target_model.config import M3Config
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import Format
from target_model.tensor_names import text_specs


@dataclass(frozen=True)
class TargetBytes:
    """dense, routed: bytes of the weights that every pass reads, and of all routed experts together. element: bytes of
    a number in the cache.
    """

    config: M3Config
    dense: int
    routed: int
    element: int

    @staticmethod
    def of(config: M3Config, element: int, formats: Mapping[str, Format]) -> "TargetBytes":
        """From the config; parameters in `formats` are quantised, the others take `element` bytes a number."""
        sizes = {"dense": 0, "routed": 0}
        for spec in text_specs(config):
            form = formats.get(spec.destination)
            plain = spec.size * (element if spec.kind == "weight" else 4)
            if spec.part != "embed_tokens":
                kind = "dense" if spec.expert is None else "routed"
                sizes[kind] += plain if form is None else form.bytes(spec.shape)
        return TargetBytes(config, **sizes, element=element)

    def step(self, nodes: int, batch: int, context: int) -> float:
        """Of one pass over `nodes` tokens of each of `batch` sequences behind `context` tokens."""
        config = self.config
        unread = (1 - config.experts_per_token / config.num_experts) ** (nodes * batch)
        return self.dense + self.routed * (1 - unread) + batch * self._cache(context)

    def _cache(self, context: int) -> int:
        config = self.config
        chosen = min(context, config.top_k_blocks * config.block_size)
        numbers = 0
        for sparse, reuses in zip(config.sparse_layers, config.reuses_blocks, strict=True):
            numbers += 2 * config.num_kv_heads * config.head_dim * (chosen if sparse else context)
            if sparse and not reuses and chosen < context:
                numbers += config.index_dim * context
        return numbers * self.element


@dataclass(frozen=True)
class DraftBytes:
    """once: fc. level: layer and head. token: K and V of one token. reach: tokens that a row attends to at most, None:
    all.
    """

    once: int
    level: int
    token: int
    reach: int | None

    @staticmethod
    def of(draft: Eagle3Draft, target: M3Config, attention: str) -> "DraftBytes":
        """As its weights lie in memory; `attention` as the engine's `draft_attention`."""
        layer = (draft.qkv_proj, draft.o_proj, draft.gate_up_proj, draft.down_proj, draft.lm_head)
        shape = draft.kv_shape
        reach = None if attention == "full" else (target.top_k_blocks + 1) * target.block_size
        token = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        return DraftBytes(stored_bytes(draft.fc), sum(map(stored_bytes, layer)), token, reach)

    def step(self, shape: TreeConfig, batch: int, context: int) -> int:
        """Of drafting: the rows of the decided tokens are the first level."""
        levels = min(shape.depth, shape.nodes - 1)
        read = context if self.reach is None else min(context, self.reach)
        return self.once + levels * (self.level + batch * read * self.token)


def stored_bytes(module: nn.Module) -> int:
    """Of a module's parameters, as they lie in memory."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def loaded_formats(target: nn.Module) -> dict[str, Format]:
    """Formats of a target's quantised parameters, by their names."""
    return {name: module.form for name, module in target.named_modules() if isinstance(module, QuantisedWeight)}


def promised(
    target: TargetBytes, draft: DraftBytes, length: float, shape: TreeConfig, batch: int, context: int
) -> float:
    """Speed-up over plain decoding by bytes, at an acceptance length."""
    step = target.step(shape.nodes, batch, context) + draft.step(shape, batch, context)
    return length * target.step(1, batch, context) / step

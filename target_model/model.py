"""MiniMax-M3 over a paged cache, frozen: for serving, and for capturing what a draft learns from.

Shapes: T rows of a batch, R sequences, S positions, H hidden, V vocabulary, A = taps * H, J index heads, N chosen
blocks.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from target_model.attention import Attention
from target_model.batch import Batch
from target_model.cache import DraftKVShape, LayerCache, PagedCache, TransientCache
from target_model.config import M3Config
from target_model.kernels import ops
from target_model.layers import DenseMLP, GemmaRMSNorm, Rotary, empty, rms_norm
from target_model.moe import MixtureOfExperts
from target_model.quantised import quantise_parameters
from target_model.quantised_formats import Format
from target_model.vision import VisionTower


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass hands back.

    final_state [T, H]  after the final norm: the output head applies directly
    aux [T, A]          the residual stream entering each tapped layer, concatenated in the order of the taps; [T, 0]
                        without taps
    """

    final_state: Tensor
    aux: Tensor


@dataclass
class Recorder:
    """Collects the inside of one forward pass; with `choice_of` only the blocks in force behind that layer, None while
    every block is chosen (otherwise a choice is made even then).

    hidden_states  [T, H] each: entry i is the residual stream entering layer i, the last entry what leaves the last
                   layer
    blocks         by layer: int32 [T, J, N], the block ids chosen there, ascending, -1 behind the last
    """

    hidden_states: list[Tensor] = field(default_factory=list)
    blocks: dict[int, Tensor | None] = field(default_factory=dict)
    choice_of: int | None = None

    @property
    def complete(self) -> bool:
        return self.choice_of is None


def record_graph(run: Callable[[], None], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
    """What `run` does on the device, as a graph. It has run before: nothing is compiled or set up in a capture."""
    graph = torch.cuda.CUDAGraph()
    # Another thread of the server may use the device meanwhile.
    with _garbage_waits(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """What belonged to a dropped engine asks the device when it is freed, and that ends a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class DecoderLayer(nn.Module):
    """Attention and MLP; each reads a normalised copy of the residual stream, and its output is added to the stream.

    An addition and the norm behind it are one step, so a layer takes its input normalised (by `attention_scale`) and
    hands its output on normalised for whoever comes next.
    """

    def __init__(self, config: M3Config, layer: int, dtype: torch.dtype):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attention_scale = empty(config.hidden_size, dtype=torch.float32)
        self.attention = Attention(config, layer, dtype)
        self.mlp_scale = empty(config.hidden_size, dtype=torch.float32)
        moe = config.moe_layers[layer]
        self.mlp = MixtureOfExperts(config, dtype) if moe else DenseMLP(config, config.dense_width, dtype)

    def forward(
        self,
        normed_TH: Tensor,
        residual_TH: Tensor,
        next_scale_H: Tensor,
        batch: Batch,
        cache: LayerCache,
        cos_sin: tuple[Tensor, Tensor],
        blocks_TJN: Tensor | None,
        need_blocks: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(input of the next norm's reader, residual stream leaving this layer, blocks in force)."""
        attended, blocks_TJN = self.attention(normed_TH, batch, cache, cos_sin, blocks_TJN, need_blocks)
        normed_TH, residual_TH = ops.add_norm(attended, residual_TH, self.mlp_scale, self.eps)
        normed_TH, residual_TH = ops.add_norm(self.mlp(normed_TH), residual_TH, next_scale_H, self.eps)
        return normed_TH, residual_TH, blocks_TJN


class TargetModel(nn.Module):
    """The frozen target. Built without storage; `materialise` gives it (uninitialised) storage, `checkpoint.py` fills
    it.

    `vision` is the tower that turns images into rows, None in a language-only model. `formats` names the parameters
    that stay quantised in memory.
    """

    vision: VisionTower | None
    first_layer = 0  # which layer of the whole target `layers` begin with: a stage of a pipeline begins later

    def __init__(
        self,
        config: M3Config,
        dtype: torch.dtype = torch.float32,
        *,
        vision: bool = False,
        formats: Mapping[str, Format] | None = None,
    ):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.whole = config  # of the whole target, where this is a part of it
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = GemmaRMSNorm(config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
            self.rotary = Rotary(config)
            self.vision = VisionTower(config.vision, config.hidden_size, dtype) if vision else None
            quantise_parameters(self, formats or {})
        self.requires_grad_(False)
        self.eval()

    def materialise(self, device: torch.device | str) -> None:
        """Allocates every parameter on `device`, with whatever the memory holds."""
        self.to_empty(device=device)
        self.rotary.reset_table()

    @property
    def device(self) -> torch.device:
        return self.rotary.inverse_frequency.device

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        cache: PagedCache | TransientCache,
        taps: Sequence[int] = (),
        recorder: Recorder | None = None,
    ) -> TargetOutput:
        """Runs the rows of `batch`, writing their keys and values into `cache`. Tap t is the residual stream entering
        layer t.
        """
        normed_TH, _, _, tapped = self.run_layers(self.embed(batch), None, batch, cache, taps, recorder)
        return TargetOutput(normed_TH, torch.cat(tapped, dim=-1) if taps else normed_TH[:, :0])

    def run_layers(
        self,
        residual_TH: Tensor,
        blocks_TJN: Tensor | None,
        batch: Batch,
        cache: PagedCache | TransientCache,
        taps: Sequence[int],
        recorder: Recorder | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """The layers, over the residual stream and the block choice that enter the first of them.

        What leaves the last one: normalised by the final norm, as it is, the block choice; and the taps in their order.
        """
        cos_sin = self.rotary(batch.positions)
        scales = [layer.attention_scale for layer in self.layers] + [self.norm.scale]
        normed_TH = rms_norm(residual_TH, scales[0], self.config.rms_norm_eps)
        tapped, complete = {}, recorder is not None and recorder.complete
        for index, layer in enumerate(self.layers):
            number = self.first_layer + index
            if number in taps:
                tapped[number] = residual_TH
            if complete:
                recorder.hidden_states.append(residual_TH)
            normed_TH, residual_TH, blocks_TJN = layer(
                normed_TH,
                residual_TH,
                scales[index + 1],
                batch,
                cache.layer(index),
                cos_sin,
                blocks_TJN,
                complete,
            )
            if recorder is not None and (complete and self.config.sparse_layers[index] or number == recorder.choice_of):
                recorder.blocks[number] = blocks_TJN
        if complete:
            recorder.hidden_states.append(residual_TH)
        return normed_TH, residual_TH, blocks_TJN, [tapped[tap] for tap in taps]

    def make_cache(
        self,
        pages: int,
        *,
        draft: DraftKVShape | None = None,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> PagedCache:
        """An empty cache for the layers and heads that are held here; see PagedCache."""
        return PagedCache(
            self.config,
            pages,
            dtype=self.dtype,
            device=self.device,
            draft=draft,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
        )

    def embed(self, batch: Batch) -> Tensor:
        """What the first layer reads, [T, H]: embeddings of the token ids, and the features of image rows."""
        embedded_TH = self.embed_tokens(batch.token_ids)
        if batch.image_rows is None:
            return embedded_TH
        return embedded_TH.index_copy(0, batch.image_rows, batch.image_features.to(embedded_TH.dtype))

    @torch.no_grad()
    def scores(self, final_state: Tensor) -> Tensor:
        """Scores over the vocabulary, [.., H] -> [.., V], of states behind the final norm, in their dtype."""
        return self.lm_head(final_state)

    def logits(self, final_state: Tensor) -> Tensor:
        """The same in fp32."""
        return self.scores(final_state).float()

    def make_graph(self, run: Callable[[], None], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
        """What `run` asks of this model and does besides, as a CUDA graph in that pool of memory."""
        return record_graph(run, pool)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Runs such a graph once more."""
        graph.replay()

    @torch.no_grad()
    def capture(
        self, token_ids_RS: Tensor, taps: Sequence[int], recorder: Recorder | None = None
    ) -> tuple[Tensor, Tensor]:
        """Final states [R, S, H] and taps [R, S, A] of whole sequences from position 0.

        Attention is causal, so padding on the right changes no row before it.
        """
        self.whole.check_taps(taps)
        sequences, length = token_ids_RS.shape
        batch = Batch.whole(self.config.block_size, token_ids_RS.to(self.device))
        cache = TransientCache(self.config, batch.block_table.numel(), dtype=self.dtype, device=self.device)
        output = self(batch, cache, taps, recorder)
        shape = (sequences, length)
        return output.final_state.unflatten(0, shape), output.aux.unflatten(0, shape)

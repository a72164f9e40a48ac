"""The target equals transformers' MiniMaxM3SparseForConditionalGeneration, both in fp32.

Compared are logits, the states entering every layer, the blocks that MSA chooses, and greedy text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache
from transformers.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

import spec
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.checkpoint import load_target
from target_model.model import Recorder, TargetModel
from target_model.resolve import BUNDLED
from tests.fixtures import TINY_VISION, tiny_config, write_checkpoint

TOLERANCE = 1e-4
# Three shapes beside m3-tiny: other head counts, widths, blocks and top-k, one with more MoE than sparse layers.
SHAPES = {
    "t0": {"vision": TINY_VISION},
    "one_kv_head": {
        "vision": TINY_VISION,
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 1,
        "head_dim": 24,
        "rotary_dim": 24,
        "block_size": 4,
        "top_k_blocks": 5,
        "local_blocks": 2,
        "num_experts": 6,
        "experts_per_token": 3,
    },
    "four_kv_heads": {
        "vision": TINY_VISION,
        "num_layers": 5,
        "num_heads": 8,
        "num_kv_heads": 4,
        "rotary_dim": 4,
        "block_size": 16,
        "top_k_blocks": 3,
        "shared_width": 32,
        "routed_scaling_factor": 1.5,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.5,
        "sparse_layers": (False, True, True, False, True),
        "moe_layers": (True, False, True, True, True),
    },
}


@dataclass(frozen=True)
class Pair:
    """The same checkpoint in both implementations, and long enough token ids to read."""

    ours: TargetModel
    theirs: MiniMaxM3SparseForConditionalGeneration
    ids: list[int]


def load_pair(directory: Path, ids: list[int]) -> Pair:
    theirs = MiniMaxM3SparseForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    return Pair(load_target(directory), theirs, ids)


@pytest.fixture(scope="module")
def m3_tiny() -> Pair:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "m3-tiny" / "tokenizer.json"))
    prompts = (Path(spec.__file__).parent / "prompts" / "humaneval.jsonl").read_text().splitlines()
    text = "\n".join(json.loads(line)["turns"][0] for line in prompts[:4])
    return load_pair(BUNDLED / "m3-tiny", tokenizer.encode(text).ids)


@pytest.fixture(scope="module")
def random_pairs(tmp_path_factory) -> dict[str, Pair]:
    pairs = {}
    for seed, (name, overrides) in enumerate(SHAPES.items()):
        config = tiny_config(**overrides)
        directory = write_checkpoint(config, tmp_path_factory.mktemp(name), seed)
        generator = torch.Generator().manual_seed(seed)
        pairs[name] = load_pair(directory, torch.randint(config.vocab_size, (200,), generator=generator).tolist())
    return pairs


@pytest.fixture(params=["m3-tiny", *SHAPES])
def pair(request) -> Pair:
    if request.param == "m3-tiny":
        return request.getfixturevalue("m3_tiny")
    return request.getfixturevalue("random_pairs")[request.param]


@torch.no_grad()
def theirs_forward(pair: Pair, ids: list[int]) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    """Logits [S, V], the states entering each layer with the final normed state behind them, the blocks by layer."""
    blocks: dict[int, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda indexer, _, chosen: blocks.update({indexer.layer_idx: chosen[0]}))
        for module in pair.theirs.modules()
        if isinstance(module, MiniMaxM3VLIndexer)
    ]
    out = pair.theirs(input_ids=torch.tensor([ids]), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return out.logits[0], [state[0] for state in out.hidden_states], blocks


def paged(pair: Pair, sequences: int, length: int) -> tuple[PagedCache, list[list[int]]]:
    """A cache whose pages are dealt to the sequences in turn, so that no sequence has consecutive ones."""
    pages = -(-length // pair.ours.config.block_size)
    cache = PagedCache(pair.ours.config, sequences * pages, dtype=torch.float32, device="cpu")
    return cache, [list(range(r, sequences * pages, sequences)) for r in range(sequences)]


def assert_rows_equal(pair: Pair, recorder: Recorder, final: Tensor, rows: slice, ids: list[int], first: int) -> None:
    """Rows `rows` of our pass are positions `first`.. of the sequence `ids`."""
    logits, states, blocks = theirs_forward(pair, ids)
    theirs = slice(first, len(ids))
    assert (pair.ours.logits(final[rows]) - logits[theirs]).abs().max() < TOLERANCE
    ours = [*recorder.hidden_states[:-1], final]
    assert len(ours) == len(states)
    for layer, (mine, other) in enumerate(zip(ours, states, strict=True)):
        assert (mine[rows] - other[theirs]).abs().max() < TOLERANCE, f"state entering layer {layer}"
    assert set(recorder.blocks) == set(blocks) != set()
    for layer, chosen_JSN in blocks.items():
        assert torch.equal(as_sets(recorder.blocks[layer][rows]), as_sets(chosen_JSN.transpose(0, 1)[theirs])), layer


def as_sets(blocks: Tensor) -> Tensor:
    """[..., N] block ids, -1 for none -> bool [..., 64]."""
    return torch.nn.functional.one_hot(blocks.long() + 1, 65)[..., 1:].amax(-2).bool()


def beyond_top_k(pair: Pair, lengths: list[int]) -> float:
    """Share of the rows that see more blocks than they may choose."""
    reach = pair.ours.config.block_size * pair.ours.config.top_k_blocks
    return sum(max(length - reach, 0) for length in lengths) / sum(lengths)


def test_ragged_prefill(pair: Pair):
    """Several sequences in one batch, their lengths around block edges."""
    block, reach = pair.ours.config.block_size, pair.ours.config.block_size * pair.ours.config.top_k_blocks
    lengths = [3 * reach + 1, 2 * reach + block - 1, block, 1, 3 * reach]
    sequences = [pair.ids[r : r + length] for r, length in enumerate(lengths)]
    assert [len(ids) for ids in sequences] == lengths and beyond_top_k(pair, lengths) > 0.5
    cache, tables = paged(pair, len(lengths), max(lengths))
    recorder = Recorder()
    batch = Batch.causal(block, "cpu", sequences, [0] * len(lengths), tables)
    final = pair.ours(batch, cache, recorder=recorder).final_state
    row = 0
    for ids in sequences:
        assert_rows_equal(pair, recorder, final, slice(row, row + len(ids)), ids, 0)
        row += len(ids)


def test_chunks_and_decode(pair: Pair):
    """Two sequences in chunks of unequal size, then token by token over block edges; each row as in one whole pass."""
    block, reach = pair.ours.config.block_size, pair.ours.config.block_size * pair.ours.config.top_k_blocks
    lengths = [2 * reach + 4 * block, 2 * reach + 3 * block + 4]
    sequences = [pair.ids[r : r + length] for r, length in enumerate(lengths)]
    cache, tables = paged(pair, 2, max(lengths))
    starts = [0, 0]
    sizes = [[2 * reach + block - 1, 2 * reach + 2], [2, block], *[[1, 1]] * (block + 2)]
    checked = 0
    for step in sizes:
        chunks = [ids[start : start + size] for ids, start, size in zip(sequences, starts, step, strict=True)]
        recorder = Recorder()
        final = pair.ours(Batch.causal(block, "cpu", chunks, starts, tables), cache, recorder=recorder).final_state
        row = 0
        for r, chunk in enumerate(chunks):
            ids = sequences[r][: starts[r] + len(chunk)]
            assert_rows_equal(pair, recorder, final, slice(row, row + len(chunk)), ids, starts[r])
            row += len(chunk)
            starts[r] += len(chunk)
            checked += 1
    assert checked == 2 * len(sizes) and beyond_top_k(pair, starts) > 0.5


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_their_incremental_decode(pair: Pair):
    """transformers with its own cache, one token at a time, agrees with our cached decode."""
    block = pair.ours.config.block_size
    start = 2 * block * pair.ours.config.top_k_blocks + block - 2
    cache, tables = paged(pair, 1, start + 6)
    their_cache = DynamicCache(config=pair.theirs.config)
    position = 0
    for chunk in [pair.ids[:start], *[[token] for token in pair.ids[start : start + 5]]]:
        with torch.no_grad():
            theirs = pair.theirs(input_ids=torch.tensor([chunk]), past_key_values=their_cache).logits[0]
        ours = pair.ours(Batch.causal(block, "cpu", [chunk], [position], tables), cache)
        assert (pair.ours.logits(ours.final_state) - theirs).abs().max() < TOLERANCE
        position += len(chunk)


@pytest.mark.parametrize("prompt_length", [9, 150])
def test_greedy_text(m3_tiny: Pair, prompt_length: int):
    """200 greedy tokens equal those of transformers' generate, past the length at which MSA leaves blocks out."""
    prompt, count = m3_tiny.ids[:prompt_length], 200
    m3_tiny.theirs.generation_config.eos_token_id = None
    theirs = m3_tiny.theirs.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
    cache, tables = paged(m3_tiny, 1, prompt_length + count)
    ours, chunk = list(prompt), prompt
    while len(ours) < prompt_length + count:
        batch = Batch.causal(m3_tiny.ours.config.block_size, "cpu", [chunk], [len(ours) - len(chunk)], tables)
        final = m3_tiny.ours(batch, cache).final_state
        chunk = [int(m3_tiny.ours.logits(final[-1]).argmax())]
        ours += chunk
    assert ours == theirs
    assert beyond_top_k(m3_tiny, [len(ours)]) > 0.3


def test_capture_equals_whole_pass(pair: Pair):
    """The capture for training: right padding changes nothing, taps are the states entering the named layers."""
    length = pair.ours.config.block_size * (pair.ours.config.top_k_blocks + 2) + 3
    ids = torch.tensor([pair.ids[:length], pair.ids[1 : length - 6] + [0] * 7])
    final_RSH, aux_RSA = pair.ours.capture(ids, (1, 3, 4))
    for row, real in ((0, length), (1, length - 7)):
        logits, states, _ = theirs_forward(pair, ids[row, :real].tolist())
        assert (pair.ours.logits(final_RSH[row, :real]) - logits).abs().max() < TOLERANCE
        taps = torch.cat([states[1], states[3], states[4]], dim=-1)
        assert (aux_RSA[row, :real] - taps).abs().max() < TOLERANCE

"""What quantised weights and fp8 caches cost in quality: error of the weights, perplexity, agreement and acceptance.

The formats are made from a plain checkpoint, and read back, in a temporary directory. Shapes: S tokens of a row, V
vocabulary.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from spec.bench.tables import number
from spec.pair import Pair
from spec.suites import HELD_OUT, load_suite
from target_model.batch import MAX_SCRATCH, Batch
from target_model.cache import PagedCache
from target_model.checkpoint import load_target
from target_model.errors import UserError, write_json
from target_model.model import TargetModel
from target_model.quantise_checkpoint import quantise_checkpoint
from target_model.quantised import QuantisedWeight
from target_model.tokenizer import Tokenizer

FP8 = torch.float8_e4m3fn
# (weights, cache: what is fp8 in it)
CASES = (
    ("bf16", ""),
    ("mxfp8", ""),
    ("mxfp4", ""),
    ("nvfp4", ""),
    ("bf16", "KV"),
    ("bf16", "index K"),
    ("bf16", "KV, index K"),
    ("mxfp8", "KV"),
    ("mxfp4", "KV"),
)
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Result:
    """One case.

    weight_error  root mean square of the difference that storing makes to the quantised weights, relative to theirs
    perplexity    over the tokens that a model has to produce
    agreement     share of those tokens where the most likely one is as without any quantisation
    acceptance    AL of the draft, greedy, on held-out prompts; None without a draft
    """

    weights: str
    cache: str
    megabytes: float
    weight_error: float
    perplexity: float
    agreement: float
    acceptance: float | None


@dataclass(frozen=True)
class _Row:
    token_ids: list[int]
    produced: list[bool]


def run(target: str, draft: str | None, rows: int, prompts: int, tokens: int, json_path: Path | None) -> list[Result]:
    """Measures every case and prints the table. fp32 arithmetic on the CPU: only storage differs between the cases."""
    console = Console(highlight=False)
    engine, tokenizer, about = load_engine(EngineOptions(target, draft, device="cpu", pages=MAX_SCRATCH))
    plain = engine.runner.target
    pair = None if draft is None else Pair(plain, engine.runner.drafter.draft, tokenizer, "")
    texts = _texts(tokenizer, rows, tokens)
    reference = [choices for choices, _ in _score(plain, texts, "")]
    results = []
    with tempfile.TemporaryDirectory() as work:
        for weights, cache in CASES:
            model = plain if weights == "bf16" else _quantised(target, Path(work), weights)
            perplexity, agreement = _quality(model, texts, cache, reference)
            acceptance = None if pair is None else _acceptance(model, pair, cache, prompts)
            error = weight_error(model, plain)
            results.append(Result(weights, cache, _megabytes(model), error, perplexity, agreement, acceptance))
    produced = sum(sum(row.produced[1:]) for row in texts)
    console.print("\n".join(about.lines[:2]))
    console.print(_table(results, f"{target}: {len(texts)} rows, {produced:,} tokens; AL on {prompts} prompts"))
    if json_path is not None:
        write_json(json_path, [asdict(result) for result in results])
    return results


def _quality(model: TargetModel, texts: list[_Row], cache: str, reference: list[Tensor]) -> tuple[float, float]:
    """Perplexity and agreement."""
    loss, same, count = 0.0, 0, 0
    for (choices, losses), expected in zip(_score(model, texts, cache), reference, strict=True):
        loss += losses.sum().item()
        same += int((choices == expected).sum())
        count += len(choices)
    return math.exp(loss / count), same / count


def _megabytes(model: TargetModel) -> float:
    """Of the language model, with what is not quantised in bf16."""
    return sum(p.numel() * min(p.element_size(), 2) for p in model.parameters()) / 10**6


def weight_error(quantised: TargetModel, plain: TargetModel) -> float:
    """Relative root mean square difference over all weights that are quantised; 0 when none is."""
    difference = total = 0.0
    for name, module in quantised.named_modules():
        if isinstance(module, QuantisedWeight):
            original = plain.get_parameter(name)
            for index in range(module.shape[0]) if len(module.shape) == 3 else [slice(None)]:
                difference += (module.dequantised(index, torch.float32) - original[index]).square().sum().item()
                total += original[index].square().sum().item()
    return math.sqrt(difference / total) if total else 0.0


def _quantised(target: str, work: Path, weights: str) -> TargetModel:
    directory = work / weights
    if not directory.exists():
        quantise_checkpoint(target, directory, weights)
    return load_target(directory)


def cache_types(cache: str) -> dict[str, torch.dtype]:
    """Arguments of the cache for a case."""
    chosen = cache.split(", ")
    return {name: FP8 for name, part in (("kv_dtype", "KV"), ("index_dtype", "index K")) if part in chosen}


@torch.inference_mode()
def _score(model: TargetModel, texts: list[_Row], cache: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(most likely tokens, negative log-likelihoods) of the tokens to produce, row by row."""
    block = model.config.block_size
    for row in texts:
        pages = -(-len(row.token_ids) // block)
        pool = PagedCache(model.config, pages, dtype=model.dtype, device=model.device, **cache_types(cache))
        batch = Batch.causal(block, model.device, [row.token_ids], [0], [list(range(pages))])
        logits_SV = model.logits(model(batch, pool).final_state)[:-1]
        produced = torch.tensor(row.produced[1:])
        targets = torch.tensor(row.token_ids[1:])[produced]
        losses = torch.nn.functional.cross_entropy(logits_SV[produced], targets, reduction="none")
        yield logits_SV[produced].argmax(-1), losses


def _acceptance(model: TargetModel, pair: Pair, cache: str, prompts: int) -> float:
    questions = [pair.render(prompt.turns[0]) for prompt in load_suite(HELD_OUT, prompts).prompts]
    engine = Engine(model, pair.draft, context=model.config.max_position, max_running=4, **cache_types(cache))
    engine.generate(questions, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
    stats = engine.stats()
    return 1 + stats["accepted_tokens"] / stats["verify_steps"]


def _texts(tokenizer: Tokenizer, limit: int, tokens: int) -> list[_Row]:
    """The bundled excerpt: of conversations, the model's own turns are to be produced; of plain text, everything."""
    lines = (files("spec") / "prompts" / "valid_excerpt.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines[:limit]:
        entry = json.loads(line)
        if "messages" in entry:
            ids, produced = tokenizer.render_training(entry["messages"])
        else:
            ids = tokenizer.encode(entry["text"])
            produced = [True] * len(ids)
        row = _Row(list(ids[:tokens]), [bool(flag) for flag in produced[:tokens]])
        if any(row.produced[1:]):
            rows.append(row)
    if not rows:
        raise UserError("no row of the excerpt has a token to produce: raise --tokens")
    return rows


def _table(results: list[Result], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("weights")
    table.add_column("fp8 in cache")
    for heading in ("MB", "weight error", "perplexity", "change", "same top-1", "AL"):
        table.add_column(heading, justify="right")
    base = results[0].perplexity
    for result in results:
        table.add_row(
            result.weights,
            result.cache or "-",
            f"{result.megabytes:.1f}",
            f"{result.weight_error:.2%}",
            f"{result.perplexity:.3f}",
            f"{result.perplexity / base - 1:+.2%}",
            f"{result.agreement:.2%}",
            number(result.acceptance),
        )
    return table

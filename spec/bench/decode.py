"""`spec bench decode`: tokens per second of plain decoding, chains and trees, beside what the bytes promise."""

import copy
import itertools
import json
import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console

from draft_model.dummy import dummy_draft
from draft_model.model import Eagle3Draft
from draft_model.quantised import draft_format, quantise_draft
from serve.engine import Engine
from serve.request import SamplingParams
from spec.bench.decode_settings import Settings, Shape, Variant
from spec.bench.decode_table import LEGEND, Row, fastest, fastest_lines, rows_table
from spec.bench.kernel_timing import Timer, measure_machine
from spec.bench.step_bytes import DraftBytes, TargetBytes, loaded_formats, promised
from spec.bench.step_timing import StepTimes, copy_bandwidth, time_steps, tokens_needed
from spec.bench.sweep import TOP_K, TOP_P
from spec.pair import choose_device, load_pair
from spec.suites import BENCHMARKS, load_suite
from target_model.batch import MAX_SCRATCH
from target_model.errors import UserError, write_json
from target_model.format_coverage import parameter_formats
from target_model.resolve import target_config
from target_model.tokenizer import Tokenizer

RANDOM_CONTEXT = 1024
WIDTH = 120  # of the table
GROUPS = 6  # of prompts, one after the other, where acceptance depends on what is asked


def run(settings: Settings, output: Path | None, console: Console | None = None) -> None:
    """Measures, prints a table and the fastest setting, writes the file when one is named, and prints one JSON line
    last.
    """
    console = console or Console(highlight=False, width=max(Console().width, WIDTH))
    benchmark = Benchmark(settings)
    console.print(benchmark.description)
    rows = _measured(benchmark, console)
    console.print(LEGEND)
    console.print(rows_table(rows))
    console.print(*fastest_lines(rows), sep="\n")
    result = {
        "benchmark": "decode",
        "pair": benchmark.pair.description,
        "machine": benchmark.machine,
        "bandwidth": round(benchmark.bandwidth),
        "temperature": settings.temperature,
        "rows": [row.to_json() for row in rows],
        "fastest": {batch: row.to_json() for batch, row in fastest(rows).items()},
    }
    if output is not None:
        write_json(output, result)
        console.print(f"written: {output}")
    print(json.dumps(result))


def _measured(benchmark: "Benchmark", console: Console) -> list[Row]:
    """All rows, or those that there are when Ctrl-C comes."""
    rows: list[Row] = []
    try:
        with console.status("measuring") as status:
            for row in benchmark.rows():
                rows.append(row)
                status.update(f"measuring; last: {row.label}, {row.times.tokens_per_second:.1f} tokens/s")
    except KeyboardInterrupt:
        if not rows:
            raise
        console.print("interrupted: these are the first rows")
    return rows


def validation_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of the bundled validation text's messages, from the beginning again where it is too short."""
    lines = (files("spec") / "prompts" / "valid_excerpt.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [message["content"] for line in lines for message in json.loads(line).get("messages", ())]
    ids: list[int] = []
    for text in itertools.cycle(texts):
        ids += tokenizer.encode(text)
        if len(ids) >= count:
            return ids[:count]


class Benchmark:
    """A loaded target, and all that is the same for every row."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.device = torch.device(choose_device(settings.device))
        if self.device.type == "cuda":
            machine = measure_machine(Timer())
            self.machine, self.bandwidth = machine.name, machine.bandwidth
            torch.cuda.empty_cache()
        else:
            self.machine, self.bandwidth = "CPU", copy_bandwidth(self.device)
        self.pair = load_pair(settings.target, settings.draft, str(self.device), dummy=settings.dummy)
        target, element = self.pair.target, self.pair.target.dtype.itemsize
        self.sizes = TargetBytes.of(target.config, element, loaded_formats(target))
        self.whole = None
        if settings.dummy is not None and settings.dummy.layers is not None:
            config = target_config(settings.target)
            self.whole = TargetBytes.of(config, element, parameter_formats(config, settings.dummy.format_name))

    @property
    def description(self) -> str:
        """What is measured, and on what."""
        return f"{self.pair.description}\n{self.machine}, copy {self.bandwidth / 1e12:.3f} TB/s"

    def rows(self) -> Iterator[Row]:
        """Plain decoding first, then one variant of the draft after the other."""
        plain = {}
        for batch in self.settings.batches:
            row = self._plain(batch)
            plain[batch] = row.times.tokens_per_second
            yield row
        for variant in self.settings.variants:
            draft = self._draft(variant)
            for batch in self.settings.batches:
                for shape in self.settings.shapes:
                    yield self._speculative(batch, shape, variant, draft, plain[batch])

    def _draft(self, variant: Variant) -> Eagle3Draft:
        if variant.vocab is None and variant.weights == "none":
            return self.pair.draft
        if variant.vocab is None:
            draft = copy.deepcopy(self.pair.draft)
        else:
            config, dtype = self.pair.target.config, self.pair.draft.dtype
            draft = dummy_draft(config, vocab=variant.vocab, dtype=dtype, device=self.device)
        form = draft_format(variant.weights)
        if form is not None:
            quantise_draft(draft, form)
        return draft

    def _plain(self, batch: int) -> Row:
        times, context = self._time(batch, None, None, None)
        floor = self.sizes.step(1, batch, context) / self.bandwidth
        return Row(None, None, batch, None, context, times, floor)

    def _speculative(self, batch: int, shape: Shape, variant: Variant, draft: Eagle3Draft, plain: float) -> Row:
        times, context = self._time(batch, shape, variant, draft)
        drafting = DraftBytes.of(draft, self.pair.target.config, variant.attention)
        place = shape.tree, batch, context
        moved = self.sizes.step(shape.tree.nodes, batch, context) + drafting.step(*place)
        return Row(
            shape.tree,
            variant,
            batch,
            shape.length,
            context,
            times,
            moved / self.bandwidth,
            times.tokens_per_second / plain,
            promised(self.sizes, drafting, times.length, *place),
            None if self.whole is None else promised(self.whole, drafting, times.length, *place),
        )

    def _time(
        self, batch: int, shape: Shape | None, variant: Variant | None, draft: Eagle3Draft | None
    ) -> tuple[StepTimes, int]:
        """Also the context, in tokens."""
        settings, config = self.settings, self.pair.target.config
        tree = None if shape is None else shape.tree
        groups = self._prompts(batch)
        longest = max(len(prompt) for group in groups for prompt in group)
        gained = tokens_needed(settings.steps, 0 if tree is None else tree.depth, batch)
        if longest + gained > config.max_position:
            raise UserError(
                f"{longest} tokens of prompt and {gained} of steps exceed the target's {config.max_position} "
                "positions: lower --context or --steps"
            )
        engine = Engine(
            self.pair.target,
            draft,
            tree,
            pages=batch * -(-(longest + gained + MAX_SCRATCH) // config.block_size),
            context=longest + gained,
            prefill_tokens=2048,
            max_running=batch,
            synthetic_acceptance=None if shape is None else shape.length,
            draft_attention="full" if variant is None else variant.attention,
        )
        filters = {} if settings.temperature == 0 else {"top_p": TOP_P, "top_k": TOP_K, "seed": 0}
        params = SamplingParams(settings.temperature, **filters, max_tokens=gained, ignore_eos=True)
        times = time_steps(engine, groups, params, settings.steps)
        mean = sum(len(prompt) for group in groups for prompt in group) / batch / len(groups)
        return times, round(mean + times.length * settings.steps / 2)

    def _prompts(self, batch: int) -> list[list[list[int]]]:
        """Groups of prompts that are decoded together: random tokens for random weights, else the bundled suites'
        questions, behind validation text where a longer context is asked for.
        """
        settings, pair = self.settings, self.pair
        if settings.dummy is not None:
            chance, vocab = random.Random(0), pair.target.config.vocab_size
            length = settings.context or RANDOM_CONTEXT
            return [[[chance.randrange(vocab) for _ in range(length)] for _ in range(batch)]]
        suites = [load_suite(name).prompts for name in BENCHMARKS]
        questions = [prompt.turns[0] for prompts in zip(*suites, strict=False) for prompt in prompts]
        if len(questions) < GROUPS * batch:
            raise UserError(f"--batch {batch}: the bundled suites have {len(questions)} questions")
        prompts = [self._filled(pair.render(question)) for question in questions[: GROUPS * batch]]
        return [prompts[start : start + batch] for start in range(0, len(prompts), batch)]

    def _filled(self, prompt: list[int]) -> list[int]:
        """The prompt behind as much validation text as makes `context` tokens of them."""
        missing = (self.settings.context or 0) - len(prompt)
        return prompt if missing <= 0 else validation_ids(self.pair.tokenizer, missing) + prompt

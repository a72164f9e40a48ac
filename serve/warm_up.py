"""What requests of usual sizes need on a GPU, compiled and captured before anybody waits for it."""

import time

from rich.console import Console
from rich.progress import track

from serve.engine import Engine
from serve.padded_passes import ROWS
from serve.request import SamplingParams

NEW_TOKENS = 8
# Prompts that are answered together: of all sizes that are padded to, one too long for that, and a few at once.
GROUPS = (*((rows,) for rows in ROWS), (ROWS[-1] + 1,), (ROWS[0],) * 2, (ROWS[0],) * 8)
# Seconds; what takes longer than that is told of.
LONG = 5.0


def warm_up(engine: Engine) -> None:
    """Answers prompts as far as they fit, greedy and sampled, so that each size is met twice; then the engine forgets
    that it did. A bar on a terminal's stderr, and a line when it was long.
    """
    console, started = Console(stderr=True), time.perf_counter()
    vocab, number = engine.runner.target.config.vocab_size, 0
    fitting = [lengths for lengths in GROUPS if _fits(engine, lengths)]
    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    for lengths in track(fitting, "compiling kernels and capturing graphs", **shown):
        for temperature in (0.0, 1.0):
            # They share no page, unless the vocabulary is tiny.
            prompts = [[(number + index) % vocab] * length for index, length in enumerate(lengths)]
            number += len(lengths)
            engine.generate(prompts, SamplingParams(temperature, 0.95, 40, max_tokens=NEW_TOKENS, ignore_eos=True))
    engine.start_over()
    seconds = time.perf_counter() - started
    if seconds > LONG:
        console.print(f"compiled kernels and captured graphs in {seconds:.1f} s", highlight=False)


def _fits(engine: Engine, lengths: tuple[int, ...]) -> bool:
    limits, page = engine.scheduler.limits, engine.scheduler.page_size
    longest = lengths[0] + NEW_TOKENS
    pages = len(lengths) * -(-(longest + limits.scratch) // page)
    return longest <= limits.context and pages <= engine.scheduler.allocator.total

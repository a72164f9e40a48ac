"""`spec demo`: the main job end to end in a few minutes on two CPU cores.

Loads the bundled target, trains a draft from scratch on features captured on the way, decodes real prompts with and
without it, and shows one answer with its accepted tokens coloured.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draft_model.checkpoint import load_draft
from serve.tree import TreeConfig
from spec.bench.sweep import Condition, Contender, Row, sampling_params, short_name, sweep_with_progress
from spec.bench.tables import number
from spec.judge import CHAIN
from spec.pair import Pair, load_pair
from spec.suites import Prompt, load_suite
from target_model.tokenizer import Tokenizer
from train.config import TrainConfig, load_config
from train.data import load_rows
from train.initialise import new_draft
from train.loop import train

TARGET, SUITE = "m3-tiny", "humaneval"
TEMPERATURES = (0.0, 1.0)
# Tokens of the target's own, then of depth 1, 2, ... in the tree.
DEPTH_STYLES = (
    "default",
    "black on bright_green",
    "black on green",
    "black on cyan",
    "white on blue",
    "white on magenta",
)
NEXT = (
    ("spec serve --draft eagle3", "an OpenAI-compatible server with the bundled pair on port 8000"),
    ("spec bench acceptance --prompts 3", "chains of 1 to 8 and a tree on three suites"),
    ("spec train --config demo name=longer schedule.epochs=8", "the same draft, trained for longer"),
    ("spec doctor", "what works on this machine"),
)


def run(*, steps: int | None, prompts: int, tokens: int, seed: int) -> list[Row]:
    """Runs the demo; `steps` None trains as long as configs/demo.yaml says."""
    console = Console()
    length = [] if steps is None else ["schedule.epochs=null", f"schedule.steps={steps}"]
    config = load_config("demo", [f"target={TARGET}", "resume=false", *length])
    console.rule("1. the target, and a draft trained for it")
    bundled = load_pair(TARGET, "eagle3", config.engine.device)
    console.print(f"{bundled.description}\ntraining another draft from scratch: {config.run_directory}")
    before = bundled.with_draft(_untrained(config, bundled))
    result = train(config)
    after = bundled.with_draft(load_draft(result.draft, bundled.draft.dtype, bundled.target.device))

    console.rule("2. real prompts, with and without the drafts")
    questions = load_suite(SUITE, prompts).prompts
    pairs = {"before training": before, "after training": after, "bundled": bundled}
    rows = _measure(console, pairs, questions, tokens, seed)
    console.print(_table(rows))
    same = sum(row.identical for row in rows)
    console.print(
        f"{same} of {sum(row.prompts for row in rows)} answers are the same, token for token, as plain decoding's\n"
    )

    console.rule("3. one answer of the bundled pair")
    _show_answer(console, bundled, bundled.render(questions[0].turns[0]), tokens)
    console.rule("next")
    for command, meaning in NEXT:
        console.print(f"  [bold]{command}[/]\n      {meaning}", highlight=False)
    return rows


def _untrained(config: TrainConfig, pair: Pair):
    """The draft as training starts from it."""
    rows = load_rows(config.data, pair.tokenizer, config.seed)
    return new_draft(config.draft, pair.target, rows, config.seed).eval().requires_grad_(False).to(pair.draft.dtype)


def _measure(
    console: Console, pairs: dict[str, Pair], questions: Sequence[Prompt], tokens: int, seed: int
) -> list[Row]:
    shapes, pair = (TreeConfig.chain(CHAIN), TreeConfig()), next(iter(pairs.values()))
    longest = tokens + max(len(pair.render(prompt.turns[0])) for prompt in questions)
    contenders = [Contender(name, pair.engine(shape, longest)) for name, pair in pairs.items() for shape in shapes]
    plain, conditions = pair.engine(None, longest), [Condition(temperature) for temperature in TEMPERATURES]
    return sweep_with_progress(
        console, plain, contenders, {SUITE: questions}, conditions, pair, tokens=tokens, seed=seed
    )


def _table(rows: Sequence[Row]) -> Table:
    """A line for each draft and shape; greedy and sampled side by side."""
    prompts = rows[0].prompts
    table = Table(
        title=f"AL, tokens for each pass of the target: {SUITE}, {prompts} prompts",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    table.add_column("draft", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for heading in ("AL\ngreedy", "accepted/\ndrafted", "AL\nT = 1", "speed-up\ngreedy", "speed-up\nT = 1"):
        table.add_column(heading, justify="right")
    for draft, label in dict.fromkeys((row.draft, row.label) for row in rows):
        greedy, sampled = (row for row in rows if (row.draft, row.label) == (draft, label))
        table.add_row(
            draft,
            short_name(greedy.shape),
            number(greedy.acceptance.length),
            number(greedy.acceptance.rate),
            number(sampled.acceptance.length),
            f"{greedy.speed_up:.2f}x",
            f"{sampled.speed_up:.2f}x",
        )
    return table


def _show_answer(console: Console, pair: Pair, question: list[int], tokens: int) -> None:
    shape = TreeConfig()
    engine = pair.engine(shape, len(question) + tokens)
    (completion,) = engine.generate([question], sampling_params(0.0, tokens, 0))
    console.print(coloured(pair.tokenizer, completion.token_ids, completion.accepted_from_draft))
    legend = Text("\nplain: the target's own; coloured: accepted from the draft, at depth")
    for depth in range(1, shape.depth + 1):
        legend.append(" ").append(f" {depth} ", style=_style(depth))
    console.print(legend)
    console.print(
        f"{len(completion.token_ids)} tokens in {1 + len(completion.steps)} passes of the target, greedy, {shape}"
    )


def coloured(tokenizer: Tokenizer, token_ids: Sequence[int], depths: Sequence[int]) -> Text:
    """An answer in which every token has the colour of its depth in the tree.

    A character that is cut into several tokens has the colour of the last one.
    """
    text, pending = Text(), b""
    for token, depth in zip(token_ids, depths, strict=True):
        pending += tokenizer.token_bytes(token)
        try:
            text.append(pending.decode("utf-8"), style=_style(depth))
        except UnicodeDecodeError:
            continue
        pending = b""
    return text.append(pending.decode("utf-8", errors="replace"))


def _style(depth: int) -> str:
    return DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)]

"""`spec data ...`: training data shown as it is trained on, and rewritten with the target's own answers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.commands.options import Device, Draft, Seed, Target, draft_name

if TYPE_CHECKING:
    from train.config import DataConfig

data = typer.Typer(no_args_is_help=True, help="Show and make training data.")


Source = Annotated[
    str | None,
    typer.Argument(
        help="JSONL (also .xz, .gz) or parquet file, a directory of them, hub:OWNER/NAME:SPLIT, or bundled:demo.",
        show_default=False,
    ),
]
Recipe = Annotated[str | None, typer.Option(help="Instead: the data of a recipe, as it would be trained on.")]


@data.command()
def show(
    source: Source = None,
    config: Recipe = None,
    row: Annotated[int, typer.Option(min=1, help="Row of the data, from 1.")] = 1,
    rows_table: Annotated[
        bool, typer.Option("--rows-table", help="Also list the (feature, input, label) rows.")
    ] = False,
    target: Target = "m3-tiny",
    thinking: Annotated[
        str | None, typer.Option(help="auto, enabled, disabled or adaptive. Default: the recipe's, or auto.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a training row. Default: the recipe's, or 512.")
    ] = None,
) -> None:
    """Print one row with its trained tokens coloured, and what the other rows come to: kept, dropped and why."""
    from rich.console import Console

    from spec.conversation import Settings, show

    settings = _data_settings(source, config, thinking_mode=thinking, sequence_length=sequence_length)
    show(Settings(settings, target, row, rows_table), Console())


@data.command()
def coverage(source: Source = None, config: Recipe = None, target: Target = "m3-tiny") -> None:
    """How much of the trained text a draft vocabulary holds, by its size: for draft.draft_vocab_size."""
    from rich.console import Console

    from spec.conversation import show_coverage

    show_coverage(_data_settings(source, config), target, Console())


def _data_settings(source: str | None, config: str | None, **changes: str | int | None) -> "DataConfig":
    """The data of a recipe or of one source, with the changes that are not None."""
    from target_model.errors import UserError
    from train.config import DataConfig, load_config, parse_section

    if (source is None) == (config is None):
        raise UserError("name a file or directory, or a recipe with --config: one of the two")
    values = {"path": source} if config is None else load_config(config).data.model_dump()
    values |= {key: value for key, value in changes.items() if value is not None}
    return parse_section(DataConfig, values, "data")


@data.command()
def regenerate(
    sources: Annotated[
        list[str], typer.Argument(help="Files with `messages`: JSONL (also .xz, .gz), parquet, directories.")
    ],
    output: Annotated[Path, typer.Option(help="JSONL file to write; an interrupted one is continued.")],
    target: Target = "m3-tiny",
    draft: Draft = "eagle3",
    turns: Annotated[str, typer.Option(help="Assistant turns to answer: first or all.")] = "first",
    temperature: Annotated[float, typer.Option(help="0 is greedy; above it with top_p 0.95 and top_k 40.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each answer, at most.")] = 512,
    thinking: Annotated[str, typer.Option(help="enabled, disabled or adaptive.")] = "disabled",
    seed: Seed = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers in flight.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    part: Annotated[int, typer.Option(min=0, help="This process's share of the rows, from 0.")] = 0,
    parts: Annotated[int, typer.Option(min=1, help="Processes that share the rows.")] = 1,
    device: Device = "auto",
) -> None:
    """Rewrite the answers of conversations with the target's own text, which is what a draft has to predict."""
    from serve.load import EngineOptions, load_engine
    from spec.pair import choose_device
    from spec.regenerate import Settings, run

    settings = Settings(
        tuple(sources),
        output,
        turns=turns,
        temperature=temperature,
        max_tokens=max_tokens,
        thinking_mode=thinking,
        seed=seed,
        concurrency=concurrency,
        limit=limit,
        part=part,
        parts=parts,
    )
    place = choose_device(device)
    engine, tokenizer, about = load_engine(
        EngineOptions(target, draft_name(draft), device=place, max_running=concurrency)
    )
    print("\n".join(about.lines))
    counts = run(engine, tokenizer, settings)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))

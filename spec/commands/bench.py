"""`spec bench ...`: measurements."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, Draft, Seed, Target, draft_name

bench = typer.Typer(no_args_is_help=True, help="Measure acceptance and speed.")


@bench.command()
def acceptance(
    target: Target = "m3-tiny",
    draft: Annotated[
        str, typer.Option(help="Draft: eagle3 (resolved by target), a directory, or a hub id.")
    ] = "eagle3",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="mt_bench, humaneval, gsm_symbolic, or a JSONL file; repeatable. Default: all three."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each suite, from the first.")] = 10,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens for each prompt, at most.")] = 96,
    chain: Annotated[str, typer.Option(help="Chain lengths k: 3, or 1..7, or 1,3,5, or none.")] = "1..7",
    tree: Annotated[
        list[str] | None,
        typer.Option(help="Tree as depth,width,nodes (root counted), or none; repeatable. Default: the server's."),
    ] = None,
    temperature: Annotated[
        str,
        typer.Option(help="Temperatures, comma separated; above 0 with top_p 0.95 and top_k 40. 1 is always shown."),
    ] = "0,1",
    thinking: Annotated[bool, typer.Option(help="Ask with thinking enabled.")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """How many drafted tokens the target accepts, and the speed-up over plain decoding in the same run."""
    from spec.bench import acceptance as benchmark
    from spec.suites import BENCHMARKS

    benchmark.run(
        benchmark.Settings(
            target=target,
            draft=draft,
            suites=tuple(suite or BENCHMARKS),
            prompts=prompts,
            tokens=tokens,
            shapes=benchmark.parse_shapes(chain, tree),
            temperatures=benchmark.parse_temperatures(temperature),
            thinking=thinking,
            seed=seed,
            device=device,
        ),
        json_path=json,
    )


@bench.command()
def quantization(
    target: Target = "m3-tiny",
    draft: Draft = "eagle3",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the bundled excerpt of validation text.")] = 46,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts for acceptance.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a row, at most.")] = 768,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """What quantised weights and fp8 caches cost: weight error, perplexity, agreement, acceptance."""
    from spec.bench.quantization import run

    run(target, draft_name(draft), rows, prompts, tokens, json)


@bench.command()
def kernels(
    only: Annotated[str, typer.Option(help="Only the cases whose name contains this, for example decode.")] = "",
) -> None:
    """Time the GPU kernels on MiniMax-M3's shapes against their floors and the fastest public ones."""
    from spec.bench.kernels import main

    main(only)

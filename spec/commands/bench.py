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


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask. Default: the first that the server lists.")] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="mt_bench, humaneval, gsm_symbolic, or a JSONL file; repeatable. Default: all three."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests to send.")] = 64,
    concurrency: Annotated[int | None, typer.Option(min=1, max=4096, help="Requests at a time. Default: 8.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second, at random gaps, instead of --concurrency.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens for each request, at most.")] = 128,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests sent before, one by one, that do not count.")] = 2,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the server's.")] = None,
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600.0,
    health_mb: Annotated[
        int, typer.Option(min=0, max=60, help="Meanwhile have a prompt of this many MB tokenised, and time /health.")
    ] = 0,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="SPEC_API_KEY")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
) -> None:
    """Latency, throughput and acceptance of any OpenAI-compatible server. Exit code 1 when a request fails."""
    from spec.bench import serving
    from spec.suites import BENCHMARKS
    from target_model.errors import UserError

    if rate is not None and concurrency is not None:
        raise UserError("--rate and --concurrency exclude each other: requests come at a rate, or a few at a time")
    settings = serving.Settings(
        url=url,
        model=model,
        suites=tuple(suite or BENCHMARKS),
        requests=requests,
        concurrency=concurrency or 8,
        rate=rate,
        tokens=tokens,
        warm_up=warm_up,
        temperature=temperature,
        seed=seed,
        timeout=timeout,
        health_mb=health_mb,
    )
    if not serving.run(settings, api_key, json):
        raise typer.Exit(1)

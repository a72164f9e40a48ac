"""`spec bench ...`: measurements."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.bench_decode import decode
from spec.commands.options import (
    Device,
    Draft,
    Dummy,
    Layers,
    Processes,
    Seed,
    Target,
    draft_name,
    measured_draft,
    output_directory,
    output_file,
)

bench = typer.Typer(no_args_is_help=True, help="Measure acceptance and speed.")
bench.command()(decode)


DRAFTS = typer.Option(help="eagle3 (resolved by target), a directory, or a hub id; repeatable. Default: eagle3.")
SUITES = typer.Option(
    help="mt_bench, humaneval, gsm_symbolic, or a JSONL or Parquet file, also of Spec-Bench or SPEED-Bench; "
    "repeatable. Default: the three."
)
PROMPTS = typer.Option(min=1, help="Prompts of each suite, from the first.")
STRIDE = typer.Option(min=1, help="Take every n-th prompt only: MT-Bench's first ten are all of one category.")
TURNS = typer.Option(min=1, help="Turns of a prompt, at most: MT-Bench has two. Default: all.")
TOKENS = typer.Option(min=2, help="New tokens for each turn, at most.")
CHAIN = typer.Option(help="Chain lengths k: 3, or 1..8, or 1,3,5, or none.")
TREE = typer.Option(help="Tree as depth,width,nodes (root counted), or none; repeatable. Default: the server's.")
TREE_FILE = typer.Option(help="A tree that spec tune tree wrote; repeatable, besides the others.")
TEMPERATURE = typer.Option(help="Temperatures, comma separated. 1 is always shown.")
TOP_P = typer.Option(help="Above temperature 0.")
TOP_K = typer.Option(help="Above temperature 0; 0: off.")
THINKING = typer.Option(help="off, on, or both.")
CONCURRENCY = typer.Option(help="Requests at a time, comma separated: they start together, in groups.")
REPEATS = typer.Option(min=1, help="Seeds for each sampled prompt.")
DRAFT_WEIGHTS = typer.Option(help="mxfp8 or mxfp4: quantise what the drafts multiply with. Default: as in their files.")
ANALYSE = typer.Option(
    "--analyse", help="Record what the draft proposes at every position: where it errs, what other trees bring."
)
COSTS = typer.Option(help="With --analyse: costs of a step on another machine, as JSON.", dir_okay=False)
AGAINST = typer.Option(help="plain: exit code 1 when a greedy answer differs from plain decoding's.")
JSON = typer.Option(help="Write everything measured to this file.", callback=output_file)
REPORT = typer.Option(help="Write a report to this directory: HTML, PNG, JSON, CSV.", callback=output_directory)


@bench.command()
def acceptance(
    target: Target = "m3-tiny",
    draft: Annotated[list[str] | None, DRAFTS] = None,
    suite: Annotated[list[str] | None, SUITES] = None,
    prompts: Annotated[int, PROMPTS] = 10,
    stride: Annotated[int, STRIDE] = 1,
    turns: Annotated[int | None, TURNS] = None,
    tokens: Annotated[int, TOKENS] = 96,
    chain: Annotated[str, CHAIN] = "1..8",
    tree: Annotated[list[str] | None, TREE] = None,
    tree_file: Annotated[list[Path] | None, TREE_FILE] = None,
    temperature: Annotated[str, TEMPERATURE] = "0,1",
    top_p: Annotated[float, TOP_P] = 0.95,
    top_k: Annotated[int, TOP_K] = 40,
    thinking: Annotated[str, THINKING] = "off",
    concurrency: Annotated[str, CONCURRENCY] = "1",
    seed: Seed = 0,
    repeats: Annotated[int, REPEATS] = 1,
    device: Device = "auto",
    draft_weights: Annotated[str | None, DRAFT_WEIGHTS] = None,
    analyse: Annotated[bool, ANALYSE] = False,
    costs: Annotated[Path | None, COSTS] = None,
    against: Annotated[str | None, AGAINST] = None,
    json: Annotated[Path | None, JSON] = None,
    report: Annotated[Path | None, REPORT] = None,
) -> None:
    """How many drafted tokens the target accepts, and the speed-up over plain decoding in the same run."""
    from spec.bench import acceptance as benchmark
    from spec.suites import BENCHMARKS
    from target_model.errors import UserError

    if against not in (None, "plain"):
        raise UserError(f"--against must be plain, got {against!r}")
    if costs is not None and not analyse:
        raise UserError("--costs is read with --analyse only")
    settings = benchmark.Settings(
        target=target,
        drafts=tuple(dict.fromkeys(map(measured_draft, draft or ["eagle3"]))),
        suites=tuple(suite or BENCHMARKS),
        prompts=prompts,
        stride=stride,
        turns=turns,
        tokens=tokens,
        shapes=benchmark.parse_shapes(chain, tree, tree_file),
        temperatures=benchmark.with_one(benchmark.parse_temperatures(temperature)),
        top_p=top_p,
        top_k=top_k,
        thinking=benchmark.parse_thinking(thinking),
        concurrency=benchmark.parse_concurrency(concurrency),
        seed=seed,
        repeats=repeats,
        device=device,
        draft_weights=draft_weights,
    )
    same = benchmark.run(settings, benchmark.Outputs(json, report, analyse, costs))
    if against and not same:
        raise typer.Exit(1)


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A result of spec bench acceptance --json.")],
    second: Annotated[str, typer.Argument(help="Another one, or published: MiniMax-M3's published curves.")],
    json: Annotated[Path | None, typer.Option(help="Write the comparison to this file.", callback=output_file)] = None,
) -> None:
    """What two results differ in, and whether that can be chance: paired bootstrap over the prompts of both."""
    from spec.bench import compare as comparison

    comparison.run(first, second, json)


@bench.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="A recorded run, from a report of --analyse.", dir_okay=False)],
    tree: Annotated[list[str] | None, typer.Option(help="Tree as depth,width,nodes; repeatable.")] = None,
    tree_file: Annotated[list[Path] | None, typer.Option(help="A tree file; repeatable.")] = None,
    static: Annotated[
        list[int] | None, typer.Option(min=2, max=64, help="The best static tree of this many nodes; repeatable.")
    ] = None,
) -> None:
    """What other trees would have accepted in a recorded run, without the models."""
    from spec.bench.offline import run
    from spec.tree_file import read_tree

    run(recording, tree or [], [read_tree(path) for path in tree_file or ()], static or [])


@bench.command()
def quantization(
    target: Target = "m3-tiny",
    draft: Draft = "eagle3",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the bundled excerpt of validation text.")] = 46,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts for acceptance.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a row, at most.")] = 768,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    """What quantised weights and fp8 caches cost: weight error, perplexity, agreement, acceptance."""
    from spec.bench.quantization import run

    run(target, draft_name(draft), rows, prompts, tokens, json)


@bench.command()
def costs(
    target: Target = "m3-tiny",
    draft: Annotated[str, typer.Option(help="eagle3 (resolved by target), a directory, or a hub id.")] = "eagle3",
    dummy_weights: Dummy = None,
    layers: Layers = None,
    tensor_parallel: Processes = 1,
    batch: Annotated[int, typer.Option(min=1, max=16, help="The largest batch; smaller ones are measured too.")] = 16,
    device: Device = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the costs to this file, as spec bench acceptance --costs reads them.", callback=output_file
        ),
    ] = None,
) -> None:
    """What drafting and verifying cost here, for trees of all sizes; with random weights for a target that is not at
    hand."""
    from spec.bench import step_costs
    from spec.pair import dummy_weights_option

    dummy = dummy_weights_option(dummy_weights, layers)
    step_costs.run(step_costs.Settings(target, measured_draft(draft), dummy, tensor_parallel, batch, device), output)


@bench.command()
def kernels(
    only: Annotated[str, typer.Option(help="Only the cases whose name contains this, for example decode.")] = "",
) -> None:
    """Time the GPU kernels on MiniMax-M3's shapes against their floors and the fastest public ones."""
    from spec.bench.kernels import main

    main(only)


@bench.command()
def train(
    sequence: Annotated[int, typer.Option(min=16, help="Tokens of a row.")] = 4096,
    long: Annotated[int, typer.Option(min=0, help="Tokens of a second, long row; 0: none.")] = 32768,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Steps of the training-time test.")] = 7,
    repeats: Annotated[int, typer.Option(min=1, help="Optimizer steps that are timed.")] = 5,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 1,
    plain: Annotated[bool, typer.Option(help="Also time a plain PyTorch implementation.")] = True,
    small: Annotated[bool, typer.Option("--small", help="A small draft, to try the command on a CPU.")] = False,
    device: Device = "auto",
    json: Annotated[Path | None, JSON] = None,
) -> None:
    """The draft's training step at MiniMax-M3's size: time, tokens/s, MFU, memory, against plain PyTorch."""
    from spec.bench import training

    training.run(training.Settings(sequence, long, steps, repeats, zero_stage, small, plain), device, json)


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask. Default: the first that the server lists.")] = None,
    suite: Annotated[list[str] | None, SUITES] = None,
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
    json: Annotated[Path | None, JSON] = None,
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


@bench.command()
def soak(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask. Default: the first that the server lists.")] = None,
    suite: Annotated[str, typer.Option(help="mt_bench, humaneval, gsm_symbolic, or a JSONL file.")] = "mt_bench",
    streams: Annotated[int, typer.Option(min=1, max=4096, help="Streams at a time.")] = 200,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long new ones are begun.")] = 180.0,
    abort: Annotated[float, typer.Option(min=0, max=1, help="Share of the streams that hang up early.")] = 0.5,
    different: Annotated[int, typer.Option(min=1, help="Different requests; each is also asked alone.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens for each request, at most.")] = 48,
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a stream counts as stuck.")] = 120.0,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="SPEC_API_KEY")] = None,
) -> None:
    """Many streams at once, half of which hang up: nothing leaks or hangs, every answer is the one given alone."""
    from spec.bench import soak as benchmark

    settings = benchmark.Settings(url, model, suite, streams, seconds, abort, different, tokens, seed, timeout)
    if not benchmark.run(settings, api_key):
        raise typer.Exit(1)

"""`spec bench decode`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, Dummy, Layers, Target, measured_draft, output_file

TREE = typer.Option(
    help="Tree as depth,width,nodes, or with random weights depth,width,nodes=AL, or none; repeatable. "
    "Default: 3,2,6 and 5,4,24 and 8,4,32."
)
CHAIN = typer.Option(help="Chain lengths k: 3, or 1..7, or 1,3,5, or none.")
WEIGHTS = typer.Option(help="none, mxfp8, mxfp4; several with commas.")
VOCABULARY = typer.Option(help="With --dummy-weights: full, or tokens that the draft knows; several with commas.")
ATTENTION = typer.Option(help="full, sparse or sparse:LAYER, as in spec serve; several with commas.")
CONTEXT = typer.Option(min=1, help="Tokens of a prompt. Default: 1024 random ones, or with real weights as it is.")
STEPS = typer.Option(min=2, help="Steps that are timed, of each group of prompts.")
OUTPUT = typer.Option(help="Write everything measured to this file.", callback=output_file)


def decode(
    target: Target = "m3-tiny",
    draft: Annotated[str, typer.Option(help="eagle3 (resolved by target), a directory, or a hub id.")] = "eagle3",
    dummy_weights: Dummy = None,
    layers: Layers = None,
    chain: Annotated[str, CHAIN] = "1..7",
    tree: Annotated[list[str] | None, TREE] = None,
    draft_weights: Annotated[str, WEIGHTS] = "none",
    draft_vocab: Annotated[str, VOCABULARY] = "full",
    draft_attention: Annotated[str, ATTENTION] = "full",
    batch: Annotated[str, typer.Option(help="Sequences at a time; several with commas.")] = "1",
    context: Annotated[int | None, CONTEXT] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; above it M3's filters hold.")] = 0.0,
    steps: Annotated[int, STEPS] = 32,
    device: Device = "auto",
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Tokens per second of plain decoding, chains and trees, beside what the bytes promise; with random weights at the
    acceptance of MiniMax-M3's published draft. Of the draft's options the first values are the base; every other one
    is measured alone, then the last of each together."""
    from spec.bench import decode as benchmark
    from spec.bench.acceptance import parse_concurrency
    from spec.bench.decode_settings import TREE_GAIN, Settings, parse_decode_shapes, parse_variants
    from spec.pair import dummy_weights_option

    dummy = dummy_weights_option(dummy_weights, layers)
    synthetic = dummy is not None
    settings = Settings(
        target=target,
        draft=measured_draft(draft),
        dummy=dummy,
        shapes=parse_decode_shapes(chain, tree or list(TREE_GAIN), synthetic),
        variants=parse_variants(draft_weights, draft_vocab, draft_attention, synthetic),
        batches=parse_concurrency(batch, "--batch"),
        context=context,
        temperature=temperature,
        steps=steps,
        device=device,
    )
    benchmark.run(settings, output)

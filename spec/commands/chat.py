"""`spec chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from spec.commands.options import Device, Draft, Target, draft_name

THINKING = ("disabled", "enabled", "adaptive")


def chat(
    url: Annotated[
        str | None, typer.Option(help="Talk to this server. Default: an engine in this process, as below.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: model to ask. Default: the first it lists.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: the server's key.", envvar="SPEC_API_KEY")] = None,
    target: Target = "m3-tiny",
    draft: Draft = "eagle3",
    tree: Annotated[str | None, typer.Option(help="Tree as depth,width,nodes. Default: the server's.")] = None,
    device: Device = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens for each answer, at most.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Default: the model's.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of sampled answers. Default: another each time.")
    ] = None,
    thinking: Annotated[str, typer.Option(help=f"{', '.join(THINKING)}.")] = "disabled",
) -> None:
    """Chat in the terminal: accepted tokens coloured by draft depth, acceptance and speed below each answer."""
    from rich.console import Console

    from spec.chat import Remote, Sampling, converse
    from target_model.errors import UserError

    if thinking not in THINKING:
        raise UserError(f"unknown --thinking {thinking!r}: expected one of {', '.join(THINKING)}")
    sampling = Sampling(tokens, temperature, seed, thinking)
    console = Console(highlight=False)
    if url is not None:
        converse(Remote(url, api_key, model, sampling), console)
        return
    if model is not None:
        raise UserError("--model chooses among a server's models and needs --url; --target names one to load")
    from serve.load import load_engine
    from serve.tree import TreeConfig
    from spec.local import Local
    from spec.pair import choose_device

    shape = None if tree is None else TreeConfig.parse(tree)
    loaded = load_engine(target, draft_name(draft), shape, device=choose_device(device), max_running=1)
    converse(Local(*loaded, sampling), console, settings=loaded[2].lines[:3])

"""`spec chat`: a conversation in the terminal."""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, Draft, Target, draft_name

THINKING = ("disabled", "enabled", "adaptive")
OF_THE_ENGINE = ("target", "draft", "tree", "device")  # options that choose one in this process


def chat(
    context: typer.Context,
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
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="JSON list of tools that the model may call; you are asked what a call returned."),
    ] = None,
) -> None:
    """Chat in the terminal: accepted tokens coloured by draft depth, acceptance and speed below each answer."""
    from rich.console import Console

    from spec.attachments import read_tools
    from spec.chat import Conversation, encodable
    from spec.speaker import Remote, Sampling
    from target_model.errors import UserError

    if thinking not in THINKING:
        raise UserError(f"unknown --thinking {thinking!r}: expected one of {', '.join(THINKING)}")
    if system is not None and not encodable(system):
        raise UserError("--system is no text that can be sent: it has bytes that are not UTF-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line of other bytes is refused alone
    sampling = Sampling(tokens, temperature, seed, thinking)
    console, offered = Console(highlight=False), None if tools is None else read_tools(tools)
    if url is not None:
        _refuse_engine_options(context)
        Conversation(Remote(url, api_key, model, sampling, offered), console, system=system).run()
        return
    if model is not None:
        raise UserError("--model chooses among a server's models and needs --url; --target names one to load")
    from serve.load import EngineOptions, load_engine
    from serve.tree import TreeConfig
    from spec.local import local_server
    from spec.pair import choose_device

    shape = None if tree is None else TreeConfig.parse(tree)
    loaded = load_engine(
        EngineOptions(
            target, draft_name(draft), shape, device=choose_device(device), max_running=1, language_only=False
        )
    )
    with local_server(*loaded) as server:
        speaker = Remote(server.url, server.api_key, None, sampling, offered)
        Conversation(speaker, console, system=system).run(loaded[2].lines[:4])


def _refuse_engine_options(context: typer.Context) -> None:
    from target_model.errors import UserError

    for name in OF_THE_ENGINE:
        if context.get_parameter_source(name).name == "COMMANDLINE":
            raise UserError(f"--{name} chooses an engine to load here and does not go with --url")

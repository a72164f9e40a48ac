"""`spec export`: a draft as vLLM, SGLang, ATOM, speculators or plain Hugging Face code reads it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.commands.options import output_directory

if TYPE_CHECKING:
    from draft_model.export import Verifier


def export(
    draft: Annotated[str | None, typer.Argument(help="A run or its folder, a draft's directory, or eagle3.")] = None,
    to: Annotated[str | None, typer.Option(help="vllm, sglang, atom, speculators or hf.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to write; it must not exist.", callback=output_directory)
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The draft's target, unless the run's record or the bundled draft's name tells.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Check this directory and write nothing.")] = None,
) -> None:
    """Write a draft in the layout of an engine and load it back, or check a directory. Exit code 1: a check failed."""
    if check is not None:
        if draft is not None or output is not None:
            raise typer.BadParameter("--check takes a directory alone, or with --to")
        _check(check, to)
        return
    for name, value in (("DRAFT", draft), ("--to", to), ("--output", output)):
        if value is None:
            raise typer.BadParameter(f"{name} is missing")
    _export(draft, to, output, target)


def _check(directory: Path, engine: str | None) -> None:
    from draft_model.export import check_directory

    problems = check_directory(directory, engine)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{directory}: names, shapes, config fields and layer ids are as {engine or 'its engine'} reads them")


def _export(draft: str, to: str, output: Path, target: str | None) -> None:
    from draft_model.config import read_json
    from draft_model.export import export_draft, find_engine
    from draft_model.importing import read_draft
    from draft_model.model_card import model_card
    from draft_model.resolve import run_info, without_record
    from target_model.errors import UserError

    engine = find_engine(to)
    if output.exists():
        raise UserError(f"{output} exists: name a new directory")
    folder = Path(draft) if Path(draft).is_dir() else Path("runs") / draft
    path = folder / "run.json"
    record, run = (read_json(path), run_info(path)) if path.is_file() else (None, None)
    if (run is not None or without_record(folder)) and not (folder / "draft").is_dir():
        raise UserError(f"run {folder} has written no draft yet")
    if run is not None:
        source, name, known = folder / "draft", record["name"], run.target
    elif draft == "eagle3":
        source, name, known = _by_target(target), f"{target}-eagle3", None
    elif folder.is_dir():
        source, name, known = folder, folder.resolve().name, _bundled_for(folder)
    else:
        raise UserError(f"draft {draft} is neither a run, nor a directory, nor `eagle3`")
    verifier = _verifier(target or known or _stored_target(source))
    found = read_draft(source, layer_ids="entering")
    training = source / "training.json"
    card = model_card(
        name,
        found.config,
        engine,
        verifier.name,
        source=source,
        record=record,
        training=read_json(training) if training.is_file() else None,
    )
    shapes = export_draft(found, to, output, verifier, card)
    print(f"{output}: {len(shapes)} tensors for {to}, read back equal; context {verifier.max_position}")


def _by_target(target: str | None) -> Path:
    from draft_model.resolve import resolve_draft
    from target_model.errors import UserError
    from target_model.resolve import resolve_target

    if target is None:
        raise UserError("draft eagle3 needs --target")
    return resolve_draft("eagle3", resolve_target(target)).path


def _bundled_for(folder: Path) -> str | None:
    """The target of a bundled draft, whose folder is named after it."""
    from target_model.resolve import known_targets

    name = folder.resolve().name.removesuffix("-eagle3")
    return name if name in known_targets() else None


def _stored_target(source: Path) -> str | None:
    from draft_model.weight_files import stored_metadata

    return stored_metadata(source).get("target")


def _verifier(target: str | None) -> "Verifier":
    from draft_model.config import read_json
    from draft_model.export import Verifier
    from target_model.errors import UserError
    from target_model.resolve import BUNDLED, HUB_IDS, PUBLISHED_CONFIGS, target_config

    if target is None:
        raise UserError("the draft's target is not known: name it with --target")
    config = target_config(target)
    short = target.removeprefix("MiniMaxAI/")
    path = PUBLISHED_CONFIGS.get(short)
    if path is None:
        path = (BUNDLED / target if (BUNDLED / target).is_dir() else Path(target)) / "config.json"
    return Verifier(HUB_IDS.get(short, target), read_json(path).get("architectures", []), config.max_position)

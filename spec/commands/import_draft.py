"""`spec import`: a draft of another trainer or engine in this project's layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.commands.options import output_directory

if TYPE_CHECKING:
    from draft_model.importing import TargetParts


def import_draft(
    directory: Annotated[Path, typer.Argument(help="Draft of SpecForge, TorchSpec, speculators, EAGLE or an engine.")],
    output: Annotated[Path, typer.Option(help="Directory to write; it must not exist.", callback=output_directory)],
    layer_ids: Annotated[
        str | None, typer.Option(help="Explicit layer ids name the layer that is entered, or left (output).")
    ] = None,
    norm_before_residual: Annotated[
        bool | None,
        typer.Option("--norm-before-residual/--no-norm-before-residual", help="Overrides the config's own."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target that gives the context length, default taps and a missing embedding.")
    ] = None,
) -> None:
    """Read any known layout, say what it is, and write the published one, which every command here takes."""
    import json

    from draft_model.engines import ID_OFFSET
    from draft_model.export import Verifier, export_draft
    from draft_model.importing import describe, read_draft
    from target_model.errors import UserError

    if output.exists():
        raise UserError(f"{output} exists: name a new directory")
    if layer_ids is not None and layer_ids not in ID_OFFSET:
        raise UserError(f"--layer-ids is {layer_ids!r}: expected {' or '.join(ID_OFFSET)}")
    parts = None if target is None else _target_parts(target, directory)
    draft = read_draft(directory, layer_ids=layer_ids, norm_before_residual=norm_before_residual, target=parts)
    for line in describe(draft):
        print(line)
    card = "\n".join([f"# {output.name}", "", "EAGLE-3 draft, imported:", "", *[f"- {x}" for x in describe(draft)]])
    verifier = Verifier(target, [], draft.config.max_position)
    shapes = export_draft(draft, "hf", output, verifier, card + "\n")
    print(f"{output}: {len(shapes)} tensors, read back equal; taps {json.dumps(list(draft.config.taps))}")


def _target_parts(target: str, directory: Path) -> "TargetParts":
    """The embedding is read only when the draft lacks one."""
    from draft_model.importing import TargetParts
    from draft_model.weight_files import stored_names
    from target_model.config import default_taps
    from target_model.resolve import resolve_target, target_config
    from target_model.shards import open_shard, read_headers

    config = target_config(target)
    embedding = None
    if not any(name.endswith("embed_tokens.weight") for name in stored_names(directory)):
        path = resolve_target(target).path
        stored = read_headers(path)
        name = next(name for name in stored if name.endswith("embed_tokens.weight"))
        with open_shard(stored[name].file) as shard:
            embedding = shard.get_tensor(name)
    taps = default_taps(config.num_layers) if config.num_layers >= 7 else None
    return TargetParts(taps, config.max_position, embedding)

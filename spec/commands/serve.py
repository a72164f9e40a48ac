"""`spec serve`: the OpenAI-compatible server."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.commands.options import Device, Draft, Dummy, Layers, Processes, Target, draft_name, with_fields
from target_model.errors import UserError

if TYPE_CHECKING:
    import torch

    from serve.load import EngineOptions
    from serve.tree import TreeConfig

TYPES = ("float32", "bfloat16", "float16")
TREE = typer.Option(
    help="Tree as depth,width,nodes (root counted; width 1 is a chain), or adaptive: measures this machine's costs at "
    "the start, when nothing else should run, and drafts as far as pays. Default: one that suits most."
)
TREE_FILE = typer.Option(help="A tree that spec tune tree wrote, instead of --tree.", dir_okay=False)
SAMPLING = typer.Option(help="coupled (a seed gives one text, whatever is drafted) or rejection.")
SYNTHETIC = typer.Option(help="Force this mean acceptance length: for benchmarks only, the text is meaningless.")
HOST = typer.Option(help="Address to listen on; 0.0.0.0 for all.")
PORT = typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
MODEL_NAME = typer.Option(help="Name that clients use. Default: the target's.")
DTYPE = typer.Option(help=f"{', '.join(TYPES)}. Default: float32 on the CPU, bfloat16 on CUDA.")
KV_DTYPE = typer.Option(help="K and V in the cache: auto (as --dtype) or fp8 (e4m3).")
INDEX_DTYPE = typer.Option(help="Index K of the sparse layers in the cache: auto or fp8 (e4m3).")
DRAFT_DTYPE = typer.Option(
    help="The draft's type; no answer depends on it. Default: bfloat16 where the processor computes in it, else the "
    "target's."
)
DRAFT_ATTENTION = typer.Option(
    help="full; sparse, to the blocks the target's last sparse layer chose; or sparse:LAYER, another's."
)
DRAFT_WEIGHTS = typer.Option(
    help="mxfp8 or mxfp4: quantise what the draft multiplies with; no answer depends on it. Default: as in its files."
)
GRAPHS = typer.Option("--cuda-graphs/--no-cuda-graphs", help="On a GPU: whole decode steps as CUDA graphs.")
CONTEXT = typer.Option(min=2, help="Tokens of prompt and answer. Default: the target's limit.")
PAGES = typer.Option(min=1, help="Pages of the cache. Default: 32 contexts, at most 65,536 tokens.")
PREFILL = typer.Option(min=1, help="Prompt tokens computed in one step. Default: 512, on a GPU 4096.")
RUNNING = typer.Option(min=1, help="Requests that decode together.")
OPEN = typer.Option(min=1, help="Requests taken, queued ones included.")
PICTURES = typer.Option(
    exists=True, file_okay=False, help="Directory whose pictures file: URLs may name. Default: no local files."
)
LANGUAGE_ONLY = typer.Option("--language-only", help="Leave the vision tower on disk: no pictures.")
API_KEY = typer.Option(help="Key that clients must send; repeatable.", envvar="SPEC_API_KEY", show_default=False)
MAX_BODY = typer.Option(min=0.001, help="Largest body of a request, in MB of 2**20 bytes.")
REQUEST_TIMEOUT = typer.Option(min=0.1, help="Seconds after which a request is ended with an error.")
DRAIN_TIMEOUT = typer.Option(min=0, help="Seconds that open requests have when the server is told to stop.")


@dataclass(frozen=True)
class Options:
    """What `spec serve` can be told, in the order of its help."""

    target: Target = "m3-tiny"
    draft: Draft = "eagle3"
    tree: Annotated[str | None, TREE] = None
    tree_file: Annotated[Path | None, TREE_FILE] = None
    sampling: Annotated[str, SAMPLING] = "coupled"
    synthetic_acceptance_length: Annotated[float | None, SYNTHETIC] = None
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, PORT] = 8000
    model_name: Annotated[str | None, MODEL_NAME] = None
    device: Device = "auto"
    tensor_parallel: Processes = 1
    dtype: Annotated[str | None, DTYPE] = None
    kv_cache_dtype: Annotated[str, KV_DTYPE] = "auto"
    index_cache_dtype: Annotated[str, INDEX_DTYPE] = "auto"
    draft_dtype: Annotated[str | None, DRAFT_DTYPE] = None
    draft_weights: Annotated[str | None, DRAFT_WEIGHTS] = None
    draft_attention: Annotated[str, DRAFT_ATTENTION] = "full"
    cuda_graphs: Annotated[bool, GRAPHS] = True
    dummy_weights: Dummy = None
    layers: Layers = None
    context: Annotated[int | None, CONTEXT] = None
    pages: Annotated[int | None, PAGES] = None
    prefill_tokens: Annotated[int | None, PREFILL] = None
    max_running: Annotated[int, RUNNING] = 32
    max_open: Annotated[int, OPEN] = 1024
    pictures: Annotated[Path | None, PICTURES] = None
    language_only: Annotated[bool, LANGUAGE_ONLY] = False
    api_key: Annotated[list[str] | None, API_KEY] = None
    max_body_mb: Annotated[float, MAX_BODY] = 64
    request_timeout: Annotated[float, REQUEST_TIMEOUT] = 3600
    drain_timeout: Annotated[int, DRAIN_TIMEOUT] = 30


@with_fields
def serve(options: Options) -> None:
    """Serve a target and its draft behind an OpenAI-compatible API. What was chosen is printed at the start."""
    from serve.pictures import PictureLimits
    from serve.server import ServeOptions, run
    from serve.service import Settings

    settings = Settings(
        api_keys=tuple(options.api_key or ()),
        max_body=int(options.max_body_mb * 2**20),
        request_timeout=options.request_timeout,
        drain_timeout=options.drain_timeout,
        pictures=PictureLimits(options.pictures),
    )
    run(
        ServeOptions(
            _engine(options),
            host=options.host,
            port=options.port,
            model_name=options.model_name,
            max_open=options.max_open,
            settings=settings,
        )
    )


def _engine(options: Options) -> "EngineOptions":
    from serve.load import EngineOptions
    from spec.pair import cache_dtype, choose_device, dummy_weights_option

    if draft_name(options.draft) is None:
        _refuse_draft_options(options)
    return EngineOptions(
        target=options.target,
        draft=draft_name(options.draft),
        tree=_tree(options),
        adaptive=options.tree == "adaptive",
        sampling=options.sampling,
        synthetic_acceptance=options.synthetic_acceptance_length,
        device=choose_device(options.device),
        dtype=_dtype(options.dtype),
        draft_dtype=_dtype(options.draft_dtype),
        draft_weights=options.draft_weights,
        draft_attention=options.draft_attention,
        device_step=None if options.cuda_graphs else False,
        warm_up=True,
        kv_dtype=cache_dtype(options.kv_cache_dtype),
        index_dtype=cache_dtype(options.index_cache_dtype),
        dummy=dummy_weights_option(options.dummy_weights, options.layers),
        pages=options.pages,
        context=options.context,
        prefill_tokens=options.prefill_tokens,
        max_running=options.max_running,
        language_only=options.language_only,
        tensor_parallel=options.tensor_parallel,
    )


def _tree(options: Options) -> "TreeConfig | None":
    from serve.tree import TreeConfig
    from spec.tree_file import read_tree

    if options.tree_file is None:
        return None if options.tree in (None, "adaptive") else TreeConfig.parse(options.tree)
    if options.tree is not None:
        raise UserError("--tree and --tree-file exclude each other")
    return read_tree(options.tree_file)


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    if name is not None and name not in TYPES:
        raise UserError(f"unknown dtype {name!r}: expected one of {', '.join(TYPES)}")
    return None if name is None else getattr(torch, name)


def _refuse_draft_options(options: Options) -> None:
    """Without a draft these would be ignored."""
    given = {
        "--tree": options.tree is not None,
        "--tree-file": options.tree_file is not None,
        "--sampling rejection": options.sampling == "rejection",
        "--synthetic-acceptance-length": options.synthetic_acceptance_length is not None,
        "--draft-dtype": options.draft_dtype is not None,
        "--draft-weights": options.draft_weights is not None,
        "--draft-attention": options.draft_attention != "full",
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} is about what a draft proposes, and with --draft none there is no draft")

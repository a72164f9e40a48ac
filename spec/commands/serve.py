"""`spec serve`: the OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, Draft, Dummy, Layers, Processes, Target, draft_name

TYPES = ("float32", "bfloat16", "float16")
TREE = typer.Option(
    help="Tree as depth,width,nodes (root counted; width 1 is a chain), or adaptive: measures this machine's costs at "
    "the start and drafts as far as pays. Default: one that suits most."
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


def serve(
    target: Target = "m3-tiny",
    draft: Draft = "eagle3",
    tree: Annotated[str | None, TREE] = None,
    tree_file: Annotated[Path | None, TREE_FILE] = None,
    sampling: Annotated[str, SAMPLING] = "coupled",
    synthetic_acceptance_length: Annotated[float | None, SYNTHETIC] = None,
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, PORT] = 8000,
    model_name: Annotated[str | None, MODEL_NAME] = None,
    device: Device = "auto",
    tensor_parallel: Processes = 1,
    dtype: Annotated[str | None, DTYPE] = None,
    kv_cache_dtype: Annotated[str, KV_DTYPE] = "auto",
    index_cache_dtype: Annotated[str, INDEX_DTYPE] = "auto",
    draft_dtype: Annotated[str | None, DRAFT_DTYPE] = None,
    draft_weights: Annotated[str | None, DRAFT_WEIGHTS] = None,
    draft_attention: Annotated[str, DRAFT_ATTENTION] = "full",
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="On a GPU: whole decode steps as CUDA graphs.")
    ] = True,
    dummy_weights: Dummy = None,
    layers: Layers = None,
    context: Annotated[int | None, CONTEXT] = None,
    pages: Annotated[int | None, PAGES] = None,
    prefill_tokens: Annotated[int | None, PREFILL] = None,
    max_running: Annotated[int, RUNNING] = 32,
    max_open: Annotated[int, OPEN] = 1024,
    pictures: Annotated[Path | None, PICTURES] = None,
    language_only: Annotated[bool, LANGUAGE_ONLY] = False,
    api_key: Annotated[list[str] | None, API_KEY] = None,
    max_body_mb: Annotated[float, MAX_BODY] = 64,
    request_timeout: Annotated[float, REQUEST_TIMEOUT] = 3600,
    drain_timeout: Annotated[int, DRAIN_TIMEOUT] = 30,
) -> None:
    """Serve a target and its draft behind an OpenAI-compatible API. What was chosen is printed at the start."""
    import torch

    from serve.load import EngineOptions
    from serve.pictures import PictureLimits
    from serve.server import ServeOptions, run
    from serve.service import Settings
    from serve.tree import TreeConfig
    from spec.pair import cache_dtype, choose_device, dummy_weights_option
    from spec.tree_file import read_tree
    from target_model.errors import UserError

    if tree is not None and tree_file is not None:
        raise UserError("--tree and --tree-file exclude each other")
    if draft_name(draft) is None:
        _refuse_draft_options(
            tree, tree_file, sampling, synthetic_acceptance_length, draft_dtype, draft_weights, draft_attention
        )
    shape = None if tree in (None, "adaptive") else TreeConfig.parse(tree)
    for name in (dtype, draft_dtype):
        if name is not None and name not in TYPES:
            raise UserError(f"unknown dtype {name!r}: expected one of {', '.join(TYPES)}")
    engine = EngineOptions(
        target=target,
        draft=draft_name(draft),
        tree=shape if tree_file is None else read_tree(tree_file),
        adaptive=tree == "adaptive",
        sampling=sampling,
        synthetic_acceptance=synthetic_acceptance_length,
        device=choose_device(device),
        dtype=None if dtype is None else getattr(torch, dtype),
        draft_dtype=None if draft_dtype is None else getattr(torch, draft_dtype),
        draft_weights=draft_weights,
        draft_attention=draft_attention,
        device_step=None if cuda_graphs else False,
        warm_up=True,
        kv_dtype=cache_dtype(kv_cache_dtype),
        index_dtype=cache_dtype(index_cache_dtype),
        dummy=dummy_weights_option(dummy_weights, layers),
        pages=pages,
        context=context,
        prefill_tokens=prefill_tokens,
        max_running=max_running,
        language_only=language_only,
        tensor_parallel=tensor_parallel,
    )
    options = ServeOptions(
        engine,
        host=host,
        port=port,
        model_name=model_name,
        max_open=max_open,
        settings=Settings(
            api_keys=tuple(api_key or ()),
            max_body=int(max_body_mb * 2**20),
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            pictures=PictureLimits(pictures),
        ),
    )
    run(options)


def _refuse_draft_options(
    tree: str | None,
    tree_file: Path | None,
    sampling: str,
    synthetic_acceptance_length: float | None,
    draft_dtype: str | None,
    draft_weights: str | None,
    draft_attention: str,
) -> None:
    """Without a draft these would be ignored."""
    from target_model.errors import UserError

    given = {
        "--tree": tree is not None,
        "--tree-file": tree_file is not None,
        "--sampling rejection": sampling == "rejection",
        "--synthetic-acceptance-length": synthetic_acceptance_length is not None,
        "--draft-dtype": draft_dtype is not None,
        "--draft-weights": draft_weights is not None,
        "--draft-attention": draft_attention != "full",
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} is about what a draft proposes, and with --draft none there is no draft")

"""From a target's name to its directory and config.

`m3-tiny` is part of the package; a directory is itself; `MiniMax-M3` is the hub's MiniMaxAI/MiniMax-M3, from the local
hub cache or downloaded. Only weights, configuration and tokenizer files are ever fetched or read: a checkpoint's own
code is not executed.
"""

import json
import shutil
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

import configs
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.memory import largest_memory, requirements
from target_model.sizes import count_parameters, weight_bytes

BUNDLED = Path(__file__).parent / "bundled"
HUB_IDS = {"MiniMax-M3": "MiniMaxAI/MiniMax-M3"}
PUBLISHED_CONFIGS = {"MiniMax-M3": Path(configs.__file__).parent / "minimax-m3.json"}
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_NETWORK_SECONDS = 3.0


@dataclass(frozen=True)
class ResolvedTarget:
    """A target whose files are at hand. `origin` names the target that a quantised checkpoint was made from."""

    name: str
    path: Path
    config: M3Config
    origin: str | None = None


def resolve_target(name: str) -> ResolvedTarget:
    """The target behind a name or a directory. Raises UserError saying what is missing and what it would take."""
    if name in _bundled_names():
        return _resolved(name, BUNDLED / name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _resolved(path.resolve().name, path)
    short = name.removeprefix("MiniMaxAI/")
    if short in HUB_IDS:
        return _resolved(short, _from_hub(short))
    raise UserError(f"unknown target {name!r}: name a directory, or one of {', '.join(known_targets())}")


def resolve_config(name: str) -> ResolvedTarget:
    """As `resolve_target` where the weights do not matter: MiniMax-M3 comes from the package, which has none."""
    short = name.removeprefix("MiniMaxAI/")
    if short in PUBLISHED_CONFIGS:
        path = PUBLISHED_CONFIGS[short]
        return ResolvedTarget(short, path.parent, M3Config.from_json(path))
    return resolve_target(name)


def target_config(name: str) -> M3Config:
    """The config alone, which needs no weights."""
    return resolve_config(name).config


def known_targets() -> list[str]:
    """The names that resolve without a path."""
    return [*_bundled_names(), *sorted(HUB_IDS)]


def _bundled_names() -> list[str]:
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def _resolved(name: str, path: Path) -> ResolvedTarget:
    config = M3Config.from_json(path)
    origin = None
    if config.quantisation is not None:
        origin = json.loads((path / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    return ResolvedTarget(name, path, config, Path(origin).name if isinstance(origin, str) else None)


def _from_hub(name: str) -> Path:
    hub_id = HUB_IDS[name]
    cached = _cached_snapshot(hub_id)
    if cached is not None:
        return cached
    config = M3Config.from_json(PUBLISHED_CONFIGS[name])
    problem = _obstacle(config)
    if problem is None:
        try:
            return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_FILES))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            problem = f"the download of {hub_id} failed ({str(error).splitlines()[0]})"
    raise UserError(
        f"the weights of {name} are not in the hub cache {constants.HF_HUB_CACHE} and {problem}; "
        f"{requirements(name, config)}"
    )


def _cached_snapshot(hub_id: str) -> Path | None:
    """The hub cache's copy, if it holds config and weights. The loader names the shards that a copy lacks."""
    try:
        path = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return path if (path / "config.json").exists() and any(path.glob("*.safetensors")) else None


def _obstacle(config: M3Config) -> str | None:
    """Why a download cannot start, or would be in vain; None when nothing speaks against it."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids a download"
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < count_parameters(config).weight_bytes:
        return f"its disk has only {free / 10**9:.1f} GB free"
    memory = largest_memory()
    if memory < weight_bytes(config, 2):
        return f"this machine has only {memory / 10**9:.1f} GB of memory to load them into"
    if not _reachable(constants.ENDPOINT):
        return f"{constants.ENDPOINT} cannot be reached"
    return None


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers within seconds. Name look-up has no time limit of its own: a thread bounds it all."""
    host = endpoint.split("://")[-1].split("/")[0].split(":")[0]
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, 443), timeout=_NETWORK_SECONDS).close()
            connected.set()
        except OSError:
            return

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_NETWORK_SECONDS)
    return connected.is_set()

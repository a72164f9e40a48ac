"""What a target is and needs, from its config alone; and how a checkpoint directory compares with that.

The figures only: `spec/inspect.py` prints them.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.format_coverage import FORMAT_NAMES, checkpoint_bytes, parameter_formats
from target_model.memory import USABLE
from target_model.sharding import Shard, local_config, part_bytes
from target_model.shards import INDEX, SINGLE, StoredTensor, claimed_size, damage, read_headers, read_index
from target_model.sizes import cache_bytes_per_token, count_parameters, weight_bytes
from target_model.stored_weights import compare_tensors

# Rows of the table of parameters: label, parts of the tensor table.
PARTS = (
    ("routed experts", ("routed_experts",)),
    ("attention", ("attention",)),
    ("shared expert", ("shared_expert",)),
    ("lm_head", ("lm_head",)),
    ("embed_tokens", ("embed_tokens",)),
    ("dense MLP", ("dense_mlp",)),
    ("vision tower", ("vision_tower",)),
    ("projector + merge", ("projector",)),
    ("indexer", ("indexer",)),
    ("router + norms", ("router", "norms")),
)
CONTEXTS = (32 * 1024, 128 * 1024, 512 * 1024, 1024 * 1024)
# (name, bytes of an element of K and V, of index K)
CacheType = tuple[str, int, int]
CACHE_TYPES: tuple[CacheType, ...] = (("bf16", 2, 2), ("fp8 KV", 1, 2), ("fp8 KV and index K", 1, 1))


@dataclass(frozen=True)
class CacheNeed:
    """Bytes of one token over all layers, with the target's cache in one of CACHE_TYPES and the draft's in bf16."""

    name: str
    target: int
    draft: int


@dataclass(frozen=True)
class FormatNeed:
    """Bytes of a format on disk (vision included) and of the language model in memory beside bf16."""

    name: str
    checkpoint: int
    loaded: int


def parameter_rows(config: M3Config) -> list[tuple[str, str, int]]:
    """(label, how it comes about, parameters) of every part that the target has."""
    parts = count_parameters(config).parts
    rows = [(label, sum(parts.get(part, 0) for part in members)) for label, members in PARTS]
    return [(label, _how(config, label), size) for label, size in rows if size]


def format_needs(config: M3Config) -> list[FormatNeed]:
    """Every format's bytes."""
    return [
        FormatNeed(
            name, checkpoint_bytes(config, name), weight_bytes(config, 2, formats=parameter_formats(config, name))
        )
        for name in FORMAT_NAMES
    ]


def cache_needs(config: M3Config) -> list[CacheNeed]:
    """Every cache type's bytes."""
    draft = draft_bytes_per_token(config)
    return [CacheNeed(name, cache_bytes_per_token(config, main, index), draft) for name, main, index in CACHE_TYPES]


def draft_bytes_per_token(config: M3Config) -> int:
    """Bytes of one layer in bf16 with as many KV heads as the target has query heads."""
    return 2 * config.num_heads * config.head_dim * 2


@dataclass(frozen=True)
class Split:
    """A target over so many GPUs: bytes of the weights on each, and its config."""

    gpus: int
    weights: int
    config: M3Config


def splits(config: M3Config, name: str) -> list[Split]:
    """Every power of two of GPUs that the target divides over in this format, one included."""
    formats, found, gpus = parameter_formats(config, name), [], 1
    while gpus <= config.num_heads:
        with contextlib.suppress(UserError):
            shard = Shard(0, gpus)
            local = local_config(config, shard)
            if parameter_formats(local, name) == formats:  # else a group of columns would be cut
                found.append(Split(gpus, part_bytes(config, shard, 2, formats=formats), local))
        gpus *= 2
    return found


def gpu_table(
    config: M3Config, cache_types: Sequence[CacheType], gpu_sizes: Sequence[int]
) -> list[tuple[str, str, list[list[int | None]]]]:
    """(format, cache type, for each size of GPU: how many for each of CONTEXTS): for one sequence of that length, the
    target split as `spec serve --tp` does it. The first GPU also holds the draft's cache. None: no number will do.
    """
    draft, rows = draft_bytes_per_token(config), []
    for name in FORMAT_NAMES:
        parts = splits(config, name)
        for cache, main, index in cache_types:
            held = [
                (part.gpus, part.weights, cache_bytes_per_token(part.config, main, index) + draft) for part in parts
            ]
            counts = [
                [
                    next((gpus for gpus, weights, token in held if weights + context * token <= size * USABLE), None)
                    for context in CONTEXTS
                ]
                for size in gpu_sizes
            ]
            rows.append((name, cache, counts))
    return rows


def schedule(config: M3Config) -> list[tuple[str, str]]:
    """(row label, one character a layer): attention full F, sparse S, sparse with the choice of the layer before r;
    MLP dense D, mixture of experts M.
    """
    kinds = zip(config.sparse_layers, config.reuses_blocks, strict=True)
    attention = "".join("r" if reuses else "S" if sparse else "F" for sparse, reuses in kinds)
    return [("attention", attention), ("MLP", "".join("M" if moe else "D" for moe in config.moe_layers))]


@dataclass
class CheckpointReport:
    """A directory compared with its config.

    formats      tensors by how they are stored
    files        (file, its bytes, bytes of its tensors)
    problems     what makes the checkpoint unloadable, one line each
    claimed      metadata.total_size of the index: shown, never trusted
    """

    formats: dict[str, int] = field(default_factory=dict)
    files: list[tuple[str, int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    claimed: int | None = None
    tensor_bytes: int = 0

    @property
    def good(self) -> bool:
        """Whether it loads."""
        return not (self.missing or self.unknown or self.problems)


def inspect_checkpoint(config: M3Config, directory: Path) -> CheckpointReport:
    """Headers only: no weight is read. Damage ends in the report, not in an error."""
    report = CheckpointReport()
    try:
        report.claimed = claimed_size(directory)
        listed = read_index(directory)
        names = sorted(set(listed.values())) if listed is not None else [SINGLE]
        report.problems += [
            f"{directory / name}: {text}" for name in names if (text := _file_problem(directory / name))
        ]
        if report.problems:
            return report
        stored = read_headers(directory)
    except UserError as error:
        report.problems.append(str(error))
        return report
    check = compare_tensors(config, stored)
    for weight in check.weights:
        name = weight.form.name if weight.form else stored[weight.values].dtype.lower()
        report.formats[name] = report.formats.get(name, 0) + 1
    report.missing, report.unknown = check.missing, check.unknown
    report.problems += check.wrong
    report.files = _file_sizes(stored)
    report.tensor_bytes = sum(tensor.bytes for tensor in stored.values())
    return report


def has_weights(directory: Path) -> bool:
    """Whether a directory is meant as a checkpoint, not only as a config."""
    return (directory / INDEX).exists() or any(directory.glob("*.safetensors"))


def _file_problem(path: Path) -> str | None:
    return damage(path) if path.is_file() else "this shard is missing"


def _file_sizes(stored: dict[str, StoredTensor]) -> list[tuple[str, int, int]]:
    held: dict[Path, int] = {}
    for tensor in stored.values():
        held[tensor.file] = held.get(tensor.file, 0) + tensor.bytes
    return [(path.name, path.stat().st_size, size) for path, size in sorted(held.items())]


def _how(config: M3Config, label: str) -> str:
    hidden, dim = config.hidden_size, config.head_dim
    sparse, moe = sum(config.sparse_layers), sum(config.moe_layers)
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    vision = config.vision
    return {
        "routed experts": f"{moe} layers x {config.num_experts} x 3 x [{config.expert_width}, {hidden}]",
        "attention": f"{config.num_layers} x (q {queries} + k/v {keys} each + o)",
        "shared expert": f"{moe} x 3 x [{config.shared_width}, {hidden}]",
        "lm_head": f"[{config.vocab_size}, {hidden}]",
        "embed_tokens": f"[{config.vocab_size}, {hidden}]",
        "dense MLP": f"{config.num_layers - moe} x 3 x [{config.dense_width}, {hidden}]",
        "vision tower": f"{vision.num_layers} layers, width {vision.hidden_size}" if vision else "",
        "projector + merge": f"to {hidden}, {vision.spatial_merge_size**2} patches merged" if vision else "",
        "indexer": f"{sparse} x ({config.num_index_heads * config.index_dim} + {config.index_dim}) x {hidden}",
        "router + norms": f"gate [{config.num_experts}, {hidden}] in fp32",
    }[label]

"""What a target needs to run, in bytes and in GPUs, and whether this machine has it."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.quantised_formats import Format
from target_model.sizes import cache_bytes_per_token, count_parameters, weight_bytes

# GPUs of a host that people have, in bytes of memory each. A tenth stays free for activations and the cache.
GPU_SIZES = (80 * 10**9, 141 * 10**9, 192 * 10**9)
USABLE = 0.9
# Below this, memory is not worth a check.
_SMALL = 2 * 10**9


def requirements(name: str, config: M3Config) -> str:
    """How much disk and GPU memory a target takes and how many GPUs hold it, as half a sentence."""
    disk, loaded = count_parameters(config).weight_bytes, weight_bytes(config, 2)
    cache = cache_bytes_per_token(config) / 1024
    return (
        f"{name} needs {disk / 10**9:.1f} GB on disk and, in bf16, {loaded / 10**9:.1f} GB of GPU memory plus "
        f"{cache:.2f} KiB per token of context (recipe {name.lower()}; GPUs: {_fits(loaded)})"
    )


def gpus_needed(needed: int, gpu_bytes: int) -> int:
    """The power of two of GPUs (so that heads and experts divide) that holds `needed` bytes."""
    count = 1
    while count * gpu_bytes * USABLE < needed:
        count *= 2
    return count


def check_memory(
    name: str,
    config: M3Config,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    language_only: bool = True,
    formats: Mapping[str, Format] | None = None,
    part: int | None = None,
) -> None:
    """Raises UserError when the weights, those in `formats` quantised, cannot fit `device`. `part`: bytes of what this
    process loads of them; None: all.
    """
    needed = part
    if needed is None:
        needed = weight_bytes(config, dtype.itemsize, language_only=language_only, formats=formats)
    if needed < _SMALL:
        return
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_memory()
    if needed > free:
        shortage = f"not enough memory on {device}: {free / 10**9:.1f} GB are free, {needed / 10**9:.1f} GB are needed"
        if part is not None:
            raise UserError(f"{shortage} for this process's part of {name}")
        if formats:
            raise UserError(f"{shortage} for {name} in its format (GPUs: {_fits(needed)})")
        raise UserError(f"{shortage} in {str(dtype).removeprefix('torch.')}; {requirements(name, config)}")


def _fits(needed: int) -> str:
    return ", ".join(f"{gpus_needed(needed, size)} x {size / 10**9:.0f} GB" for size in GPU_SIZES)


def largest_memory() -> int:
    """Bytes of the larger of this machine's memories: all its GPUs together, or its RAM."""
    gpus = range(torch.cuda.device_count())
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(ram, sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus))


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024

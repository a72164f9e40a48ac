"""`quantization_config` of a config.json: which method wrote the checkpoint, and which modules it left alone.

How a weight is stored is read from its own tensors (`stored_weights.py`); this section has to agree with them.
Published styles: MiniMax's `mxfp8` (`ignored_layers`), AMD's `quark` (`exclude`; MXFP4, attention in FP8 or bf16),
NVIDIA's `modelopt` (NVFP4, MXFP8 or mixed by module) and `compressed-tensors`.
"""

import fnmatch
import re
from dataclasses import dataclass, field
from typing import Any

from target_model.errors import UserError
from target_model.quantised_formats import FP8, MXFP4, MXFP8, NVFP4, NVFP4_PACKED, Format

_EXCLUSIONS = ("ignored_layers", "exclude", "ignore", "exclude_modules", "modules_to_not_convert")
_ALGORITHMS = {"MXFP8": (MXFP8,), "MXFP4": (MXFP4,), "NVFP4": (NVFP4, NVFP4_PACKED)}
_MIXED = "MIXED_PRECISION"
# What each method can have written. compressed-tensors writes all of them.
_METHODS = {
    "mxfp8": (MXFP8,),
    "fp8": (MXFP8,),
    "mxfp4": (MXFP4,),
    "quark": (MXFP4, MXFP8, NVFP4, FP8),
    "modelopt": (MXFP8, MXFP4, NVFP4, NVFP4_PACKED),
    "modelopt_mixed": (MXFP8, MXFP4, NVFP4, NVFP4_PACKED),
    "compressed-tensors": (MXFP8, MXFP4, NVFP4, NVFP4_PACKED, FP8),
}


@dataclass(frozen=True)
class Quantisation:
    """What a config says about its checkpoint's formats.

    formats   those that may occur
    excluded  patterns of modules that stay in bf16: names, globs, or regular expressions behind "re:"; a name also
              covers what stands below it
    modules   by module name: its only possible formats (mixed checkpoints list every module)
    """

    method: str
    formats: tuple[Format, ...]
    excluded: tuple[str, ...] = ()
    modules: dict[str, tuple[Format, ...]] = field(default_factory=dict, hash=False)

    def excludes(self, module: str) -> bool:
        """Whether the module must be stored unquantised."""
        return any(_matches(pattern, module) for pattern in self.excluded)

    def allowed(self, module: str) -> tuple[Format, ...]:
        """The formats this module may be stored in; none for an excluded one."""
        if self.excludes(module):
            return ()
        return self.modules.get(module, self.formats)


def read_quantisation(section: Any, where: str) -> Quantisation:
    """From the JSON of `quantization_config`. Raises UserError for a method or a format that cannot be read."""
    if not isinstance(section, dict):
        raise UserError(f"{where}: quantization_config must be an object")
    method = section.get("quant_method")
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise UserError(f"{where}: quantization_config.quant_method {method!r} is not supported (known: {known})")
    _check_group(section, method, where)
    excluded = [pattern for name in _EXCLUSIONS for pattern in section.get(name) or ()]
    modules = {}
    for module, entry in (section.get("quantized_layers") or {}).items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else entry
        modules[module] = _algorithm(algorithm, f"{where}: quantization_config.quantized_layers.{module}")
    formats = _METHODS[method]
    algorithm = section.get("quant_algo")
    if algorithm is not None and algorithm != _MIXED:
        formats = _algorithm(algorithm, f"{where}: quantization_config.quant_algo")
    return Quantisation(method, formats, tuple(map(str, excluded)), modules)


def quantisation_json(form: Format, modules: dict[str, Format], excluded: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in this format. `modules` holds every quantised module."""
    if form == MXFP8:
        return {
            "quant_method": "mxfp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, MXFP8.group],
            "ignored_layers": excluded,
        }
    if form == MXFP4:
        tensor = {"dtype": "fp4", "qscheme": "per_group", "group_size": MXFP4.group, "scale_format": "e8m0"}
        activations = {**tensor, "is_dynamic": True}
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": {**tensor, "is_dynamic": False}, "input_tensors": activations},
            "layer_quant_config": {},
            "exclude": excluded,
        }
    layers = {
        name: {"quant_algo": "NVFP4" if used == NVFP4 else "MXFP8", "group_size": used.group}
        for name, used in modules.items()
    }
    return {"quant_method": "modelopt", "quant_algo": _MIXED, "quantized_layers": layers, "ignore": excluded}


def _algorithm(name: Any, where: str) -> tuple[Format, ...]:
    if name not in _ALGORITHMS:
        raise UserError(f"{where} is {name!r}: only {', '.join(_ALGORITHMS)} can be read")
    return _ALGORITHMS[name]


def _check_group(section: dict[str, Any], method: str, where: str) -> None:
    """The settings of a method that change what the bytes mean."""
    block = section.get("weight_block_size")
    if (block is not None or method == "fp8") and block != [1, MXFP8.group]:
        raise UserError(f"{where}: quantization_config.weight_block_size {block} is not supported: only [1, 32]")
    weight = (section.get("global_quant_config") or {}).get("weight")
    if method == "quark" and isinstance(weight, dict):
        for name, supported in (("dtype", ("fp4", "fp8_e4m3")), ("group_size", (32, 16)), ("scale_format", ("e8m0",))):
            if weight.get(name) is not None and weight[name] not in supported:
                raise UserError(
                    f"{where}: quantization_config.global_quant_config.weight.{name} {weight[name]!r} is not supported"
                )


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern or "?" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    # Some writers leave out the prefix of the language model.
    return any(name == pattern or name.startswith(pattern + ".") for name in (module, _without_prefix(module)))


def _without_prefix(module: str) -> str:
    return module.removeprefix("language_model.")

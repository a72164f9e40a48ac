"""Which weights a published format covers; the others stay in bf16 (router and its bias in fp32)."""

from collections.abc import Iterable

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.quantised import common_formats
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, Format
from target_model.stored_weights import can_be_quantised
from target_model.tensor_names import TensorSpec, tensor_specs

# The names that people use. bf16 is the absence of a format.
FORMAT_NAMES = ("bf16", "mxfp8", "mxfp4", "nvfp4")


def check_format_name(name: str) -> None:
    """Raises UserError for a name that is none of FORMAT_NAMES."""
    if name not in FORMAT_NAMES:
        raise UserError(f"unknown format {name!r}: expected one of {', '.join(FORMAT_NAMES)}")


def covered_format(spec: TensorSpec, name: str) -> Format | None:
    """The format of this tensor in a published checkpoint of format `name`.

    MXFP8 covers every matrix of the decoder layers but the router, MXFP4 the routed and shared experts, NVFP4 the
    routed experts with the others in MXFP8. A weight whose columns do not divide into groups stays plain.
    """
    if name == "bf16" or not can_be_quantised(spec):
        return None
    form: Format | None = MXFP8
    if name == "mxfp4":
        form = MXFP4 if spec.part in ("routed_experts", "shared_expert") else None
    elif name == "nvfp4" and spec.part == "routed_experts":
        form = NVFP4
    return form if form is not None and spec.shape[-1] % form.group == 0 else None


def parameter_formats(config: M3Config, name: str) -> dict[str, Format]:
    """By parameter of the model: its format in memory when a checkpoint of format `name` is loaded."""
    check_format_name(name)
    specs: Iterable[TensorSpec] = tensor_specs(config)
    return common_formats((spec.destination, covered_format(spec, name)) for spec in specs)


def checkpoint_bytes(config: M3Config, name: str) -> int:
    """Bytes of a published checkpoint in format `name`."""
    check_format_name(name)
    total = 0
    for spec in tensor_specs(config):
        form = covered_format(spec, name)
        plain = spec.size * (4 if spec.kind == "fp32" else 2)
        total += plain if form is None else form.bytes(spec.shape)
    return total

"""Which tensors of a checkpoint make up one weight, and in which format.

Names differ by writer: `X.weight` with `X.weight_scale_inv` (MXFP8), with `X.weight_scale` (MXFP4, FP8), with
`X.weight_scale` and `X.weight_scale_2` (NVFP4), or `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.quantised_config import Quantisation
from target_model.quantised_formats import FP8, MXFP4, MXFP8, NVFP4, NVFP4_PACKED, Format
from target_model.shards import StoredTensor
from target_model.tensor_names import TensorSpec, tensor_specs

WEIGHT_TYPES = ("BF16", "F16", "F32")
_SCALES = ("weight_scale_inv", "weight_scale")
_TENSOR_SCALES = ("weight_scale_2", "weight_global_scale")
# Scales of the activations, for engines that quantise those too. Here activations keep their precision.
_INPUT_SCALES = ("input_scale", "input_global_scale")
_SUFFIXES = ("weight_packed", *_SCALES, *_TENSOR_SCALES, *_INPUT_SCALES)
_E8M0 = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of the table and what stores it: `form` None for plain numbers under the published name."""

    spec: TensorSpec
    form: Format | None
    values: str
    scale: str | None = None
    tensor_scale: str | None = None
    input_scale: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its tensors in the checkpoint."""
        parts = (self.values, self.scale, self.tensor_scale, self.input_scale)
        return tuple(name for name in parts if name is not None)


@dataclass
class TensorCheck:
    """The table of tensors against what a checkpoint holds.

    weights  what is there; vision tensors too, unless the checkpoint is a text-only copy without any
    wrong    one line for each tensor of a wrong shape, type or format
    """

    weights: list[StoredWeight] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare_tensors(config: M3Config, stored: Mapping[str, StoredTensor]) -> TensorCheck:
    """Compares every tensor by name, shape and type."""
    check, used, missing_vision = TensorCheck(), set(), []
    for spec in tensor_specs(config):
        try:
            weight = find_weight(spec, stored, config.quantisation)
        except UserError as error:
            check.wrong.append(str(error))
            used |= {spec.name, *(f"{module_of(spec)}.{suffix}" for suffix in _SUFFIXES)}
            continue
        if weight is not None:
            check.weights.append(weight)
            used.update(weight.names)
        elif spec.is_vision:
            missing_vision.append(spec.name)
        else:
            check.missing.append(spec.name)
    if any(weight.spec.is_vision for weight in check.weights):
        check.missing += missing_vision
    check.unknown = [name for name in stored if name not in used and not _is_multi_token_prediction(name)]
    return check


def module_of(spec: TensorSpec) -> str:
    """Name of the module whose weight this is."""
    return spec.name.removesuffix(".weight")


def can_be_quantised(spec: TensorSpec) -> bool:
    """The matrices of the decoder layers: not embedding, head, norms, router or vision."""
    return spec.kind == "weight" and spec.destination.startswith("layers.")


def find_weight(
    spec: TensorSpec, stored: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> StoredWeight | None:
    """What stores `spec`, None when nothing does. Raises UserError where its tensors are not a format that can be
    read, or contradict the config.
    """
    module = module_of(spec)
    packed = f"{module}.weight_packed"
    values = packed if packed in stored else spec.name
    if values not in stored:
        return None
    tensor = stored[values]
    if quantisation is not None and tensor.dtype in ("U8", "F8_E4M3") and can_be_quantised(spec):
        weight = _quantised(spec, module, values, stored)
        _check_config(weight, module, tensor, quantisation)
        return weight
    expected = ("F32",) if spec.kind == "fp32" else WEIGHT_TYPES
    if tensor.dtype not in expected:
        raise UserError(
            f"tensor {values} in {tensor.file} is {tensor.dtype}, it must be {' or '.join(expected)}"
            + (": config.json has no quantization_config" if quantisation is None and can_be_quantised(spec) else "")
        )
    _check_shape(values, tensor, spec.shape)
    return StoredWeight(spec, None, values)


def _quantised(spec: TensorSpec, module: str, values: str, stored: Mapping[str, StoredTensor]) -> StoredWeight:
    def one_of(suffixes: tuple[str, ...]) -> str | None:
        return next((f"{module}.{suffix}" for suffix in suffixes if f"{module}.{suffix}" in stored), None)

    scale, tensor_scale, input_scale = one_of(_SCALES), one_of(_TENSOR_SCALES), one_of(_INPUT_SCALES)
    tensor = stored[values]
    if scale is None:
        raise UserError(f"tensor {module}.weight_scale of {values} in {tensor.file} is missing")
    form = _form(spec, tensor, stored[scale], tensor_scale)
    if form is None:
        raise UserError(
            f"tensor {values} in {tensor.file} is {tensor.dtype} with {stored[scale].dtype} scales of shape "
            f"{list(stored[scale].shape)}: no format that can be read (MXFP8, MXFP4, NVFP4, FP8 by rows)"
        )
    if form.group and spec.shape[-1] % form.group:
        raise UserError(f"tensor {values} in {tensor.file}: {spec.shape[-1]} columns are no multiple of {form.group}")
    _check_shape(values, tensor, form.values_shape(spec.shape))
    if form.group:
        _check_shape(scale, stored[scale], form.scale_shape(spec.shape))
    for name in (tensor_scale, input_scale):
        if name is not None and (stored[name].dtype != "F32" or stored[name].shape not in ((), (1,))):
            raise UserError(f"tensor {name} in {stored[name].file} must be one F32 number")
    return StoredWeight(spec, form, values, scale, tensor_scale, input_scale)


def _form(spec: TensorSpec, values: StoredTensor, scale: StoredTensor, tensor_scale: str | None) -> Format | None:
    if tensor_scale is None and scale.dtype in _E8M0:
        return MXFP8 if values.dtype == "F8_E4M3" else MXFP4
    if tensor_scale is not None and scale.dtype == "F8_E4M3" and values.dtype == "U8":
        return NVFP4 if tensor_scale.endswith("_2") else NVFP4_PACKED
    if tensor_scale is None and scale.dtype in WEIGHT_TYPES and values.dtype == "F8_E4M3":
        # One number for each row, or for all of them; scales of square blocks cannot be read.
        return FP8 if scale.shape in ((), (1,), (spec.shape[0],), (spec.shape[0], 1)) else None
    return None


def _check_shape(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UserError(
            f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
        )


def _check_config(weight: StoredWeight, module: str, tensor: StoredTensor, quantisation: Quantisation) -> None:
    where = f"tensor {weight.values} in {tensor.file} is stored as {weight.form.name}"
    if quantisation.excludes(module):
        raise UserError(f"{where}, but quantization_config excludes {module}")
    if weight.form not in quantisation.allowed(module):
        names = " or ".join(form.name for form in quantisation.allowed(module))
        raise UserError(f"{where}, but quantization_config says {names}")


def _is_multi_token_prediction(name: str) -> bool:
    """MTP weights, which no published checkpoint holds though its config announces them: left on disk."""
    return name.startswith("mtp.") or ".mtp." in name

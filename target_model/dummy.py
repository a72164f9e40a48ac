"""Targets with random weights, for performance work: the full model or fewer layers, in any format, made in place."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.format_coverage import parameter_formats
from target_model.memory import check_memory
from target_model.model import TargetModel
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import E2M1, Format
from target_model.shard_loading import check_groups
from target_model.sharding import Shard, ShardedTarget, part_bytes, shard_specs
from target_model.tensor_names import text_specs


@dataclass(frozen=True)
class DummyWeights:
    """What to make instead of loading. `layers`: only so many, from the first; None: all."""

    format_name: str = "bf16"
    layers: int | None = None

    def __str__(self) -> str:
        layers = "" if self.layers is None else f", the first {self.layers} layers"
        return f"random weights as {self.format_name}{layers}"

    def config(self, full: M3Config) -> M3Config:
        """The config of the model that is made."""
        if self.layers is None:
            return full
        if not 1 <= self.layers <= full.num_layers:
            raise UserError(f"--layers {self.layers}: the target has {full.num_layers}")
        return replace(
            full,
            num_layers=self.layers,
            sparse_layers=full.sparse_layers[: self.layers],
            moe_layers=full.moe_layers[: self.layers],
        )


def dummy_target(
    name: str,
    config: M3Config,
    format_name: str = "bf16",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> TargetModel:
    """A language model with random weights on `device`, quantised where a checkpoint in `format_name` would be.

    Nothing passes through host memory. Raises UserError when the weights do not fit; all shapes have been checked
    without storage by then.
    """
    formats = parameter_formats(config, format_name)
    size = check_without_storage(config, format_name, dtype)
    try:
        check_memory(name, config, dtype, device, formats=formats)
    except UserError as error:
        raise UserError(
            f"{error}; its shapes were checked without storage: {size / 10**9:.2f} GB as {format_name}"
        ) from None
    model = TargetModel(config, dtype, formats=formats)
    model.materialise(device)
    generator = torch.Generator(device).manual_seed(seed)
    _fill(model, generator, generator)
    return model


def dummy_shard(
    name: str,
    config: M3Config,
    shard: Shard,
    format_name: str = "bf16",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    build: Callable[..., ShardedTarget] = ShardedTarget,
) -> ShardedTarget:
    """One process's part of a target with random weights; what the ranks repeat is the same on all of them, except that
    KV heads are not.
    """
    formats, own_formats = parameter_formats(config, format_name), {}
    for published, own, region in shard_specs(config, shard):
        form = formats.get(published.destination)
        if form is not None:
            check_groups(published.name, form, region, shard.size)
            own_formats[own.destination] = form
    part = part_bytes(config, shard, dtype.itemsize, formats=own_formats)
    check_memory(name, config, dtype, device, formats=own_formats, part=part)
    model = build(config, shard, dtype, formats=own_formats)
    model.materialise(device)
    own, repeated = (torch.Generator(device).manual_seed(number) for number in (seed + 1 + shard.rank, seed))
    _fill(model, own, repeated)
    return model


def _fill(model: TargetModel, generator: torch.Generator, repeated: torch.Generator) -> None:
    """Random numbers everywhere; those of embedding and routers are drawn with `repeated`."""
    quantised = {module for module in model.modules() if isinstance(module, QuantisedWeight)}
    inside = {id(parameter) for module in quantised for parameter in module.parameters()}
    for module in model.modules():
        if module in quantised:
            _fill_quantised(module, generator)
            continue
        for place, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in inside:
                shared = place == "gate" or isinstance(module, nn.Embedding)
                _fill_plain(place, parameter, repeated if shared else generator)


def check_without_storage(config: M3Config, format_name: str, dtype: torch.dtype = torch.bfloat16) -> int:
    """Builds the model on the meta device and returns the bytes it would take.

    Raises ValueError unless the published tensors fill every parameter exactly: the model and the table of tensors
    then disagree, which is a fault of this program.
    """
    model = TargetModel(config, dtype, formats=parameter_formats(config, format_name))
    expected: dict[str, int] = {}
    for spec in text_specs(config):
        heads = spec.rows[1] - spec.rows[0] if spec.kind == "norm" and spec.rows else 1
        expected[spec.destination] = expected.get(spec.destination, 0) + spec.size * heads
    found = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, QuantisedWeight):
            found = {other: size for other, size in found.items() if not other.startswith(f"{name}.")}
            found[name] = math.prod(module.shape)
    if found != expected:
        wrong = sorted(found.items() ^ expected.items())
        raise ValueError(f"the table of tensors and the model differ in {wrong[0][0]}")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _fill_plain(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "scale" in name:
        parameter.fill_(1.0)
    elif parameter.dim() == 1:
        parameter.zero_()
    else:
        # One matrix at a time: filling in fp32 may need a second copy of what is filled.
        for matrix in parameter if parameter.dim() == 3 else [parameter]:
            matrix.normal_(std=1 / math.sqrt(parameter.shape[-1]), generator=generator)


def _fill_quantised(weight: QuantisedWeight, generator: torch.Generator) -> None:
    """Random codes; the scales give the weights the variance 1 / K (or, as a power of two, near it)."""
    for matrix in weight.values.view(torch.uint8) if weight.values.dim() == 3 else [weight.values.view(torch.uint8)]:
        matrix.random_(0, 256, generator=generator)
        if weight.form.per_byte == 1:
            # The codes of NaN, 0x7f and 0xff, become their neighbours.
            matrix.sub_((matrix.bitwise_and(0x7F) == 0x7F).to(torch.uint8))
    factor = 1 / math.sqrt(weight.shape[-1]) / _code_size(weight.form)
    if weight.tensor_scale is None:
        weight.scale.fill_(127 + round(math.log2(factor)))
    else:
        weight.scale.view(torch.uint8).fill_(0x38)  # 1.0 in e4m3
        weight.tensor_scale.fill_(factor if weight.form.tensor_scale == "multiply" else 1 / factor)


def _code_size(form: Format) -> float:
    """Root mean square of a number whose code is drawn uniformly."""
    if form.per_byte == 2:
        numbers = torch.tensor(E2M1)
    else:
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return float(numbers.square().mean().sqrt())

"""A draft whose products read quantised weights: a draft level has few rows, and waits for its weights to be read.

Quantised when it is loaded, from the published checkpoint; norms and embedding (of which a row is read) stay as they
are. No answer depends on it, as the draft only proposes. For serving only: there are no gradients.
"""

from torch import Tensor, nn

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from target_model.kernels import ops
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import MXFP4, MXFP8, Format, quantise

FORMATS = {"mxfp8": MXFP8, "mxfp4": MXFP4}
PRODUCTS = ("fc", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


class QuantisedLinear(nn.Module):
    """In place of a linear layer: its weight in a format of FORMATS, its bias as it was."""

    def __init__(self, plain: nn.Linear, form: Format):
        super().__init__()
        self.weight = QuantisedWeight(tuple(plain.weight.shape), form).to_empty(device=plain.weight.device)
        self.weight.store(quantise(form, plain.weight), (slice(None),))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[.., K] -> [.., N], in the type of x."""
        y = ops.linear(x.reshape(-1, x.shape[-1]), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def draft_format(name: str | None) -> Format | None:
    """The format behind a name of FORMATS; None and "none": the weights stay as they are."""
    if name in (None, "none"):
        return None
    if name not in FORMATS:
        raise UserError(f"unknown draft weights {name!r}: expected none, {' or '.join(FORMATS)}")
    return FORMATS[name]


def quantise_draft(draft: Eagle3Draft, form: Format) -> None:
    """Replaces the draft's products, in place and one by one. UserError where a weight's columns do not divide into
    groups.
    """
    config = draft.config
    for name in PRODUCTS:
        columns = draft.get_submodule(name).weight.shape[1]
        if columns % form.group:
            raise UserError(
                f"draft weights in {form.name}: {name} has {columns} columns, which do not divide into groups of "
                f"{form.group} (hidden size {config.hidden_size}, intermediate size {config.intermediate_size})"
            )
    for name in PRODUCTS:
        setattr(draft, name, QuantisedLinear(draft.get_submodule(name), form))


def stored_as(draft: Eagle3Draft) -> Format | None:
    """The format of the draft's products."""
    return draft.lm_head.weight.form if isinstance(draft.lm_head, QuantisedLinear) else None

"""The two ends of a frozen target: what training from a feature store needs of its weights."""

import torch

from target_model.checkpoint import check_tensors, read_weight
from target_model.errors import UserError
from target_model.model import TargetModel
from target_model.quantised_formats import Packed
from target_model.resolve import ResolvedTarget
from target_model.shards import open_shard, read_headers


def load_ends(target: ResolvedTarget, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """The target with embedding, final norm and output head only; its layers have no storage and cannot run.

    For MiniMax-M3 these are 2.5 of 427 billion parameters. The headers of the whole checkpoint are checked.
    """
    model = TargetModel(target.config, dtype)
    ends = {"embed_tokens.weight": model.embed_tokens, "norm.scale": model.norm, "lm_head.weight": model.lm_head}
    # The rotary table tells the model's device.
    for module in (*ends.values(), model.rotary):
        module.to_empty(device=device)
    model.rotary.reset_table()
    stored = read_headers(target.path)
    for weight in check_tensors(target.config, stored, target.path):
        if weight.spec.destination not in ends:
            continue
        file = stored[weight.values].file
        with open_shard(file) as shard:
            tensor = read_weight(weight, stored, file, shard)
        if isinstance(tensor, Packed):
            raise UserError(f"{file}: {weight.values} is quantised; an embedding or head to train from must be plain")
        # As in loading the whole: norms are published as w of 1 + w.
        place = model.get_parameter(weight.spec.destination)
        place.copy_(1 + tensor.float() if weight.spec.kind == "norm" else tensor)
    return model

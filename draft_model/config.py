"""The draft's configuration: the published `LlamaForCausalLMEagle3` JSON as a validated, frozen dataclass."""

import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_model.config import M3Config, default_taps
from target_model.errors import UserError

logger = logging.getLogger(__name__)

ARCHITECTURE = "LlamaForCausalLMEagle3"

# Keys that this implementation does not interpret because they cannot change what the draft computes.
_NEUTRAL_KEYS = frozenset(
    "architectures model_type dtype torch_dtype transformers_version bos_token_id eos_token_id pad_token_id use_cache "
    "initializer_range attention_dropout pretraining_tp auto_map _name_or_path id2label label2id "
    "speculators_version speculators_model_type training".split()
)
# Keys that would change it: only the value written here is supported.
_FIXED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rope_scaling": None,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of a one-layer EAGLE-3 draft.

    taps are target layers in the "entering layer k" convention: the residual stream that enters the 0-based layer k.
    fc_norm             RMSNorm of each tap before fc
    norm_output         the state fed to the next draft step is norm(h), not h (EAGLE-3.1)
    norm_before_residual the residual is hidden_norm(g), not g
    attention_bias      biases on q, k, v and o
    A draft_vocab_size below vocab_size means a pruned vocabulary with a d2t map.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    max_position: int
    rms_norm_eps: float
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    attention_bias: bool
    taps: tuple[int, ...]

    @staticmethod
    def for_target(target: M3Config, **changes: Any) -> "DraftConfig":
        """In the published shape: the target's width, heads (as many KV heads) and vocabulary, an MLP three times as
        wide; `changes` are other values by field.

        Raises UserError without taps below 7 layers, where a target has no default ones.
        """
        heads = changes.get("num_heads", target.num_heads)
        if "taps" not in changes:
            changes["taps"] = default_taps(target.num_layers)
        published = {
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": 3 * target.hidden_size,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "rope_theta": target.rope_theta,
            "max_position": target.max_position,
            "rms_norm_eps": target.rms_norm_eps,
            "fc_norm": True,
            "norm_output": True,
            "norm_before_residual": False,
            "attention_bias": False,
        }
        return DraftConfig(**{**published, **changes})

    def __post_init__(self) -> None:
        for name in (
            "hidden_size target_hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size "
            "draft_vocab_size max_position"
        ).split():
            if getattr(self, name) < 1:
                raise UserError(f"draft config: {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"draft config: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise UserError(f"draft config: head_dim must be even for RoPE, not {self.head_dim}")
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft config: draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if not self.taps or len(set(self.taps)) != len(self.taps) or min(self.taps) < 0:
            raise UserError(f"draft config: aux layer ids must be distinct and not negative, not {list(self.taps)}")

    def check_target(self, target: M3Config, where: object) -> None:
        """UserError where the draft at `where` is not one for this target."""
        for name, ours, theirs in (
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise UserError(
                    f"draft {where}: its {name} is {ours}, but the target has {theirs}: they do not belong together"
                )
        target.check_taps(self.taps)

    @property
    def num_aux(self) -> int:
        return len(self.taps)

    @property
    def pruned(self) -> bool:
        """Whether the draft predicts only part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @staticmethod
    def from_json(source: dict | str | os.PathLike, default_taps: tuple[int, ...] | None = None) -> "DraftConfig":
        """From a published config.json (its dict or path). `default_taps` serve a file that names no layer ids."""
        where = "draft config" if isinstance(source, dict) else str(source)
        if not isinstance(source, dict):
            source = read_json(Path(source))
        reader = _Reader(source, where)
        hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        vocab = reader.integer("vocab_size")
        config = DraftConfig(
            hidden_size=hidden,
            target_hidden_size=reader.integer("target_hidden_size", hidden),
            intermediate_size=reader.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=reader.integer("num_key_value_heads", heads),
            head_dim=reader.integer("head_dim", hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=reader.integer("draft_vocab_size", vocab),
            rope_theta=reader.rope_theta(),
            max_position=reader.integer("max_position_embeddings"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            fc_norm=reader.boolean("fc_norm"),
            norm_output=reader.boolean("norm_output"),
            norm_before_residual=reader.boolean("norm_before_residual"),
            attention_bias=reader.boolean("attention_bias"),
            taps=reader.taps(default_taps),
        )
        reader.finish()
        return config

    def to_json(self) -> dict[str, Any]:
        """The published layout, with the layer ids written out in the "entering layer k" convention."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": self.attention_bias,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "num_aux_hidden_states": self.num_aux,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.taps)},
        }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one sentence that names the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


class _Reader:
    """Takes typed fields out of the JSON and remembers which keys were read."""

    def __init__(self, source: dict[str, Any], where: str):
        self.source, self.where = source, where
        self.seen = {"rope_parameters", "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"}

    def _fail(self, key: str, expected: str) -> None:
        raise UserError(f"{self.where}: {key} must be {expected}, not {self.source.get(key)!r}")

    def _take(self, key: str, default: Any) -> Any:
        self.seen.add(key)
        value = self.source.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: {key} is missing")
            return default
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._take(key, default)
        if type(value) is not int:
            self._fail(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self._take(key, None)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self._fail(key, "a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._take(key, False)
        if type(value) is not bool:
            self._fail(key, "true or false")
        return value

    def rope_theta(self) -> float:
        parameters = self.source.get("rope_parameters")
        if parameters is None:
            return self.number("rope_theta")
        if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
            self._fail("rope_parameters", "the default rope type")
        self.seen.add("rope_theta")
        return _Reader({"rope_theta": self.source.get("rope_theta"), **parameters}, self.where).number("rope_theta")

    def taps(self, default: tuple[int, ...] | None) -> tuple[int, ...]:
        nested = self.source.get("eagle_config") or {}
        if not isinstance(nested, dict):
            self._fail("eagle_config", "an object")
        if nested.get("use_aux_hidden_state", True) is not True:
            raise UserError(f"{self.where}: eagle_config.use_aux_hidden_state must be true for EAGLE-3")
        key = "eagle_aux_hidden_state_layer_ids"
        given = [ids for ids in (nested.get(key), self.source.get(key)) if ids is not None]
        if len(given) == 2 and given[0] != given[1]:
            raise UserError(f"{self.where}: {key} differs between eagle_config {given[0]} and the top level {given[1]}")
        taps = given[0] if given else default
        if taps is None:
            raise UserError(f"{self.where}: {key} is missing and no target is known to take the default from")
        if not isinstance(taps, list | tuple) or any(type(tap) is not int for tap in taps):
            raise UserError(f"{self.where}: {key} must be a list of integers, not {taps!r}")
        count = self.source.get("num_aux_hidden_states")
        if count is not None and count != len(taps):
            raise UserError(f"{self.where}: num_aux_hidden_states is {count}, but {key} names {len(taps)} layers")
        return tuple(taps)

    def finish(self) -> None:
        """Refuses values that would change the arithmetic, and says which keys were not understood."""
        for key, value in _FIXED_KEYS.items():
            if self.source.get(key, value) != value:
                raise UserError(f"{self.where}: {key} must be {json.dumps(value)}, not {json.dumps(self.source[key])}")
        architectures = self.source.get("architectures") or [ARCHITECTURE]
        if "Eagle3" not in str(architectures[0]):
            raise UserError(f"{self.where}: architecture {architectures[0]} is not an EAGLE-3 draft ({ARCHITECTURE})")
        unknown = sorted(set(self.source) - self.seen - _NEUTRAL_KEYS - set(_FIXED_KEYS))
        if unknown:
            logger.warning("%s: these keys are not used: %s", self.where, ", ".join(unknown))

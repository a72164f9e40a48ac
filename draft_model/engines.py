"""What each engine reads of an EAGLE-3 draft: one table, which exports are written from and every directory is checked
against.

Sources: vLLM `llama_eagle3.py` and its reader of speculators configs, SGLang `llama_eagle3.py` and
`set_eagle3_layers_to_capture`, ATOM `eagle3_llama.py`, speculators 0.9 `Eagle3SpeculatorConfig` and `Eagle3DraftModel`.
"""

from dataclasses import dataclass
from typing import Any, Literal

Use = Literal["required", "read", "ignored"]
Convention = Literal["entering", "output"]

# Layer ids mean the residual stream that enters layer k, or that leaves it (which enters layer k + 1).
ID_OFFSET: dict[Convention, int] = {"entering": 0, "output": -1}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Field:
    """One key of config.json. `kind`: a type's name, or the one value that works. An `ignored` switch must be off."""

    use: Use
    kind: Any

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value that is there."""
        types = {"integer": (int,), "number": (int, float), "switch": (bool,), "text": (str,)}
        items = {"integers": int, "texts": str}
        if isinstance(self.kind, str) and self.kind in items:
            right = isinstance(value, list) and all(type(item) is items[self.kind] for item in value)
            return None if right else f"is {value!r}, expected a list of {self.kind}"
        if not isinstance(self.kind, str) or self.kind not in types:
            return None if value == self.kind else f"is {value!r}, expected {self.kind!r}"
        if type(value) not in types[self.kind]:
            return f"is {value!r}, expected {self.kind}"
        if self.use == "ignored" and value is True:
            return "is true, but the engine does not read it"
        return None


@dataclass(frozen=True)
class Engine:
    """How one engine wants a draft.

    layer_prefixes of the decoder layer's tensors: the one that is written, and another that is read as well
    layer_ids     meaning of explicit layer ids
    taps          how many taps it is built for (None: any)
    reads_d2t     whether a pruned vocabulary works
    equal_widths  whether target_hidden_size must equal hidden_size
    target_embedding  whether it serves with the target's embedding in place of the draft's
    """

    name: str
    layer_prefixes: tuple[str, ...]
    layer_ids: Convention
    fields: dict[str, Field]
    taps: int | None = None
    reads_d2t: bool = True
    equal_widths: bool = False
    target_embedding: bool = False
    serve: str = ""


def _sizes(prefix: str = "") -> dict[str, Field]:
    integers = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim max_position_embeddings"
    fields = {name: Field("required", "integer") for name in f"{integers} vocab_size".split()}
    fields |= {
        "model_type": Field("required", "llama"),
        "num_hidden_layers": Field("required", 1),
        "hidden_act": Field("required", "silu"),
        "rms_norm_eps": Field("required", "number"),
        "rope_theta": Field("required", "number"),
        "tie_word_embeddings": Field("required", False),
        "rope_scaling": Field("read", None),
        "mlp_bias": Field("read", False),
    }
    return {prefix + name: field for name, field in fields.items()}


def _llama(**switches: Use) -> dict[str, Field]:
    """The `LlamaForCausalLMEagle3` layout. `switches` says which of its switches the engine reads."""
    return {
        **_sizes(),
        "architectures": Field("required", ["LlamaForCausalLMEagle3"]),
        "target_hidden_size": Field("read", "integer"),
        # SGLang fails without it, and takes null for "use the target's head".
        "draft_vocab_size": Field("required", "integer"),
        "num_aux_hidden_states": Field("read", "integer"),
        "eagle_config.use_aux_hidden_state": Field("read", True),
        f"eagle_config.{LAYER_IDS}": Field("required", "integers"),
        "dtype": Field("read", "text"),
        **{name: Field(use, "switch") for name, use in switches.items()},
    }


_LAYER = "transformer_layer_config."
_PROPOSAL = "speculators_config.proposal_methods"
_SPECULATORS = {
    **_sizes(_LAYER),
    f"{_LAYER}attention_bias": Field("required", "switch"),
    f"{_LAYER}rope_parameters.rope_type": Field("read", "default"),
    f"{_LAYER}rope_parameters.rope_theta": Field("read", "number"),
    "architectures": Field("required", ["Eagle3Speculator"]),
    "speculators_model_type": Field("required", "eagle3"),
    "speculators_version": Field("read", "text"),
    "draft_vocab_size": Field("required", "integer"),
    "target_hidden_size": Field("read", "integer"),
    LAYER_IDS: Field("required", "integers"),
    # Absent, speculators takes it for false and vLLM for true.
    "norm_before_residual": Field("required", "switch"),
    "norm_before_fc": Field("required", False),
    "fc_norm": Field("required", "switch"),
    "norm_output": Field("required", "switch"),
    "embed_requires_grad": Field("read", "switch"),
    "speculators_config.algorithm": Field("required", "eagle3"),
    "speculators_config.default_proposal_method": Field("required", "greedy"),
    f"{_PROPOSAL}.0.proposal_type": Field("required", "greedy"),
    f"{_PROPOSAL}.0.speculative_tokens": Field("required", "integer"),
    f"{_PROPOSAL}.0.verifier_accept_k": Field("read", 1),
    f"{_PROPOSAL}.0.accept_tolerance": Field("read", "number"),
    "speculators_config.verifier.name_or_path": Field("required", "text"),
    "speculators_config.verifier.architectures": Field("required", "texts"),
    "dtype": Field("read", "text"),
}

_ALL: dict[str, Use] = dict.fromkeys(("fc_norm", "norm_output", "norm_before_residual", "attention_bias"), "read")
_NO_RESIDUAL_OR_BIAS: dict[str, Use] = _ALL | {"norm_before_residual": "ignored", "attention_bias": "ignored"}

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("hf", ("layers.0.", "midlayer."), "entering", _llama(**_ALL)),
        Engine(
            "vllm",
            ("layers.0.", "midlayer."),
            "entering",
            _llama(**_ALL),
            serve="vllm serve {target} --speculative-config "
            '\'{{"method": "eagle3", "model": "{draft}", "num_speculative_tokens": 3}}\'',
        ),
        Engine(
            "sglang",
            # Releases before MiniMax-M3 drop layers.0.* without a word.
            ("midlayer.", "layers.0."),
            "output",
            _llama(**_NO_RESIDUAL_OR_BIAS),
            taps=3,
            target_embedding=True,
            serve="python -m sglang.launch_server --model {target} --speculative-algorithm EAGLE3 "
            "--speculative-draft-model-path {draft} --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
        ),
        Engine(
            "atom",
            ("midlayer.", "layers.0."),
            "entering",
            _llama(**_NO_RESIDUAL_OR_BIAS),
            reads_d2t=False,
            target_embedding=True,
            serve="python -m atom.entrypoints.openai_server --model {target} --method eagle3 --draft-model {draft} "
            "--num-speculative-tokens 3",
        ),
        Engine(
            "speculators",
            ("layers.0.",),
            "entering",
            _SPECULATORS,
            equal_widths=True,
            serve="vllm serve {draft}",
        ),
    )
}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as dotted keys; lists of objects by position, other lists whole."""
    if isinstance(values, list) and values and all(isinstance(item, dict) for item in values):
        values = {str(index): item for index, item in enumerate(values)}
    if not isinstance(values, dict):
        return {prefix.removesuffix("."): values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def field_problems(engine: Engine, config: dict[str, Any]) -> list[str]:
    """Everything in a config.json that `engine` would miss, misread or not read."""
    flat = flatten(config)
    problems = [
        f"config.json: {name} is missing"
        for name, field in engine.fields.items()
        if field.use == "required" and name not in flat
    ]
    for name, value in flat.items():
        field = engine.fields.get(name)
        found = None if field is None else field.problem(value)
        if found is not None:
            problems.append(f"config.json: {name} {found}")
    return problems

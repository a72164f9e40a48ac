"""The typed training configuration: YAML under `configs/`, dotted overrides, every mistake named by its key."""

import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import configs
from target_model.errors import UserError
from train.config_text import apply_override, parse_yaml, sentence


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Section = TypeVar("Section", bound=_Section)
ThinkingMode = Literal["auto", "enabled", "disabled", "adaptive"]


class SourceConfig(_Section):
    """One of several sources: `path` as in `data.path`."""

    path: str
    weight: float | None = Field(None, gt=0, description="share of the mixture; given for all sources or for none")
    thinking_mode: ThinkingMode | None = Field(None, description="None: data.thinking_mode")


class DataConfig(_Section):
    """Where the rows come from and how they are cut. One of `path` and `sources` is given."""

    path: str | list[str] | None = Field(
        None,
        description="JSONL (also .xz, .gz) or parquet files, directories of them or saved by `datasets`, "
        "`hub:OWNER/NAME:SPLIT`, `bundled:demo`",
    )
    sources: list[SourceConfig] | None = Field(None, min_length=1)
    exhausted: Literal["stop", "repeat"] = Field(
        "stop",
        description="a weighted mixture ends where a source does, or starts that source over until all were read",
    )
    streaming: bool = Field(
        True, description="parquet and hub data are read as they come; false: by way of the cache of `datasets`"
    )
    sequence_length: int = Field(512, ge=8)
    packing: bool = Field(False, description="several documents in one row; none of them sees another")
    overflow: Literal["split", "truncate"] = Field("split", description="what happens to a document longer than a row")
    thinking_mode: ThinkingMode = "auto"
    max_documents: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_origin(self) -> "DataConfig":
        if (self.path is None) == (self.sources is None):
            raise ValueError("give one of path and sources")
        if len({source.weight is None for source in self.sources or ()}) == 2:
            raise ValueError("give all sources a weight, or none")
        return self

    @property
    def description(self) -> str:
        """The paths, for messages."""
        if self.sources is not None:
            return ", ".join(source.path for source in self.sources)
        return self.path if isinstance(self.path, str) else ", ".join(self.path)


class DraftSettings(_Section):
    """Sizes and switches of the draft; sizes left out follow the target."""

    init_from: str | None = Field(None, description="a draft to continue from (path, hub id or `eagle3`)")
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    draft_vocab_size: int | None = Field(None, ge=2, description="the most frequent tokens of the data only")
    taps: list[int] | None = Field(None, description='target layers, "entering layer k"')
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    attention_bias: bool = False
    train_embedding: bool = False
    train_head: bool = True
    initialisation: Literal["random", "regression"] = Field(
        "random",
        description="without init_from; regression: fc and attention start from a least-squares fit of the target's "
        "next state",
    )
    regression_tokens: int = Field(100_000, ge=1, description="tokens that the least-squares fit looks at")


class TTTConfig(_Section):
    """Training-time test."""

    steps: int = Field(7, ge=1, le=16)
    decay: float = Field(0.8, gt=0, le=1)
    attention: Literal["auto", "explicit", "flash"] = "auto"
    draft_attention: str = Field(
        "full", description="as served: full, or sparse or sparse:LAYER for the blocks that a target layer chose"
    )


class LossConfig(_Section):
    kind: Literal["kl", "lk"] = "kl"
    eta: float = Field(3.0, ge=0, description="LK: weight of the KL part is exp(-eta * alpha)")
    chunk_elements: int = Field(
        1 << 26, ge=1, description="logits held at once, rows x vocabulary, of all steps and the target"
    )


class OptimizerConfig(_Section):
    lr: float = Field(1e-4, gt=0)
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    skip_limit: int = Field(
        10, ge=1, description="skipped batches in a row (loss or gradient not finite) that end a run"
    )


LENGTHS = ("steps", "epochs", "tokens")


class ScheduleConfig(_Section):
    """Length of the run (exactly one of steps, epochs, tokens) and the learning rate's course."""

    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    tokens: int | None = Field(None, ge=1)
    warmup: float = Field(0.02, ge=0, le=1, description="fraction of the steps")
    final: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a fraction of lr")

    @model_validator(mode="after")
    def _one_length(self) -> "ScheduleConfig":
        if sum(value is not None for value in (self.steps, self.epochs, self.tokens)) != 1:
            raise ValueError("give exactly one of steps, epochs, tokens")
        return self


class FeatureConfig(_Section):
    cache: bool = Field(False, description="keep captured features in memory, so that later epochs need no target")
    capture_rows: int = Field(16, ge=1, description="rows in one forward pass of the target")
    stages: int = Field(
        1, ge=1, description="processes over which the target's layers are spread; divides the number of processes"
    )
    store: str | None = Field(None, description="directory that `spec capture` filled: rows and features come from it")

    @model_validator(mode="after")
    def _one_place(self) -> "FeatureConfig":
        if self.cache and self.store is not None:
            raise ValueError("cache keeps what is captured online, a store needs none: set one of the two")
        if self.stages > 1 and (self.cache or self.store is not None):
            raise ValueError("stages spread the target of online features that are not kept: no cache and no store")
        return self


class EngineConfig(_Section):
    """DeepSpeed. global batch = micro_batch x accumulate x processes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU, bfloat16 on CUDA")
    zero_stage: int = Field(0, ge=0, le=3)
    micro_batch: int = Field(8, ge=1)
    accumulate: int = Field(1, ge=1)
    threads: int | None = Field(None, ge=1, description="CPU threads; None: torch's own choice")
    compile: bool = False
    activation_checkpointing: bool = Field(False, description="work the layer out again in the backward pass")
    offload_optimizer: bool = Field(False, description="masters, moments and the update in host memory (ZeRO 1-3)")
    offload_parameters: bool = Field(False, description="weights in host memory until they are used (ZeRO 3)")
    deepspeed: dict[str, Any] = Field({}, description="goes over the DeepSpeed configuration made from the rest")

    @model_validator(mode="after")
    def _offload_has_its_stage(self) -> "EngineConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        return self


class CheckpointConfig(_Section):
    every: int = Field(500, ge=1, description="optimizer steps")
    keep: int = Field(2, ge=1, description="the last ones; the best one is kept besides")
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


class EvalConfig(_Section):
    every: int | None = Field(None, ge=1, description="optimizer steps between judgements; None: only at the end")
    patience: int | None = Field(None, ge=1, description="judgements in a row without a better AL that end the run")
    judge: Literal["served", "replay", "none"] = Field(
        "served", description="replay: the AL of greedy chains worked out on `answers`, without serving; none: no AL"
    )
    answers: str | None = Field(None, description="the target's greedy answers: spec data regenerate --temperature 0")

    @model_validator(mode="after")
    def _what_the_judge_needs(self) -> "EvalConfig":
        if self.patience is not None and self.every is None:
            raise ValueError("patience needs eval.every")
        if (self.judge == "replay") != (self.answers is not None):
            raise ValueError("judge=replay and answers need each other")
        return self


class LogConfig(_Section):
    every: int = Field(10, ge=1)
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    project: str = Field("eagle3", description="project of Weights & Biases")
    tensorboard: bool = False
    curves: bool = Field(True, description="loss and acceptance as curves.png in the run's folder")


class TrainConfig(_Section):
    """One training run."""

    name: str = Field(pattern=r"^[\w][\w.\-]*$")
    target: str = "m3-tiny"
    output: str = Field("runs", description="directory that holds the run's folder")
    seed: int = 0
    resume: bool = Field(True, description="continue the run of this name; false replaces it")
    data: DataConfig
    draft: DraftSettings = DraftSettings()
    ttt: TTTConfig = TTTConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig
    features: FeatureConfig = FeatureConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _replay_needs_features(self) -> "TrainConfig":
        if self.eval.judge == "served" and self.features.stages > 1:
            raise ValueError(
                f"features.stages={self.features.stages} leaves no process the whole target to serve: "
                "set eval.judge to replay (with eval.answers) or none"
            )
        features = self.features
        if self.ttt.draft_attention != "full" and (features.stages > 1 or features.cache or features.store is not None):
            raise ValueError(
                f"ttt.draft_attention={self.ttt.draft_attention} needs the target's choices of blocks, which only "
                "online features of a whole target have: no features.stages, cache or store"
            )
        if self.eval.judge == "replay" and self.features.store is not None:
            raise ValueError("eval.judge=replay needs the target, and features.store trains without it")
        return self

    @property
    def run_directory(self) -> Path:
        return Path(self.output) / self.name


def load_config(source: str | os.PathLike, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """From a YAML file, or from the name of one under `configs/`, with overrides like `optimizer.lr=3e-4`, each key
    once. A length of the run among them (schedule.steps, epochs or tokens) takes the place of the file's.
    """
    path = Path(source)
    if not path.is_file():
        bundled = {recipe.stem: recipe for recipe in sorted(Path(configs.__file__).parent.glob("*.yaml"))}
        if str(source) not in bundled:
            raise UserError(f"no training configuration {source}: neither a file nor one of {', '.join(bundled)}")
        path = bundled[str(source)]
    values = parse_yaml(path.read_text(), str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values")
    keys = [apply_override(values, override) for override in overrides]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"override {repeated[0]} is given twice")
    lengths = [name for name in LENGTHS if f"schedule.{name}" in keys and values["schedule"][name] is not None]
    for other in LENGTHS if lengths else ():
        if other not in lengths:
            values["schedule"].pop(other, None)
    return parse_config(values, str(path) if not overrides else f"{path} with overrides")


def parse_config(values: dict[str, Any], where: str = "configuration") -> TrainConfig:
    """Validates plain values; the first mistake becomes one line that names its key."""
    return parse_section(TrainConfig, values, where)


def parse_section(section: type[Section], values: dict[str, Any], where: str) -> Section:
    """The same for one section."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {sentence(error.errors()[0], section)}") from None

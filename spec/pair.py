"""A target and its draft in this process, and engines over them: for measurements, the demo and the judge."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draft_model.checkpoint import load_draft
from draft_model.model import Eagle3Draft
from draft_model.quantised import draft_format, quantise_draft
from draft_model.resolve import resolve_draft
from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.tree import TreeConfig, step_slots
from target_model.batch import MAX_SCRATCH
from target_model.chat import THINK_CLOSE
from target_model.dummy import DummyWeights
from target_model.errors import UserError
from target_model.format_coverage import check_format_name
from target_model.model import TargetModel
from target_model.resolve import resolve_target
from target_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Pair:
    """A loaded target and draft. `description` says which files they are and why these."""

    target: TargetModel
    draft: Eagle3Draft
    tokenizer: Tokenizer
    description: str

    def with_draft(self, draft: Eagle3Draft) -> "Pair":
        """The same target with another draft."""
        return replace(self, draft=draft)

    def render(self, question: str, thinking: bool = False) -> list[int]:
        """Prompt ids of a conversation that opens with this question."""
        return self.render_conversation([{"role": "user", "content": question}], thinking)

    def render_conversation(self, messages: list[dict[str, str]], thinking: bool = False) -> list[int]:
        """Prompt ids of a conversation that ends with the user's turn."""
        return self.tokenizer.render_chat(messages, thinking_mode="enabled" if thinking else "disabled")

    def answer_message(self, token_ids: list[int], thinking: bool = False) -> dict[str, str]:
        """An answer as a turn of the conversation; one cut in its reasoning has no content."""
        if not thinking:
            return {"role": "assistant", "content": self.tokenizer.decode(token_ids)}
        close = self.tokenizer.special[THINK_CLOSE]
        end = token_ids.index(close) if close in token_ids else len(token_ids)
        reasoning, content = self.tokenizer.decode(token_ids[:end]), self.tokenizer.decode(token_ids[end + 1 :])
        return {"role": "assistant", "content": content, "reasoning_content": reasoning}

    def engine(
        self, tree: TreeConfig | None, longest: int, sequences: int = 1, draft_attention: str = "full"
    ) -> Engine:
        """An engine for `sequences` at once, each at most `longest` tokens, answer included; plain without `tree`."""
        slots = longest + (step_slots((tree,), ahead=True) if tree else 1)
        pages = sequences * -(-slots // self.target.config.block_size)
        draft = None if tree is None else self.draft
        return Engine(
            self.target,
            draft,
            tree,
            pages=pages,
            context=longest,
            max_running=sequences,
            draft_attention=draft_attention,
        )


def load_pair(
    target: str,
    draft: str,
    device: str = "auto",
    *,
    dummy: DummyWeights | None = None,
    tensor_parallel: int = 1,
    draft_weights: str | None = None,
) -> Pair:
    """Loads by the names of the command line: fp32 on the CPU, bf16 on CUDA. `dummy`: random weights instead.
    `draft_weights`: quantise the draft's products.
    """
    place = choose_device(device)
    options = EngineOptions(
        target,
        draft,
        device=place,
        pages=MAX_SCRATCH,
        dummy=dummy,
        tensor_parallel=tensor_parallel,
        draft_weights=draft_weights,
    )
    engine, tokenizer, about = load_engine(options)
    lines = about.lines[: 2 if tensor_parallel == 1 else 3]
    return Pair(engine.runner.target, engine.runner.drafter.draft, tokenizer, "\n".join(lines))


def pairs_of(
    target: str, drafts: Sequence[str], device: str = "auto", draft_weights: str | None = None
) -> dict[str, Pair]:
    """One target with several drafts, by the drafts' names; the target is loaded once. `draft_weights`: quantise the
    drafts' products.
    """
    first, form = load_pair(target, drafts[0], device, draft_weights=draft_weights), draft_format(draft_weights)
    pairs = {drafts[0]: first}
    for name in drafts[1:]:
        chosen = resolve_draft(name, resolve_target(target))
        draft = load_draft(chosen.path, first.draft.dtype, first.target.device, chosen.default_taps)
        draft.config.check_target(first.target.whole, chosen.path)
        if form is not None:
            quantise_draft(draft, form)
        about = first.description.splitlines()[0]
        pairs[name] = replace(first, draft=draft, description=f"{about}\n{chosen.why}")
    return pairs


def cache_dtype(name: str) -> torch.dtype | None:
    """The type behind "auto" (None: the weights' type) or "fp8"."""
    if name not in ("auto", "fp8"):
        raise UserError(f"unknown cache type {name!r}: expected auto or fp8")
    return torch.float8_e4m3fn if name == "fp8" else None


def dummy_weights_option(format_name: str | None, layers: int | None) -> DummyWeights | None:
    """What --dummy-weights and --layers ask for, None for a real checkpoint."""
    if format_name is None:
        if layers is not None:
            raise UserError("--layers shortens a target of --dummy-weights only")
        return None
    check_format_name(format_name)
    return DummyWeights(format_name, layers)


def choose_device(name: str) -> str:
    """The device behind "auto", "cpu", "cuda" or "cuda:N". Raises UserError for one that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return name

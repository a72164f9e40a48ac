"""Requests of the API, strictly typed: a field that is unknown, mistyped or not supported is an error that names it.

Fields OpenAI does not know are marked "ours". A field that only works with one value is listed with just that value.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, Tag, field_validator, model_validator

from serve.format_types import LIST, STRING, AnswerForm, Strict, Tool, Typed, branch_by, json_type, kind_of

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

StopString = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TemplateOptions(Strict):
    """Ours, under the name other servers use."""

    thinking_mode: Literal["enabled", "disabled", "adaptive"]


class SamplingFields(Strict):
    """What both completion endpoints share. None is "not given": the server's default for the model.

    Stop strings are looked for in all text of an answer, reasoning included.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag(STRING)] | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag(LIST)],
            branch_by(json_type, "a string or a list of strings"),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    user: str | None = None  # goes into the log

    # Ours.
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 is off, and so is -1, as other servers have it
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    priority: int = 0

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_tokens(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not key.isascii() or not key.isdigit():
                raise ValueError(f"keys are token ids, got {key!r}")
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1


def _prompt_kind(value: Any) -> str | None:
    """The branch below that a prompt is meant for; of a list, the first entry says it."""
    if not isinstance(value, list):
        return STRING if isinstance(value, str) else None
    first = value[0] if value else None
    return {str: "<strings>", list: "<token lists>"}.get(type(first), "<tokens>")


class CompletionRequest(SamplingFields):
    prompt: Annotated[
        Annotated[str, Tag(STRING)]
        | Annotated[list[str], Tag("<strings>")]
        | Annotated[list[TokenId], Tag("<tokens>")]
        | Annotated[list[list[TokenId]], Tag("<token lists>")],
        branch_by(_prompt_kind, "a string, a list of strings, token ids or a list of lists of them"),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: None = None
    skip_special_tokens: bool = True  # ours: false shows special tokens in the text

    @model_validator(mode="after")
    def _choices_fit(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.choices:
            raise ValueError("best_of: must be at least n")
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            raise ValueError("best_of: the best answers are known only at the end, so not with stream true")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 only with echo, there would be no text at all")
        return self


class ImageUrl(Strict):
    """A data: URL with the picture in it, or a file: URL where the server allows that."""

    url: str
    detail: Literal["auto"] | None = None


class VideoUrl(Strict):
    """A data: URL with the video in it, or a file: URL where the server allows that."""

    url: str


class ContentPart(Typed):
    type: Literal["text", "image_url", "video_url"]
    text: str | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None


class FunctionCall(Strict):
    name: str
    arguments: str
    parsed_arguments: Any = Field(None, exclude=True)  # the client's own: the arguments once more


class ToolCall(Strict):
    type: Literal["function"] = "function"
    id: str | None = None
    function: FunctionCall
    index: int | None = None  # as a client that joins streamed parts sends it back


class Message(Strict):
    """One message of any role. Fields of OpenAI's answers that are always empty here may be sent back as they came."""

    role: Literal["root", "system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(STRING)] | Annotated[list[ContentPart], Tag(LIST)],
            branch_by(json_type, "a string or a list of parts"),
        ]
        | None
    ) = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = Field(None, exclude=True)  # the client's own, of its parse() and stream(): the content once more

    @model_validator(mode="before")
    @classmethod
    def _fits_role(cls, value: Any) -> Any:
        # Before the fields are looked at: what is wrong in one that should not be there does not matter.
        role = kind_of(cls, "role", value)
        if role is None:
            return value
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if role != "assistant" and value.get(name):
                raise ValueError(f"{name}: only with role assistant")
        if role != "tool" and value.get("tool_call_id") is not None:
            raise ValueError("tool_call_id: only with role tool")
        content = value.get("content")
        kinds = [kind_of(ContentPart, "type", part) for part in content] if isinstance(content, list) else []
        if role not in ("user", "tool") and not set(kinds) <= {"text", None}:
            raise ValueError("content: pictures and videos only with the roles user and tool")
        return value

    @property
    def parts(self) -> list[ContentPart]:
        """The content in parts; a plain text has none."""
        return self.content if isinstance(self.content, list) else []


class ChatRequest(SamplingFields, AnswerForm):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Literal["none"] | None = None
    metadata: dict[str, str] | None = None  # goes into the log
    safety_identifier: str | None = None  # goes into the log
    prompt_cache_key: str | None = None  # as well: prefixes are found without it
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    # Not served; some clients send all fields that there are.
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    web_search_options: None = None
    thinking_mode: Literal["enabled", "disabled", "adaptive"] | None = None  # ours
    chat_template_kwargs: TemplateOptions | None = None
    draft_tokens: bool = False  # ours: every choice of a stream's chunks has `draft_tokens`, see serve/draft_tokens.py
    draft_trees: bool = False  # ours: as well `draft_trees`, what was verified since the last, see serve/draft_trees.py

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true")
        if self.draft_tokens and not self.stream:
            raise ValueError("draft_tokens: only with stream true")
        if self.draft_trees and not self.stream:
            raise ValueError("draft_trees: only with stream true")
        if self.draft_tokens and self.offered_tools:
            raise ValueError("draft_tokens: not together with tools, whose calls are not the model's own text")
        if self.constrained and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{name}: not where the answer has a form, which says where it ends")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_completion_tokens: differs from max_tokens, send one of them")
        modes = {
            self.thinking_mode,
            self.chat_template_kwargs and self.chat_template_kwargs.thinking_mode,
            "disabled" if self.reasoning_effort else None,
        } - {None}
        if len(modes) > 1:
            raise ValueError("thinking_mode: is given twice, with different values")
        return self

    @property
    def mode(self) -> Literal["enabled", "disabled", "adaptive"]:
        template_mode = self.chat_template_kwargs.thinking_mode if self.chat_template_kwargs else None
        return self.thinking_mode or template_mode or "disabled"


class TokenizeRequest(Strict):
    """Either a text, encoded as a completion prompt is, or messages, rendered as a chat is."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    thinking_mode: Literal["enabled", "disabled", "adaptive"] = "disabled"
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]

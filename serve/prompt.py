"""From API requests to prompt ids and sampling parameters. Long texts take time here: keep it off the event loop."""

from dataclasses import dataclass, replace
from typing import Any

from serve.api_errors import ApiError, from_user_error, refusal
from serve.grammar import Grammar
from serve.openai_types import MAX_CHOICES, ChatRequest, CompletionRequest, Message, SamplingFields
from serve.request import ImageSpan, SamplingParams
from serve.service import Service
from serve.shown import place_shown, read_shown, too_long
from target_model.errors import UserError

DEFAULT_COMPLETION_TOKENS = 16


def completion_prompts(request: CompletionRequest, service: Service) -> list[list[int]]:
    """Ids of every prompt. A raw prompt is the caller's whole token stream: special tokens in it are special."""
    given = request.prompt
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    if not prompts:
        raise refusal("must not be empty", "prompt")
    if len(prompts) * max(request.choices, request.best_of or 1) > MAX_CHOICES:
        raise refusal(f"at most {MAX_CHOICES} answers a request, all prompts together", "prompt")
    encoded = []
    for entry in prompts:
        if isinstance(entry, str):
            check_length([entry], service, "prompt")
            try:
                entry = service.tokenizer.encode(entry, allow_special=True)
            except UserError as error:
                raise from_user_error(error, set(), "prompt") from None
        check_context(entry, service, "prompt")
        encoded.append(entry)
    return encoded


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, the images that its placeholders show, and what the answer has to follow."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    grammar: Grammar | None = None


def chat_prompt(request: ChatRequest, service: Service) -> Prompt:
    """A rendered conversation that fits the context."""
    grammar = answer_grammar(request, service) if request.constrained else None
    prompt = render(request.messages, request.offered_tools, request.mode, service)
    check_context(prompt.token_ids, service, "messages")
    return replace(prompt, grammar=grammar)


def answer_grammar(request: ChatRequest, service: Service) -> Grammar:
    """What the answer has to follow. A schema that cannot be kept is an error that names its field."""
    names, schema = request.callable_names, request.schema
    tools = [
        {"index": index, **tool.model_dump(exclude_none=True)}
        for index, tool in enumerate(request.tools or [])
        if request.tool_choice != "none" and (names is None or tool.function.name in names)
    ]
    waits = schema is None and not request.must_call
    try:
        return service.grammars.compile(schema, tools, request.mode, several=not request.single_call, waits=waits)
    except UserError as error:
        raise _refused(error, schema, tools, service) from None


def _refused(
    error: UserError, schema: dict[str, Any] | None, tools: list[dict[str, Any]], service: Service
) -> ApiError:
    """The error of the first part that cannot be compiled alone."""
    parts = [] if schema is None else [("response_format.json_schema.schema", schema, [])]
    parts += [(f"tools[{tool['index']}].function.parameters", None, [tool]) for tool in tools]
    for param, part_schema, part_tools in parts:
        try:
            service.grammars.compile(part_schema, part_tools, "disabled")
        except UserError as found:
            return refusal(str(found), param)
    return refusal(str(error), "tools")


def render(
    messages: list[Message],
    tools: list[dict[str, Any]],
    mode: str,
    service: Service,
    add_generation_prompt: bool = True,
) -> Prompt:
    """A rendered conversation, its pictures read."""
    check_length(_texts(messages), service, "messages")
    ordered = in_call_order(messages)
    found = read_shown(messages, service)
    shown = [each for message in ordered for each in found.get(id(message), [])]
    try:
        token_ids = service.tokenizer.render_chat(
            [message.model_dump(exclude_none=True) for message in ordered], tools, mode, add_generation_prompt
        )
    except UserError as error:
        raise from_user_error(error, {"messages", "tools"}, "messages") from None
    return Prompt(*place_shown(token_ids, shown))


def _texts(messages: list[Message]) -> list[str]:
    texts = [message.content for message in messages if isinstance(message.content, str)]
    return texts + [part.text for message in messages for part in message.parts if part.text is not None]


def check_length(texts: list[str], service: Service, param: str) -> None:
    """Refuses what is too long whatever its tokens are, without encoding it."""
    least = sum(len(text) for text in texts) // service.tokenizer.longest_token
    if least >= service.context:
        raise too_long(f"at least {least}", service, param)


def check_context(prompt: list[int], service: Service, param: str) -> None:
    if not prompt:
        raise refusal("must have at least 1 token", param)
    if len(prompt) >= service.context:
        raise too_long(str(len(prompt)), service, param)


def in_call_order(messages: list[Message]) -> list[Message]:
    """Tool results in the order of the calls they answer: the model sees no ids, only the order."""
    result: list[Message] = []
    order: dict[str, int] = {}  # of the last assistant message's calls
    start = 0  # of the current run of tool results
    for index, message in enumerate(messages):
        if message.role == "assistant":
            order = {call.id: place for place, call in enumerate(message.tool_calls or []) if call.id is not None}
        given = message.tool_call_id
        if given is not None and given not in order:
            raise refusal(
                f"no call {given!r} in the last assistant message before it", f"messages[{index}].tool_call_id"
            )
        if message.role != "tool":
            start = index + 1
        result.append(message)
        if all(m.tool_call_id is not None for m in result[start:]):
            result[start:] = sorted(result[start:], key=lambda m: order[m.tool_call_id])
    return result


def sampling_params(
    request: SamplingFields,
    service: Service,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: bool = False,
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Parameters for the engine, and the stop strings that are looked for in the text.

    `max_tokens` beyond the context is cut to what fits, and the answer then ends with "length". A stop string that is
    the text of a special token is that token.
    """
    room = service.context - prompt_tokens
    special = service.tokenizer.special
    for stop in request.stops:
        if stop not in special and any(token in stop for token in special):
            raise refusal("a special token can only be a stop string of its own", "stop")
    stop_ids = [special[stop] for stop in request.stops if stop in special] + (request.stop_token_ids or [])
    given = {
        name: value
        for name in ("seed", "top_p", "top_k", "min_p", "temperature", "repetition_penalty", "presence_penalty")
        + ("frequency_penalty", "min_tokens")
        if (value := getattr(request, name)) is not None
    }
    if given.get("top_k") == -1:
        given["top_k"] = 0
    defaults = {name: getattr(service.defaults, name) for name in ("temperature", "top_p", "top_k")}
    try:
        params = SamplingParams(
            **{**defaults, **given},
            logit_bias={int(token): value for token, value in (request.logit_bias or {}).items()},
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except UserError as error:
        raise from_user_error(error, set(type(request).model_fields), "prompt") from None
    return params, tuple(stop for stop in request.stops if stop not in special)

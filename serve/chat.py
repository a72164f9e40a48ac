"""POST /v1/chat/completions."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from serve.answer import Answer, Delta
from serve.api_errors import from_exception, from_user_error, parse_body
from serve.chat_parser import ChatParser, Part
from serve.draft_tokens import DraftTokens
from serve.draft_trees import tree_json
from serve.openai_types import ChatRequest
from serve.prompt import Prompt, chat_prompt, sampling_params
from serve.request import TokenLogprob
from serve.responses import DONE, EventStream, chat_logprobs, envelope, event, usage
from serve.service import Service
from serve.tool_calls import CallStart
from target_model.errors import UserError

_LOGGED = {"user", "safety_identifier", "prompt_cache_key", "metadata"}


async def create_chat(http: HttpRequest, service: Service) -> Response:
    body = await http.body()
    request = await service.off_loop(lambda: parse_body(ChatRequest, body), len(body))
    service.check_model(request.model)
    prompt = await service.off_loop(lambda: chat_prompt(request, service), len(body))
    http.scope["state"]["log"].update(request.model_dump(include=_LOGGED, exclude_none=True))
    call = _Call(http, request, service, prompt)
    async with AsyncExitStack() as stack:
        try:
            answers = await stack.enter_async_context(call.start())
        except UserError as error:
            raise from_user_error(error, set(ChatRequest.model_fields), "messages") from None
        if request.stream:
            return EventStream(call.events(answers), stack.pop_all())
        return JSONResponse(await call.body(answers))


class _Message:
    """One answer put together from its deltas; each call returns what it adds, as `delta` objects of a stream."""

    def __init__(self, answer: Answer, service: Service, request: ChatRequest):
        self._answer = answer
        self._parser = ChatParser(service.tokenizer, request.mode, request.offered_tools)
        self._draft_tokens = DraftTokens() if request.draft_tokens else None
        self._tokenizer = service.tokenizer
        self._draft_trees: list[dict[str, Any]] | None = [] if request.draft_trees else None
        self.finish_reason: str | None = None
        self.pending_logprobs: list[TokenLogprob] = []

    @property
    def complete_calls(self) -> int:
        return self._parser.tool_calls

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        parts = self._parser.take(delta.segments)
        self._answer.counts.reasoning += self._parser.count_reasoning(delta.token_ids)
        self.pending_logprobs += delta.logprobs
        if self._draft_tokens is not None:
            self._draft_tokens.add(delta)
        if self._draft_trees is not None and delta.verified is not None:
            self._draft_trees.append(tree_json(delta.verified, self._tokenizer))
        if delta.finish_reason is not None:
            # A call that the length or a stop string cut stays open in a stream; a whole answer leaves it out.
            done = self._answer.ended_by_token
            parts += self._parser.finish(done)
            self.finish_reason = "tool_calls" if done and self._parser.tool_calls else delta.finish_reason
        return [_delta(part) for part in parts]

    def take_logprobs(self) -> list[TokenLogprob]:
        entries, self.pending_logprobs = self.pending_logprobs, []
        return entries

    def take_drafts(self, part: dict[str, Any], last: bool) -> dict[str, Any]:
        """The fields of a chunk that say what was drafted, those that were asked for."""
        fields: dict[str, Any] = {}
        if self._draft_tokens is not None:
            text = part.get("content", "") + part.get("reasoning_content", "")
            fields["draft_tokens"] = self._draft_tokens.take(text, last)
        if self._draft_trees is not None:
            fields["draft_trees"], self._draft_trees = self._draft_trees, []
        return fields


class _Call:
    """One request on its way."""

    def __init__(self, http: HttpRequest, request: ChatRequest, service: Service, prompt: Prompt):
        self.http, self.request, self.service, self.prompt = http, request, service, prompt
        self.request_id = http.scope["state"]["request_id"]

    def start(self) -> AbstractAsyncContextManager[list[Answer]]:
        request = self.request
        params, stop = sampling_params(
            request,
            self.service,
            prompt_tokens=len(self.prompt.token_ids),
            max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        return self.service.answers(
            self.http,
            [(self.prompt.token_ids, params)],
            request.choices,
            stop=stop,
            priority=request.priority,
            images=self.prompt.images,
            grammar=self.prompt.grammar,
        )

    async def events(self, answers: list[Answer]) -> AsyncIterator[str]:
        request = self.request
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        frame = envelope("chat.completion.chunk", self.request_id, self.service.model)
        frame |= {"usage": None} if with_usage else {}
        messages = [_Message(answer, self.service, request) for answer in answers]

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> str:
            entries = messages[index].take_logprobs()
            logprobs = chat_logprobs(entries, self.service.tokenizer) if request.logprobs and entries else None
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            choice |= messages[index].take_drafts(delta, finish_reason is not None)
            return event({**frame, "choices": [choice]})

        try:
            for index in range(len(answers)):
                yield chunk(index, {"role": "assistant", "content": ""})
            async for index, delta in self.service.merged(answers):
                for part in messages[index].take(delta):
                    yield chunk(index, part)
                if messages[index].finish_reason is not None:
                    yield chunk(index, {}, messages[index].finish_reason)
        except Exception as error:
            yield event(from_exception(error).body())
            return
        if with_usage:
            counts = [answer.counts for answer in answers]
            yield event({**frame, "choices": [], "usage": usage(len(self.prompt.token_ids), counts)})
        yield DONE

    async def body(self, answers: list[Answer]) -> dict[str, Any]:
        messages = [_Message(answer, self.service, self.request) for answer in answers]
        wholes = [_Whole() for _ in answers]
        async for index, delta in self.service.merged(answers):
            for part in messages[index].take(delta):
                wholes[index].add(part)
        choices = []
        for index, (message, whole) in enumerate(zip(messages, wholes, strict=True)):
            entries = message.take_logprobs()
            logprobs = chat_logprobs(entries, self.service.tokenizer) if self.request.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": whole.message(message.complete_calls),
                    "logprobs": logprobs,
                    "finish_reason": message.finish_reason,
                }
            )
        counts = [answer.counts for answer in answers]
        frame = envelope("chat.completion", self.request_id, self.service.model)
        return {**frame, "choices": choices, "usage": usage(len(self.prompt.token_ids), counts)}


class _Whole:
    """A message joined from its stream deltas, so both ways of answering say the same but of a call that was cut."""

    def __init__(self):
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: list[dict[str, Any]] = []

    def add(self, delta: dict[str, Any]) -> None:
        for name in self._texts:
            self._texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(self._calls):
                self._calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def message(self, complete_calls: int) -> dict[str, Any]:
        content, calls = self._texts["content"], self._calls[:complete_calls]
        return {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            **({"reasoning_content": self._texts["reasoning_content"]} if self._texts["reasoning_content"] else {}),
            **({"tool_calls": calls} if calls else {}),
        }


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, tuple):
        return {"reasoning_content" if part[0] == "reasoning" else "content": part[1]}
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.json}}
    return {"tool_calls": [call]}

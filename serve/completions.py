"""POST /v1/completions."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from serve.answer import Answer, Delta
from serve.api_errors import from_exception, from_user_error, parse_body
from serve.openai_types import CompletionRequest
from serve.prompt import DEFAULT_COMPLETION_TOKENS, completion_prompts, sampling_params
from serve.responses import DONE, EventStream, completion_logprobs, envelope, event, usage
from serve.service import Service
from target_model.errors import UserError


async def create_completion(http: HttpRequest, service: Service) -> Response:
    body = await http.body()
    request = await service.off_loop(lambda: parse_body(CompletionRequest, body), len(body))
    service.check_model(request.model)
    prompts = await service.off_loop(lambda: completion_prompts(request, service), len(body))
    http.scope["state"]["log"].update(request.model_dump(include={"user"}, exclude_none=True))
    call = _Call(http, request, service, prompts)
    async with AsyncExitStack() as stack:
        try:
            answers = await stack.enter_async_context(call.start())
        except UserError as error:
            raise from_user_error(error, set(CompletionRequest.model_fields), "prompt") from None
        if request.stream:
            return EventStream(call.events(answers), stack.pop_all())
        return JSONResponse(await call.body(answers))


class _Call:
    """One request on its way."""

    def __init__(self, http: HttpRequest, request: CompletionRequest, service: Service, prompts: list[list[int]]):
        self.http, self.request, self.service, self.prompts = http, request, service, prompts
        self.candidates = request.best_of or request.choices
        self.ranked = self.candidates > request.choices
        self.envelope = envelope("text_completion", http.scope["state"]["request_id"], service.model)
        self.prompt_tokens = sum(map(len, prompts))
        self.echoes = [service.tokenizer.decode(prompt) if request.echo else "" for prompt in prompts]

    def start(self) -> AbstractAsyncContextManager[list[Answer]]:
        request = self.request
        # Answers are ranked by their log-probabilities, which the client may not have asked for.
        logprobs = 0 if self.ranked and request.logprobs is None else request.logprobs
        pairs, stop = [], ()
        for prompt in self.prompts:
            params, stop = sampling_params(
                request,
                self.service,
                prompt_tokens=len(prompt),
                max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
                logprobs=logprobs,
            )
            pairs.append((prompt, params))
        return self.service.answers(
            self.http,
            pairs,
            self.candidates,
            stop=stop,
            priority=request.priority,
            show_special=not request.skip_special_tokens,
        )

    async def events(self, answers: list[Answer]) -> AsyncIterator[str]:
        with_usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        empty_usage = {"usage": None} if with_usage else {}
        begun = set()
        try:
            async for index, delta in self.service.merged(answers):
                text = _text(delta)
                if index not in begun:
                    begun.add(index)
                    text = self.echoes[index // self.candidates] + text
                if text or delta.logprobs or delta.finish_reason:
                    choice = self._choice(index, text, delta)
                    yield event({**self.envelope, "choices": [choice], **empty_usage})
        except Exception as error:
            yield event(from_exception(error).body())
            return
        if with_usage:
            counts = [answer.counts for answer in answers]
            yield event({**self.envelope, "choices": [], "usage": usage(self.prompt_tokens, counts)})
        yield DONE

    async def body(self, answers: list[Answer]) -> dict[str, Any]:
        wholes = [Delta.empty() for _ in answers]
        async for index, delta in self.service.merged(answers):
            wholes[index].extend(delta)
        chosen = [index for place in range(len(self.prompts)) for index in self._best(place, wholes)]
        choices = [
            self._choice(index, self.echoes[index // self.candidates] + _text(wholes[index]), wholes[index])
            for index in chosen
        ]
        for place, choice in enumerate(choices):
            choice["index"] = place
        counts = [answer.counts for answer in answers]
        return {**self.envelope, "choices": choices, "usage": usage(self.prompt_tokens, counts)}

    def _best(self, place: int, wholes: list[Delta]) -> list[int]:
        """Indices of the n answers to prompt `place` with the highest mean log-probability per token."""

        def mean(index: int) -> float:
            values = [entry.logprob for entry in wholes[index].logprobs]
            return sum(values) / len(values) if values else float("-inf")

        indices = range(place * self.candidates, (place + 1) * self.candidates)
        if not self.ranked:
            return list(indices)
        return sorted(indices, key=mean, reverse=True)[: self.request.choices]

    def _choice(self, index: int, text: str, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = completion_logprobs(delta.logprobs, delta.starts, self.service.tokenizer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}


def _text(delta: Delta) -> str:
    return "".join(segment for segment in delta.segments if isinstance(segment, str))

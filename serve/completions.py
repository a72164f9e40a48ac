"""POST /v1/completions."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from serve.answer import Answer, Delta
from serve.api_errors import from_exception, from_user_error, parse_body
from serve.counts import Counts
from serve.detokenize import Detokenizer
from serve.openai_types import CompletionRequest
from serve.prompt import DEFAULT_COMPLETION_TOKENS, completion_prompts, sampling_params
from serve.responses import DONE, EventStream, completion_logprobs, envelope, event, token_name, usage
from serve.service import Service
from target_model.errors import UserError
from target_model.tokenizer import Tokenizer


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
        self.echoes = [_Echo(prompt if request.echo else [], service.tokenizer) for prompt in prompts]

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
                # What chooses the answer's first token also looks at the prompt's, so one is made in any case.
                max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else max(request.max_tokens, 1),
                logprobs=logprobs,
                prompt_logprobs=bool(request.echo) and request.logprobs is not None,
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
                choice = self._choice(index, self._shown(delta), answers[index], begins=index not in begun)
                begun.add(index)
                if choice["text"] or delta.logprobs or choice["finish_reason"]:
                    yield event({**self.envelope, "choices": [choice], **empty_usage})
        except Exception as error:
            yield event(from_exception(error).body())
            return
        if with_usage:
            counts = self._counts(answers)
            yield event({**self.envelope, "choices": [], "usage": usage(self.prompt_tokens, counts)})
        yield DONE

    async def body(self, answers: list[Answer]) -> dict[str, Any]:
        wholes = [Delta.empty() for _ in answers]
        async for index, delta in self.service.merged(answers):
            wholes[index].extend(delta)
        chosen = [index for place in range(len(self.prompts)) for index in self._best(place, wholes)]
        choices = [self._choice(index, self._shown(wholes[index]), answers[index], begins=True) for index in chosen]
        for place, choice in enumerate(choices):
            choice["index"] = place
        counts = self._counts(answers)
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

    def _shown(self, delta: Delta) -> Delta:
        """The part of an answer that was asked for: nothing of it with max_tokens 0."""
        if self.request.max_tokens != 0:
            return delta
        return replace(Delta.empty(), finish_reason=delta.finish_reason and "length")

    def _counts(self, answers: list[Answer]) -> list[Counts]:
        counts = [answer.counts for answer in answers]
        return counts if self.request.max_tokens != 0 else [replace(count, completion=0) for count in counts]

    def _choice(self, index: int, delta: Delta, answer: Answer, *, begins: bool) -> dict[str, Any]:
        """A choice with what `delta` adds to it, and before that, where it `begins`, the echo of its prompt."""
        echo, tokenizer = self.echoes[index // self.candidates], self.service.tokenizer
        text = (echo.text if begins else "") + _text(delta)
        logprobs = None
        if self.request.logprobs is not None:
            starts = [len(echo.text) + start for start in delta.starts]
            logprobs = completion_logprobs(delta.logprobs, starts, tokenizer)
            if begins and self.request.echo:
                of_prompt = completion_logprobs(answer.prompt_logprobs, echo.starts[1:], tokenizer)
                first = {"tokens": echo.first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
                logprobs = {name: [first[name], *of_prompt[name], *logprobs[name]] for name in logprobs}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}


class _Echo:
    """The text of a prompt, and where in it each of its tokens begins."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer):
        detokenizer = Detokenizer(tokenizer, show_special=True)
        parts = [detokenizer.push(prompt), detokenizer.finish()]
        self.text = "".join(str(segment) for part in parts for segment in part.segments)
        self.starts = [start for part in parts for start in part.starts]
        self.first = token_name(prompt[0], tokenizer) if prompt else ""


def _text(delta: Delta) -> str:
    return "".join(segment for segment in delta.segments if isinstance(segment, str))

"""An engine in this process that `spec chat` talks to."""

from collections.abc import AsyncIterator
from dataclasses import replace

from serve.answer import Answer
from serve.async_engine import AsyncEngine
from serve.chat_parser import ChatParser
from serve.draft_tokens import DraftTokens
from serve.engine import Engine
from serve.load import Description, usable_context
from serve.request import Request, SamplingParams
from spec.chat import Piece, Sampling, Turn
from target_model.errors import UserError
from target_model.tokenizer import Tokenizer


class Local:
    """Answers with an engine of its own, which runs in a thread until the process ends."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, description: Description, sampling: Sampling):
        self.name = description.target
        self._tokenizer, self._sampling = tokenizer, sampling
        self._context = usable_context(engine)
        defaults = description.defaults
        self._params = SamplingParams(
            temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            seed=sampling.seed,
            max_tokens=sampling.tokens,
        )
        self._engine = AsyncEngine(engine)
        self._engine.start()
        self._asked = 0

    async def answer(self, messages: list[dict[str, str]], turn: Turn) -> AsyncIterator[Piece]:
        mode = self._sampling.thinking
        prompt = self._tokenizer.render_chat(messages, thinking_mode=mode)
        room = self._context - len(prompt)
        if room < 1:
            raise UserError(f"the conversation has {len(prompt)} tokens, the context holds {self._context}: try /new")
        self._asked += 1
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
        answer = Answer(await self._engine.submit(Request(str(self._asked), prompt, params)), self._tokenizer)
        parser, tokens = ChatParser(self._tokenizer, mode, []), DraftTokens()
        try:
            async for delta in answer.deltas():
                tokens.add(delta)
                parts = [*parser.take(delta.segments), *([("content", "")] if delta.finish_reason else [])]
                for place, (channel, text) in enumerate(parts):
                    last = delta.finish_reason is not None and place == len(parts) - 1
                    for token in tokens.take(text, last):
                        yield Piece(token["text"], token["depth"], channel == "reasoning")
        finally:
            answer.stream.cancel()
            turn.accepted, turn.drafted = answer.counts.accepted, answer.counts.drafted

"""Grammars that an answer has to follow, and which tokens one allows behind each node of a tree.

The library is llguidance. A grammar begins where the reasoning ends, and an answer can only end where it accepts.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from serve.terminals import regex_fault
from serve.tool_calls import NAMESPACE
from serve.tool_grammar import Rules, tool_calls_rule
from target_model.chat import THINK_CLOSE, THINK_OPEN
from target_model.errors import UserError
from target_model.tokenizer import ThinkingMode, Tokenizer

logger = logging.getLogger("serve.grammar")

# JSON on one line, as OpenAI's structured outputs are: where white space is free, weak models write nothing else.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
Phase = Literal["opening", "reasoning", "waiting", "grammar", "broken"]


@dataclass(frozen=True)
class Grammar:
    """What one answer has to follow.

    matcher: at its start. opening: where the answer begins. waits: the grammar only begins with the token that opens a
    tool call, everything before it is free; else it holds from the end of the reasoning on. outside[phase]: the tokens
    allowed where it does not hold, one bit each. words: of 32 bits, that the bits of all tokens take.
    """

    matcher: LLMatcher
    opening: Phase
    waits: bool
    think_open: int | None
    think_close: int | None
    namespace: int | None
    eos_ids: tuple[int, ...]
    outside: dict[Phase, Tensor]
    words: int


class GrammarCompiler:
    """Compiles grammars for one tokenizer and a model of `vocab_size` ids.

    Made when a server starts: for a large vocabulary it takes seconds in which no other thread runs.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._tokens = LLTokenizer(vocabulary, eos_token=list(tokenizer.eos_ids))
        self._outside = self._outside_words()

    def compile(
        self,
        schema: dict[str, Any] | None,
        tools: list[dict[str, Any]],
        mode: ThinkingMode,
        *,
        several: bool = True,
        waits: bool = False,
    ) -> Grammar:
        """The grammar of an answer that is JSON by `schema`, or calls `tools`, or, where both are given, either.
        UserError says why a schema cannot be kept.

        `several`: it may call more than one. `waits`: only if it calls one; it may as well be free text.
        """
        special, rules = self._tokenizer.special, Rules()
        parts = []
        if schema is not None:
            parts.append(rules.add(_json_rule(schema)))
        if tools:
            if NAMESPACE not in special:
                raise UserError(f"tools: the tokenizer has no token {NAMESPACE!r}, with which calls begin")
            try:
                parts.append(tool_calls_rule(rules, tools, special[NAMESPACE], several=several))
            except RecursionError:
                raise UserError("the schema is nested too deeply") from None
        matcher = self._matcher(rules.lark(" | ".join(parts)))
        for function in (tool["function"] for tool in tools):
            if function.get("strict"):  # what the rules pass over is to be a schema that can be kept, too
                self._matcher(Rules().lark(_json_rule(function.get("parameters") or {})))
        after_prompt: Phase = "waiting" if waits else "grammar"
        return Grammar(
            matcher,
            {"enabled": "reasoning", "disabled": after_prompt, "adaptive": "opening"}[mode],
            waits,
            special.get(THINK_OPEN),
            special.get(THINK_CLOSE),
            special.get(NAMESPACE),
            self._tokenizer.eos_ids,
            self._outside if not waits else {"broken": self._outside["broken"]},
            -(-self._vocab_size // 32),
        )

    def _matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(lark), log_level=0)
        error = matcher.get_error() or _trial(matcher.deep_copy())
        if error:
            raise UserError(_reason(error))
        return matcher

    def _outside_words(self) -> dict[Phase, Tensor]:
        """Reasoning is any text and has to end, an answer that may choose begins with one of the marks, and one that
        is broken ends.
        """
        special = self._tokenizer.special
        marks = {special[text] for text in (THINK_OPEN, THINK_CLOSE) if text in special}
        text = set(range(self._tokenizer.vocab_size)) - self._tokenizer.special_ids
        ends = {special[THINK_CLOSE]} if THINK_CLOSE in special else set()
        allowed = {"opening": marks, "reasoning": text | ends, "broken": set(self._tokenizer.eos_ids)}
        return {phase: _words(tokens, self._vocab_size) for phase, tokens in allowed.items()}


class Constraint:
    """A grammar at work on one answer: it follows the decided tokens and looks ahead along guessed ones."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._consumed: list[int] = []  # what the matcher took
        self._taken: list[tuple[Phase, bool]] = []  # phase before each guessed token, and whether the matcher took it
        self._phase: Phase = grammar.opening
        self._decided = 0

    def masks(self, decided: Sequence[int], paths: list[tuple[int, ...]]) -> Tensor:
        """Which tokens may follow each path behind `decided`, the whole answer so far: one bit each, int32 [N, words].

        Behind a path that is forbidden itself everything is allowed: nobody gets there.
        """
        words_NW = torch.full((len(paths), self._grammar.words), -1, dtype=torch.int32)
        self._follow(decided)
        current: tuple[int, ...] = ()
        # Sorted, each path shares as much as possible with the one before it.
        for row in sorted(range(len(paths)), key=paths.__getitem__):
            path = paths[row]
            shared = len(commonprefix([current, path]))
            self._pop(len(current) - shared)
            reached = shared
            while reached < len(path) and self._push(path[reached]):
                reached += 1
            current = path[:reached]
            if reached == len(path):
                self._write(words_NW[row])
        self._pop(len(current))
        return words_NW

    def finished(self, decided: Sequence[int]) -> bool:
        """Whether the answer is whole, and not at a place from which the grammar leads nowhere."""
        self._follow(decided)
        if self._phase == "grammar":
            return self._matcher.is_accepting()
        return self._grammar.waits and self._phase != "broken"

    def _follow(self, decided: Sequence[int]) -> None:
        for token in decided[self._decided :]:
            if not self._push(token):
                logger.error("the grammar of an answer became too complex: the answer ends here")
                self._phase = "broken"
        self._decided = len(decided)
        self._taken.clear()

    def _push(self, token: int) -> bool:
        """Takes one more token; False, and nothing taken, when it is forbidden or ends the answer."""
        grammar, before = self._grammar, self._phase
        consumed = False
        if token in grammar.eos_ids or before == "broken":
            return False
        if before == "grammar" or (before in ("waiting", "opening") and grammar.waits and token == grammar.namespace):
            if self._matcher.try_consume_tokens([token]) != 1:
                self._restore()
                return False
            self._phase, consumed = "grammar", True
            self._consumed.append(token)
        elif token == grammar.think_close:
            self._phase = "waiting" if grammar.waits else "grammar"
        elif token == grammar.think_open:
            self._phase = "reasoning"
        elif before == "opening":
            if not grammar.waits:
                return False
            self._phase = "waiting"
        self._taken.append((before, consumed))
        return True

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._phase, consumed = self._taken.pop()
            if consumed:
                self._matcher.rollback(1)
                self._consumed.pop()

    def _write(self, words_W: Tensor) -> None:
        if self._phase == "grammar":
            self._matcher.unsafe_compute_mask_ptr(words_W.data_ptr(), words_W.numel() * words_W.element_size())
            self._restore()
        elif self._phase in self._grammar.outside:
            words_W.copy_(self._grammar.outside[self._phase])

    def _restore(self) -> None:
        """A matcher that fails stays so, but what it failed at may be a mere guess. Where nothing can follow, the end
        is all that its last mask allowed.
        """
        if self._matcher.is_error():
            self._matcher = self._grammar.matcher.deep_copy()
            self._matcher.try_consume_tokens(self._consumed)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode())


def _json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SEPARATORS})}"


def _words(allowed: set[int], vocab_size: int) -> Tensor:
    """One bit for each token, int32 [ceil(V / 32)]."""
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int64)
    bits[list(allowed)] = 1
    return (bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


def _trial(matcher: LLMatcher) -> str:
    """The error, if there is one, of finding what can begin an answer and taking it."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error():
        matcher.try_consume_tokens([allowed.bit_length() - 1])
    return matcher.get_error()


def _reason(message: str) -> str:
    """The library's error without its place in a text that the client has not written."""
    first = re.sub(r"^at [0-9]+\([0-9]+\): ", "", message.splitlines()[0])
    known = {"NoExtension": "no value can follow the schema", "ParserTooComplex": "the schema is too complex"}
    return regex_fault(message) or next((text for start, text in known.items() if first.startswith(start)), first)

"""Rows of text -> documents of token ids with supervised spans -> rectangular training rows.

N training rows, S tokens in a row. A row holds one document, or with packing several; a document longer than a row is
split or truncated.
"""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from target_model.errors import UserError
from target_model.tokenizer import Tokenizer
from train.config import DataConfig
from train.sources import RawRow, read_rows

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bing": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, the number (from 1) of the supervised span that it lies in, or 0."""

    token_ids: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class TrainingRows:
    """int32 [N, S] each. `documents` counts the documents of a row from 1, 0 is padding; a span number is unique in its
    row.

    dropped counts the input rows that were left out, by reason, documents_read all input rows, by source; `tokens` and
    `supervised` count what was kept.
    """

    token_ids: np.ndarray
    documents: np.ndarray
    spans: np.ndarray
    dropped: Counter
    documents_read: Counter

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def tokens(self) -> int:
        return int((self.documents > 0).sum())

    @property
    def supervised(self) -> int:
        return int((self.spans > 0).sum())

    def summary(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        read = f"{self.documents_read.total()} documents"
        if len(self.documents_read) > 1:
            read += f" ({', '.join(f'{count} {source}' for source, count in self.documents_read.items())})"
        return (
            f"{read}, {len(self)} rows of {self.token_ids.shape[1]}, {self.tokens} tokens, "
            f"{self.supervised} supervised; dropped: {dropped}"
        )


def valid_steps(documents: np.ndarray, spans: np.ndarray, steps: int) -> np.ndarray:
    """How many TTT steps of row p count, 0..`steps`: int32, same shape as the inputs [.., S].

    Row (p, k) reads the feature of p and the tokens x[p+1..p+1+k] and is judged on x[p+2+k]. It counts only if p..p+2+k
    lie in one document and x[p+1..p+2+k] in one supervised span. Spans are contiguous, so row p has as many steps as
    tokens follow x[p+1] in its span.
    """
    length = spans.shape[-1]
    # end[i]: index of the last token of the span that token i lies in, found from the right.
    last = np.ones(spans.shape, bool)
    last[..., :-1] = spans[..., :-1] != spans[..., 1:]
    end = np.where(last, np.arange(length), length)
    end = np.minimum.accumulate(end[..., ::-1], axis=-1)[..., ::-1]
    counted = np.zeros(spans.shape, np.int32)
    following = end[..., 1:] - np.arange(1, length)
    inside = (spans[..., 1:] > 0) & (documents[..., :-1] == documents[..., 1:])
    counted[..., :-1] = np.where(inside, following, 0)
    return counted.clip(0, steps)


def load_rows(config: DataConfig, tokenizer: Tokenizer, seed: int) -> TrainingRows:
    """Reads, tokenises and lays out all rows. Refuses a data set in which nothing is supervised."""
    dropped: Counter = Counter()
    read: Counter = Counter()
    documents: list[Document] = []
    for row in read_rows(config, seed):
        read[row.source.path] += 1
        document = _tokenise(row, tokenizer, config, dropped)
        if document is not None:
            documents += _cut(document, config, dropped)
    if not read:
        raise UserError(f"the data set {config.description} is empty")
    if not documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise UserError(f"no row of {config.description} can be trained on: {reasons}")
    order = np.random.default_rng([seed, 1]).permutation(len(documents))
    bins = _pack([documents[i] for i in order], config.sequence_length if config.packing else 0)
    return TrainingRows(*_lay_out(bins, config.sequence_length), dropped, read)


def read_document(config: DataConfig, tokenizer: Tokenizer, number: int) -> tuple[Document | None, str]:
    """Row `number` (from 1) of the data before it is cut, or None and the reason why it is dropped."""
    for row in itertools.islice(read_rows(config, 0), number - 1, None):
        dropped: Counter = Counter()
        return _tokenise(row, tokenizer, config, dropped), ", ".join(dropped)
    raise UserError(f"{config.description} has no row {number}")


def _tokenise(row: RawRow, tokenizer: Tokenizer, config: DataConfig, dropped: Counter) -> Document | None:
    raw = row.values
    if "token_ids" in raw:
        return _tokenised(raw, row.where, tokenizer.vocab_size)
    if "text" in raw:
        if not isinstance(raw["text"], str) or not raw["text"]:
            dropped["without text"] += 1
            return None
        ids = np.array(tokenizer.encode(raw["text"]), np.int32)
        return Document(ids, np.ones_like(ids))
    messages = _messages(raw)
    if messages is None:
        raise UserError(f"{row.where} has none of the keys messages, conversations, text, token_ids")
    if not any(message.get("role") == "assistant" for message in messages):
        dropped["without an assistant turn"] += 1
        return None
    try:
        mode = row.source.thinking_mode or config.thinking_mode
        ids, mask = tokenizer.render_training(messages, tools_of(raw), thinking_mode=mode)
    except UserError as error:
        # Without the number of the message: rows with the same fault are counted together.
        reason = re.sub(r"\[[0-9]+\]", "", str(error))[:120]
        dropped[f"that the chat format refuses ({reason})"] += 1
        return None
    mask = np.array(mask, bool)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return Document(np.array(ids, np.int32), (np.cumsum(starts) * mask).astype(np.int32))


def _tokenised(raw: dict[str, Any], where: str, vocab_size: int) -> Document:
    """A row with the very ids that the target produced, from `answer_start` on, as `spec data regenerate` writes it."""
    ids, start = raw["token_ids"], raw.get("answer_start")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise UserError(f"{where}: token_ids must be a list of integers below {vocab_size}, the tokenizer's size")
    if type(start) is not int or not 0 < start < len(ids):
        raise UserError(f"{where}: answer_start must be an index into token_ids, not {start!r}")
    spans = np.zeros(len(ids), np.int32)
    spans[start:] = 1
    return Document(np.array(ids, np.int32), spans)


def _messages(raw: dict[str, Any]) -> list[dict[str, Any]] | None:
    if isinstance(raw.get("messages"), list):
        return raw["messages"]
    turns = raw.get("conversations")
    if not isinstance(turns, list):
        return None
    return [_sharegpt_message(turn) for turn in turns]


def _sharegpt_message(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT. `function_call` is an assistant's turn whose value is the call, as JSON."""
    role, value = turn.get("from"), turn.get("value")
    if role != "function_call":
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": value}
    call = _json_or_none(value)
    calls = call if isinstance(call, list) else [call]
    return {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}


def tools_of(raw: dict[str, Any]) -> list[Any] | None:
    """Tool definitions beside the conversation, also as JSON text, as tables hold them."""
    tools = raw.get("tools")
    if isinstance(tools, str):
        tools = _json_or_none(tools) if tools.strip() else None
        if not isinstance(tools, list):
            raise UserError("tools: must be a list, or one as JSON text")
    return tools


def _json_or_none(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _cut(document: Document, config: DataConfig, dropped: Counter) -> list[Document]:
    """The document's pieces of at most a row that hold at least one valid training row."""
    length = config.sequence_length
    total = len(document.token_ids)
    if config.overflow == "truncate" and total > length:
        dropped["with a tail cut off (row kept)"] += 1
        total = length
    pieces = []
    for start in range(0, total, length):
        ids, spans = document.token_ids[start : start + length], document.spans[start : start + length]
        if valid_steps(np.ones_like(spans), spans, 1).any():
            pieces.append(Document(ids, spans))
        else:
            dropped["pieces without a supervised row"] += 1
    return pieces


def _pack(documents: list[Document], length: int) -> list[list[Document]]:
    """First fit into the latest open rows; length 0: one document a row."""
    bins: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.token_ids)
        # Only the last rows are tried: linear time, and the order stays close to the shuffled one.
        fitting = (i for i in range(max(0, len(bins) - 64), len(bins)) if room[i] >= size)
        i = next(fitting, None)
        if i is None:
            bins.append([])
            room.append(length)
            i = len(bins) - 1
        bins[i].append(document)
        room[i] -= size
    return bins


def _lay_out(bins: list[list[Document]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    token_ids, documents, spans = (np.zeros((len(bins), length), np.int32) for _ in range(3))
    for row, members in enumerate(bins):
        start = next_span = 0
        for number, document in enumerate(members, 1):
            end = start + len(document.token_ids)
            token_ids[row, start:end] = document.token_ids
            documents[row, start:end] = number
            spans[row, start:end] = np.where(document.spans > 0, document.spans + next_span, 0)
            next_span = max(next_span, int(spans[row, start:end].max()))
            start = end
    return token_ids, documents, spans

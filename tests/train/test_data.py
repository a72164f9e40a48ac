"""Rows of text to training rows: the mask row by row, packing, dropping, and the mistakes that are named."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from target_model.errors import UserError
from target_model.resolve import resolve_target
from target_model.tokenizer import Tokenizer, load_tokenizer
from train.config import DataConfig
from train.data import TrainingRows, load_rows, valid_steps


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_target("m3-tiny").path)


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def chat(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def load(tmp_path, tokenizer, rows: list, **settings) -> TrainingRows:
    path = write(tmp_path / "rows.jsonl", rows)
    return load_rows(DataConfig(path=path, **({"sequence_length": 64} | settings)), tokenizer, 0)


def triples(rows: TrainingRows, steps: int) -> set[tuple[int, int, int, int]]:
    """(feature position, step, input position, label position) of everything that is trained, of the first row."""
    counts = valid_steps(rows.documents, rows.spans, steps)[0]
    return {(p, k, p + 1 + k, p + 2 + k) for p in range(len(counts)) for k in range(counts[p])}


def test_supervised_rows_of_a_conversation(tmp_path, tokenizer):
    """The row whose input is the first answer token is trained, end-of-turn is a label, nothing behind it is."""
    rows = load(tmp_path, tokenizer, [chat("ab", "cdef", "gh", "x")])
    ids = rows.token_ids[0].tolist()
    end = tokenizer.eos_ids[0]
    supervised = np.flatnonzero(rows.spans[0])
    spans = [np.flatnonzero(rows.spans[0] == span) for span in (1, 2)]
    assert tokenizer.decode([ids[i] for i in spans[0]][:-1]) == "cdef" and ids[spans[0][-1]] == end
    assert tokenizer.decode([ids[i] for i in spans[1]][:-1]) == "x" and ids[spans[1][-1]] == end
    trained = triples(rows, 1)
    for span in spans:
        first, last = span[0], span[-1]
        assert (first - 1, 0, first, first + 1) in trained  # feature before the answer, input its first token
        assert (last - 2, 0, last - 1, last) in trained  # the end-of-turn token is a label
    assert len(trained) == sum(len(span) - 1 for span in spans)  # and there are no others
    assert all(label in supervised and token in supervised for _, _, token, label in trained)


def test_the_rule_by_brute_force():
    """Row (p, k) counts exactly if p..p+2+k lie in one document and x[p+1..p+2+k] in one supervised span."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        documents = np.repeat(np.arange(1, 6), generator.integers(1, 9, 5))
        runs = generator.integers(1, 5, len(documents))
        spans = np.repeat(np.arange(1, len(runs) + 1) * generator.integers(0, 2, len(runs)), runs)[: len(documents)]
        # A span never crosses documents: number its parts apart.
        spans = np.where(spans > 0, spans + 1000 * documents, 0)
        counts = valid_steps(documents, spans, 5)
        for p in range(len(documents)):
            for k in range(5):
                tokens = range(p, p + 3 + k)
                inside = tokens[-1] < len(documents) and len({documents[i] for i in tokens}) == 1
                covered = inside and {spans[i] for i in tokens[1:]} - {0} == {spans[i] for i in tokens[1:]}
                expected = covered and len({spans[i] for i in tokens[1:]}) == 1
                assert (counts[p] > k) == expected, (documents, spans, p, k)


def test_a_one_token_answer_trains_nothing_twice(tmp_path, tokenizer):
    rows = load(tmp_path, tokenizer, [chat("ab", "c")])
    assert len(triples(rows, 7)) == 1  # input "c", label end-of-turn; no second step fits


def test_packing_gives_every_document_the_rows_it_has_alone(tmp_path, tokenizer):
    texts = [chat("ab", "cdef" * n, "gh", "x") for n in range(1, 6)] + [{"text": "plain text " * 5}]
    alone = load(tmp_path, tokenizer, texts, sequence_length=96)
    packed = load(tmp_path, tokenizer, texts, sequence_length=96, packing=True)
    assert len(packed) < len(alone) == 6 and packed.documents.max() >= 2

    def counted(rows: TrainingRows) -> list:
        counts = valid_steps(rows.documents, rows.spans, 4)
        found = []
        for r in range(len(rows)):
            for number in range(1, rows.documents[r].max() + 1):
                inside = rows.documents[r] == number
                found.append((rows.token_ids[r][inside].tolist(), counts[r][inside].tolist()))
        return sorted(found)

    assert counted(packed) == counted(alone)
    assert packed.tokens == alone.tokens and packed.supervised == alone.supervised


def test_long_documents_are_split_or_truncated_and_counted(tmp_path, tokenizer):
    text = {"text": "one two three four five six seven " * 12}
    length = len(tokenizer.encode(text["text"]))
    split = load(tmp_path, tokenizer, [text], sequence_length=16)
    assert split.tokens in (length, length - length % 16) and len(split) > 4
    cut = load(tmp_path, tokenizer, [text], sequence_length=16, overflow="truncate")
    assert cut.tokens == 16 and cut.dropped["with a tail cut off (row kept)"] == 1


def test_sharegpt_and_compressed_files(tmp_path, tokenizer):
    ours = load(tmp_path, tokenizer, [chat("ab", "cd")])
    turns = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]
    theirs = load(tmp_path, tokenizer, [{"conversations": turns}])
    assert np.array_equal(ours.token_ids, theirs.token_ids) and np.array_equal(ours.spans, theirs.spans)
    packed = tmp_path / "rows.jsonl.xz"
    packed.write_bytes(lzma.compress(json.dumps(chat("ab", "cd")).encode()))
    again = load_rows(DataConfig(path=[str(packed)] * 2, sequence_length=64), tokenizer, 0)
    assert len(again) == 2 and np.array_equal(again.token_ids[:1], ours.token_ids)


def test_the_targets_own_ids(tmp_path, tokenizer):
    rows = load(tmp_path, tokenizer, [{"token_ids": [9, 8, 7, 6, 5], "answer_start": 2}])
    assert rows.token_ids[0, :5].tolist() == [9, 8, 7, 6, 5] and rows.spans[0, :5].tolist() == [0, 0, 1, 1, 1]
    for bad in ({"token_ids": [1, 2]}, {"token_ids": [1, 99999], "answer_start": 1}, {"token_ids": "x"}):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: (token_ids|answer_start)"):
            load(tmp_path, tokenizer, [bad])


def test_dropped_rows_are_counted_by_reason(tmp_path, tokenizer):
    long_prompt = chat("word " * 200, "ab")
    rows = load(
        tmp_path,
        tokenizer,
        [
            chat("ab", "cdef"),
            {"messages": [{"role": "user", "content": "only me"}]},
            {"text": ""},
            {"messages": [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]},
            long_prompt,
        ],
        overflow="truncate",
    )
    assert len(rows) == 1 and rows.documents_read.total() == 5
    assert rows.dropped["without an assistant turn"] == 1 and rows.dropped["without text"] == 1
    refused = [reason for reason in rows.dropped if "that the chat format refuses" in reason]
    assert len(refused) == 1 and "(messages.role: unknown role 'wizard'" in refused[0]
    assert rows.dropped["pieces without a supervised row"] == 1
    assert "1 without an assistant turn" in rows.summary()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([], "is empty"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "no row of .* 1 without an assistant turn"),
        (['{"text": '], r"rows\.jsonl:1 is not JSON"),
        (["[1]"], "must be a JSON object"),
        ([{"prompt": "x"}], "none of the keys messages, conversations, text"),
    ],
)
def test_mistakes_are_named(tmp_path, tokenizer, content, named):
    with pytest.raises(UserError, match=named):
        load(tmp_path, tokenizer, content)


def test_unreadable_files_are_named(tmp_path, tokenizer):
    broken = tmp_path / "broken.jsonl.xz"
    broken.write_bytes(lzma.compress(b'{"text": "x"}' * 1000)[:-20])
    for path, named in ((broken, "broken.jsonl.xz cannot be read"), (tmp_path / "none.jsonl", "does not exist")):
        with pytest.raises(UserError, match=named):
            load_rows(DataConfig(path=str(path)), tokenizer, 0)
    with pytest.raises(UserError, match="no bundled data set nothing"):
        load_rows(DataConfig(path="bundled:nothing"), tokenizer, 0)

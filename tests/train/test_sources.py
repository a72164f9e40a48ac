"""Sources of rows: tables and directories hold what JSONL holds; mixtures follow their weights and the seed alone."""

import json
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

from target_model.errors import UserError
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from train.config import DataConfig, parse_section
from train.data import load_rows
from train.sources import read_rows

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_target("m3-tiny").path)


def lines(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_parquet_saved_and_plain_directories_equal_jsonl(tmp_path, tokenizer):
    rows = [chat(f"q{i}", f"answer {i}") for i in range(5)]
    table = datasets.Dataset.from_list(rows)
    (tmp_path / "files" / "deeper").mkdir(parents=True)
    expected = load_rows(DataConfig(path=lines(tmp_path / "rows.jsonl", rows), sequence_length=64), tokenizer, 0)
    table.select(range(2)).to_parquet(str(tmp_path / "files" / "a.parquet"))
    lines(tmp_path / "files" / "deeper" / "b.jsonl", rows[2:])
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("rows.parquet", "files", "saved"):
        for streaming in (True, False):
            config = DataConfig(path=str(tmp_path / name), sequence_length=64, streaming=streaming)
            found = load_rows(config, tokenizer, 0)
            assert np.array_equal(found.token_ids, expected.token_ids), (name, streaming)
            assert np.array_equal(found.spans, expected.spans)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    for name, named in (("empty", "holds no file of the kinds"), ("bad.parquet", "cannot be read"), ("no", "does not")):
        with pytest.raises(UserError, match=named):
            load_rows(DataConfig(path=str(tmp_path / name)), tokenizer, 0)


def test_mixtures_follow_weights_and_seed(tmp_path):
    paths = [lines(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(400)]) for name in "ab"]
    sources = [{"path": paths[0], "weight": 3.0}, {"path": paths[1], "weight": 1.0}]

    def drawn(seed: int, **more) -> list[str]:
        config = parse_section(DataConfig, {"sources": sources, **more}, "data")
        return [row.values["text"] for row in read_rows(config, seed)]

    first = drawn(1)
    counts = Counter(text[0] for text in first)
    assert counts["a"] == 400 and 100 < counts["b"] < 170  # ends where a does, a third as many of b
    assert first == drawn(1) != drawn(2)
    assert [text for text in first if text[0] == "a"] == [f"a{i}" for i in range(400)]  # each in its own order
    assert drawn(1, max_documents=7) == first[:7]
    repeated = Counter(drawn(1, exhausted="repeat"))
    assert len(repeated) == 800 and {repeated[f"b{i}"] for i in range(400)} == {1} and max(repeated.values()) >= 3
    plain = parse_section(DataConfig, {"sources": [{"path": path} for path in paths]}, "data")
    assert len(list(read_rows(plain, 0))) == 800


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "give one of path and sources"),
        ({"path": "x", "sources": [{"path": "y"}]}, "give one of path and sources"),
        ({"sources": [{"path": "x", "weight": 1.0}, {"path": "y"}]}, "give all sources a weight, or none"),
        ({"sources": [{"path": "x", "wieght": 1.0}]}, r"unknown key sources\.0\.wieght \(did you mean weight"),
        ({"sources": [{"path": "x", "weight": 0.0}]}, r"sources\.0\.weight: "),
    ],
)
def test_mistakes_name_their_key(values, named):
    with pytest.raises(UserError, match=named):
        parse_section(DataConfig, values, "data")


def test_thinking_is_a_matter_of_the_source(tmp_path, tokenizer):
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    path = lines(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}, thought]}])
    sources = [{"path": path, "thinking_mode": "enabled"}, {"path": path, "thinking_mode": "disabled"}]
    rows = load_rows(parse_section(DataConfig, {"sources": sources, "sequence_length": 64}, "data"), tokenizer, 0)
    (reason,) = rows.dropped
    assert len(rows) == 1 and "has reasoning, which no prompt with thinking_mode disabled leads to" in reason
    assert rows.summary().startswith(f"2 documents (2 {path})") or rows.documents_read == {path: 2}


def test_tool_turns_of_both_layouts_and_of_tables(tmp_path, tokenizer):
    """The call and the answer behind its result are trained, the result is not; the tools stand in the prompt."""
    ours = {"messages": TOOL_CHAT, "tools": TOOLS}
    theirs = {
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "It is 3."},
        ],
        "tools": json.dumps(TOOLS),
    }
    table = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{**ours, "tools": json.dumps(TOOLS)}]).to_parquet(str(table))
    found = [
        load_rows(DataConfig(path=path, sequence_length=1024), tokenizer, 0)
        for path in (lines(tmp_path / "a.jsonl", [ours]), lines(tmp_path / "b.jsonl", [theirs]), str(table))
    ]
    for other in found[1:]:
        assert np.array_equal(found[0].token_ids, other.token_ids) and np.array_equal(found[0].spans, other.spans)
    ids, spans = found[0].token_ids[0], found[0].spans[0]
    call, answer = (tokenizer.decode(ids[spans == span].tolist()) for span in (1, 2))
    rest = tokenizer.decode(ids[(spans == 0) & (found[0].documents[0] > 0)].tolist())
    assert '<invoke name="add">' in call and "It is 3." in answer and "<response>3</response>" in rest
    assert '"add"' in rest  # the definition
    broken = lines(tmp_path / "c.jsonl", [{**ours, "tools": "{"}, ours])
    assert "tools: must be a list" in str(
        load_rows(DataConfig(path=broken, sequence_length=1024), tokenizer, 0).dropped
    )

"""Prompt suites: the bundled ones are whole, and a bad file is refused with its line number."""

import json

import pyarrow.parquet
import pytest

from spec.suites import BENCHMARKS, HELD_OUT, PLACEHOLDER, load_suite
from target_model.errors import UserError


@pytest.mark.parametrize("name", BENCHMARKS)
def test_bundled_suites_hold_eighty_prompts(name):
    suite = load_suite(name)
    assert suite.name == name and len(suite.prompts) == 80
    assert len({prompt.id for prompt in suite.prompts}) == 80
    assert all(prompt.turns and all(prompt.turns) for prompt in suite.prompts)


def test_mt_bench_has_two_turns():
    assert {len(prompt.turns) for prompt in load_suite("mt_bench").prompts} == {2}


def test_held_out_prompts_are_none_of_the_benchmarks():
    asked = {turn for name in BENCHMARKS for prompt in load_suite(name).prompts for turn in prompt.turns}
    held_out = load_suite(HELD_OUT).prompts
    assert len(held_out) == 16 and not asked & {prompt.turns[0] for prompt in held_out}


def test_limit_keeps_the_first():
    assert [prompt.id for prompt in load_suite("humaneval", 2).prompts] == ["HumanEval/0", "HumanEval/1"]


def test_three_layouts_of_a_file(tmp_path):
    rows = [
        {"id": "a", "category": "c", "turns": ["one", "two"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"prompt": "four"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    suite = load_suite(str(path))
    assert suite.name == "mine"
    assert [prompt.turns for prompt in suite.prompts] == [("one", "two"), ("three",), ("four",)]
    assert suite.prompts[0].id == "a" and suite.prompts[1].id == "2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 has no prompt"),
        ('{"turns": []}', "line 2 has no prompt"),
        ('{"turns": [1]}', "line 2 has no prompt"),
        ('{"text": "x"}', "line 2 has no prompt"),
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match=message):
        load_suite(str(path))


SPEC_BENCH = {"question_id": 81, "category": "summarization", "turns": ["Summarise: ...", "Shorter."], "reference": []}
SPEED_BENCH = {
    "question_id": "c0ffee",
    "category": "coding",
    "sub_category": "python",
    "turns": ["one", "two", "three"],
    "source": "x",
    "src_id": "7",
    "difficulty": "hard",
    "multiturn": True,
}


def test_layouts_of_public_benchmarks(tmp_path):
    """Spec-Bench's question.jsonl, and SPEED-Bench as Parquet from the hub and as the JSONL that is made of it."""
    path = tmp_path / "spec_bench" / "question.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(SPEC_BENCH) + "\n")
    suite = load_suite(str(path))
    assert suite.name == "spec_bench" and suite.prompts[0].turns == ("Summarise: ...", "Shorter.")
    assert (suite.prompts[0].id, suite.prompts[0].category) == ("81", "summarization")
    columns = tmp_path / "qualitative" / "test-00000-of-00001.parquet"
    columns.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SPEED_BENCH] * 3), columns)
    lines = tmp_path / "qualitative.jsonl"
    lines.write_text(json.dumps(SPEED_BENCH) + "\n")
    for source, count in ((columns, 2), (lines, 1)):
        suite = load_suite(str(source), 2)
        assert suite.name == "qualitative" and len(suite.prompts) == count
        assert (suite.prompts[0].id, suite.prompts[0].category) == ("c0ffee", "coding")
        assert len(suite.prompts[0].turns) == 3


def test_a_placeholder_is_no_prompt(tmp_path):
    path = tmp_path / "speed.jsonl"
    path.write_text(json.dumps({**SPEED_BENCH, "turns": [f"{PLACEHOLDER} FROM THE SOURCE USING SPECDEC_BENCH"]}))
    with pytest.raises(UserError, match="line 1 holds SPEED-Bench's placeholder"):
        load_suite(str(path))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="no Parquet file"):
        load_suite(str(tmp_path / "bad.parquet"))


def test_unknown_name_and_empty_file(tmp_path):
    with pytest.raises(UserError, match="no such suite: mtbench"):
        load_suite("mtbench")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompts"):
        load_suite(str(tmp_path / "empty.jsonl"))

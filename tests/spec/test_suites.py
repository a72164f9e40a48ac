"""Prompt suites: the bundled ones are whole, and a bad file is refused with its line number."""

import json

import pytest

from spec.suites import BENCHMARKS, HELD_OUT, load_suite
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


def test_unknown_name_and_empty_file(tmp_path):
    with pytest.raises(UserError, match="no such suite: mtbench"):
        load_suite("mtbench")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompts"):
        load_suite(str(tmp_path / "empty.jsonl"))

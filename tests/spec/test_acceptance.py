"""The acceptance benchmark: its settings, its sums on a scripted engine, and the whole command on a real pair."""

import json
from dataclasses import dataclass, field

import pytest

from serve.request import Completion, SamplingParams, StepRecord
from serve.tree import TreeConfig
from spec import cli
from spec.bench.acceptance import parse_concurrency, parse_shapes, parse_temperatures, parse_thinking, with_one
from spec.bench.sweep import Condition, Contender, sampling_params, sweep
from spec.bench.tables import number
from spec.pair import load_pair, pairs_of
from spec.suites import Prompt, load_suite
from target_model.errors import UserError

CHAIN_3 = TreeConfig.chain(3)


def test_shapes():
    assert parse_shapes("1..3", ["none"]) == tuple(map(TreeConfig.chain, (1, 2, 3)))
    assert parse_shapes("2,5", ["4,3,16"]) == (TreeConfig.chain(2), TreeConfig.chain(5), TreeConfig(4, 3, 16))
    assert parse_shapes("none", None) == (TreeConfig(),)
    assert parse_shapes("3", ["3,1,4"]) == (CHAIN_3,)  # the same shape once


@pytest.mark.parametrize("chain", ["", "0", "3..1", "1..99", "x", "1..", "1,,2"])
def test_bad_chain_lengths_are_named(chain):
    with pytest.raises(UserError, match="--chain must be like"):
        parse_shapes(chain, None)


def test_temperature_one_is_always_measured():
    assert with_one(parse_temperatures("0")) == (0.0, 1.0)
    assert with_one(parse_temperatures("0.5,0,1")) == (0.0, 0.5, 1.0)
    with pytest.raises(UserError, match="temperature"):
        parse_temperatures("-1")


def test_sampled_runs_use_the_models_filters_and_greedy_ones_none():
    sampled = sampling_params(1.0, 96, 7)
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (1.0, 0.95, 40, 7)
    greedy = sampling_params(0.0, 96, 7)
    assert greedy.greedy and (greedy.top_p, greedy.top_k) == (1.0, 0)


def test_no_figure_reads_not_available():
    assert number(None) == "n/a" and number(2.345) == "2.35"


def test_what_is_varied():
    assert parse_thinking("both") == (False, True) and parse_concurrency("8,1,8") == (1, 8)
    for parse, text in ((parse_thinking, "maybe"), (parse_concurrency, "0"), (parse_concurrency, "1,x")):
        with pytest.raises(UserError, match="must be"):
            parse(text)


@dataclass
class ScriptedEngine:
    """Answers with what its script says for the prompt and remembers how it was asked."""

    tree: TreeConfig
    script: dict[int, Completion]
    asked: list[tuple[list[int], list[SamplingParams]]] = field(default_factory=list)

    def stats(self) -> dict[str, float]:
        return {
            "prefill_seconds": -1.0 * len(self.asked),
            "draft_seconds": 10.0 * len(self.asked),
            "verify_seconds": 100.0 * len(self.asked),
        }

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
        self.asked.append((prompts, params if isinstance(params, list) else [params]))
        return [self.script[prompt[-1]] for prompt in prompts]


class ScriptedPair:
    """A conversation's prompt ends with the number of its last question; answers keep their tokens."""

    def render(self, question: str) -> list[int]:
        return [int(question)]

    def render_conversation(self, messages: list[dict], thinking: bool) -> list[int]:
        return [-int(thinking), *(token for message in messages for token in message["content"])]

    def answer_message(self, token_ids: list[int], thinking: bool) -> dict:
        return {"content": token_ids}


class Turn(str):
    """A question whose text is its number."""

    def __iter__(self):
        return iter([int(str(self))])


def answer(token_ids: list[int], steps: list[StepRecord]) -> Completion:
    return Completion(token_ids, [0] * len(token_ids), "length", None, None, steps)


ONE, FOUR = StepRecord(drafted=0, accepted=0, emitted=1), StepRecord(drafted=3, accepted=3, emitted=4)
MISS = StepRecord(drafted=3, accepted=0, emitted=1)


def scripted_sweep(prompts: list[list[str]], conditions: list[Condition], repeats: int = 1):
    plain = ScriptedEngine(TreeConfig(), {1: answer([5, 6, 7, 8, 9], [ONE] * 4), 2: answer([5, 6], [ONE])})
    drafted = ScriptedEngine(CHAIN_3, {1: answer([5, 6, 7, 8, 9], [FOUR]), 2: answer([5, 9], [MISS])})
    asked = [Prompt(f"p{i}", "c", tuple(map(Turn, turns))) for i, turns in enumerate(prompts)]
    calls: list[tuple[str, int]] = []
    contenders, advance = [Contender("d", drafted)], lambda *call: calls.append(call)
    pair = ScriptedPair()
    settings = {"tokens": 5, "seed": 10, "repeats": repeats, "advance": advance}
    rows = list(sweep(plain, contenders, {"s": asked}, conditions, pair, **settings))
    assert plain.asked == drafted.asked  # both engines are asked the same
    return rows, plain.asked[1:], calls  # the first is the warm-up


def test_sweep_adds_up_prompts_and_counts_identical_answers():
    rows, asked, calls = scripted_sweep([["1"], ["2"]], [Condition(0.0), Condition(1.0)])
    assert [(row.label, row.temperature) for row in rows] == [("chain 3", 0.0), ("chain 3", 1.0)]
    row = rows[0]
    assert (row.prompts, row.identical, row.tokens) == (2, 1, 7)
    assert row.acceptance.length == 5 / 2 and row.acceptance.histogram == (1, 0, 0, 1)
    assert row.acceptance.per_position == (0.5, 0.5, 0.5)
    assert row.speed_up == row.plain_time.total / row.time.total
    # The script claims a prefill of minus one second for each prompt, which the decode time has to leave out.
    assert row.time.decode == pytest.approx(row.time.total + 2)
    assert (row.time.draft, row.time.verify) == pytest.approx((20, 200))
    assert calls == [("s, T = 0", 1)] * 2 + [("s, T = 1", 1)] * 2
    # Sampled prompts have a seed of their own.
    assert [params[0].seed for _, params in asked[-2:]] == [10, 11]


def test_a_second_turn_continues_the_answer():
    rows, asked, _ = scripted_sweep([["2", "1"], ["1"]], [Condition(0.0, thinking=True)])
    assert [(each.prompt, each.turn, each.identical) for each in rows[0].answers] == [
        ("p0", 1, False), ("p0", 2, True), ("p1", 1, True)
    ]  # fmt: skip
    assert [prompts for prompts, _ in asked] == [[[-1, 2]], [[-1, 2, 5, 6, 1]], [[-1, 1]]]  # -1: with thinking
    assert rows[0].prompts == 2 and len(rows[0].answers) == 3


def test_concurrency_asks_together_and_shares_the_time():
    rows, asked, calls = scripted_sweep([["1"], ["2"], ["1", "2"]], [Condition(1.0, concurrency=2)])
    assert [[prompt[-1] for prompt in prompts] for prompts, _ in asked] == [[1, 2], [1], [2]]
    assert [[each.seed for each in params] for _, params in asked] == [[10, 11], [12], [12]]
    assert calls == [("s, T = 1, 2 at a time", 2), ("s, T = 1, 2 at a time", 1)]
    assert [each.time.draft for each in rows[0].answers] == pytest.approx([5, 5, 10, 10])


def test_repeats_use_other_seeds_and_leave_greedy_alone():
    rows, asked, _ = scripted_sweep([["1"], ["2"]], [Condition(0.0), Condition(1.0)], repeats=3)
    assert len(rows[0].answers) == 2 and len(rows[1].answers) == 6 and rows[1].prompts == 2
    assert [params[0].seed for _, params in asked[2:]] == [10, 11, 12, 13, 14, 15]


def test_emitted_tokens_are_those_of_the_answers(untrained_draft):
    """Of a real engine: every token but the prefill's comes from a step, also when a stop token ends the answer."""
    pair = load_pair("m3-tiny", untrained_draft, "cpu")
    prompts = [pair.render(prompt.turns[0]) for prompt in load_suite("humaneval", 2).prompts]
    engine = pair.engine(CHAIN_3, 256, sequences=2)
    plain = pair.engine(None, 256, sequences=2).generate(prompts, sampling_params(0.0, 9, 0))
    stop = plain[0].token_ids[4]
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(stop,))
    for completion in engine.generate(prompts, params) + engine.generate(prompts, sampling_params(1.0, 2, 0)):
        stopped = completion.stop_token is not None
        assert sum(step.emitted for step in completion.steps) == len(completion.token_ids) - 1 + stopped
    assert engine.generate(prompts, params)[0].stop_token == stop


def test_the_plain_engine_drafts_nothing_and_the_others_do(untrained_draft):
    pair = load_pair("m3-tiny", untrained_draft, "cpu")
    prompt, params = pair.render("Hello!"), sampling_params(1.0, 8, 0)
    drafted = [
        sum(step.drafted for step in pair.engine(tree, 128).generate([prompt], params)[0].steps)
        for tree in (None, CHAIN_3)
    ]
    assert drafted[0] == 0 and drafted[1] > 0


def test_several_drafts_share_one_target(untrained_draft, tmp_path):
    pairs = pairs_of("m3-tiny", [untrained_draft, "eagle3"], "cpu")
    first, second = pairs.values()
    assert first.target is second.target and first.draft is not second.draft
    assert "untrained" in first.description and "bundled" in second.description
    with pytest.raises(UserError, match="nowhere"):
        pairs_of("m3-tiny", ["eagle3", str(tmp_path / "nowhere")], "cpu")


def test_command_prints_tables_and_json(monkeypatch, capsys, tmp_path, untrained_draft):
    target = tmp_path / "new" / "result.json"
    target.parent.mkdir()
    arguments = f"bench acceptance --draft {untrained_draft} --suite humaneval --tokens 6 --chain 2"
    arguments += " --tree 2,2,5 --stride 79 --prompts 2 --against plain"
    monkeypatch.setattr("sys.argv", ["spec", *arguments.split(), "--temperature", "0", "--json", str(target)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "bonus" in out and "2/2" in out  # the definitions, and the greedy check
    result = json.loads(target.read_text())
    assert [(row["label"], row["temperature"]) for row in result["rows"]] == [
        ("chain 2", 0.0), ("tree 2,2,5", 0.0), ("chain 2", 1.0), ("tree 2,2,5", 1.0)
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["identical_to_plain"] == row["prompts"] == 2
        assert row["by_answer"]["prompt"] == ["HumanEval/0", "HumanEval/79"]
        assert row["steps"] == sum(row["histogram"]) and row["emitted"] == row["tokens"] - 2
    last = json.loads(out.strip().splitlines()[-1])
    assert last["AL"]["humaneval"]["chain 2, T = 0"] == pytest.approx(result["rows"][0]["AL"], abs=1e-4)
    assert list(target.parent.iterdir()) == [target]


def test_a_result_that_cannot_be_written_is_refused_before_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("spec.bench.acceptance.pairs_of", lambda *_: pytest.fail("measured first"))
    monkeypatch.setattr("sys.argv", ["spec", "bench", "acceptance", "--json", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and str(tmp_path) in capsys.readouterr().err


def test_against_plain_fails_when_a_greedy_answer_differs(monkeypatch, capsys, untrained_draft):
    """A target that answers otherwise when it verifies a tree."""
    from serve import runner

    honest = runner.choose

    def choose(logits, rows, eos):
        chosen = honest(logits, rows, eos)
        return chosen if len(rows) == 1 else (chosen + 1) % 4096

    monkeypatch.setattr(runner, "choose", choose)
    line = f"spec bench acceptance --draft {untrained_draft} --suite humaneval --prompts 1 --tokens 6"
    line += " --chain 2 --tree none"
    for ending, code in ((["--against", "plain"], 1), ([], None), (["--against", "other"], 2)):
        monkeypatch.setattr("sys.argv", [*line.split(), *ending])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or None) == code
    assert "identical to plain decoding: no, 0 of 1" in capsys.readouterr().out

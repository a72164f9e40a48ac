"""METRICS: acceptance and speed numbers that are wrong.

Report R24: tokens behind the end of an answer are counted, a rate has a constant denominator, or sums count twice.
Every number is worked out again from a raw trace of the verify steps, as they were before anything was cut. Also tried,
of the same kind: stop strings and stop tokens in the middle of a run, the end of text at every place of it, caps of 1
and 2, n and best_of, trees as well as chains, requests that are aborted, requests that are preempted, a request without
any verify step, numbers of each answer against the totals, /stats against /metrics and usage, answers that still
run. Training's figures over two processes are those of one; whole runs: tests/train/test_processes.py.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from serve.metrics import counts_json
from serve.tree import TreeConfig
from spec.bench.serving import DEFINITIONS
from tests.serve.comparison import COMPLETIONS, Pair, Way
from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import ask, client, serving
from tests.serve.known_target import Following, known_target
from train.loss import StepSums
from train.ranks import reduce_sums

TOKENIZER = tokenizer()
END, START = TOKENIZER.eos_ids[0], TOKENIZER.encode("x")[0]
WORDS = [
    token
    for token in range(TOKENIZER.vocab_size)
    if re.fullmatch(r" [b-df-hj-np-tv-z][a-z]{5}", TOKENIZER.decode([token]))
][:12]
CHAIN = Way(TreeConfig.chain(5), 1.0, crowded=True, stream=False)
WAYS = [CHAIN, Way(TreeConfig.chain(5), 0.6, True, False), Way(TreeConfig(4, 3, 14), 0.6, True, False)]


@dataclass
class Step:
    drafted: int
    accepted: int
    tokens: int


def traced(made) -> dict[str, list[Step]]:
    """Verify steps by prompt and choice, as the models made them."""
    trace: dict[str, list[Step]] = {}
    runner = made.engine.engine.runner
    decode = runner.decode

    def recording(sequences, *rest, **options):
        outcomes = decode(sequences, *rest, **options)
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            step = Step(len(outcome.tree) - 1, len(outcome.path), len(outcome.tokens))
            trace.setdefault(sequence.request.id, []).append(step)
        return outcomes

    runner.decode = recording
    return trace


def expected(trace: dict[str, list[Step]], completion: dict[str, int]) -> dict:
    """What has to be reported, if each answer ended after so many tokens, of which the prefill decided the first."""
    counts = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}
    depths = [0] * 8
    for name, tokens in completion.items():
        left = tokens - 1
        for step in trace.get(name, []):
            if left <= 0:
                break
            emitted = min(step.tokens, left)
            left -= emitted
            accepted = min(step.accepted, emitted)
            counts["steps"] += 1
            counts["drafted"] += step.drafted
            counts["accepted"] += accepted
            counts["emitted"] += emitted
            for depth in range(accepted):
                depths[depth] += 1
        assert left <= 0, "the answer has tokens that no step decided"
    return {**counts, "depths": [depth for depth in depths if depth]}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values of /metrics by name and position."""
    return {
        (sample.name, sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def run(made, bodies):
    """Answers, /stats and /metrics."""

    async def talk():
        async with client(made) as http:
            posts = [http.post(COMPLETIONS, json=body) for body in bodies]
            answers = [response.json() for response in await asyncio.gather(*posts)]
            return answers, (await http.get("/stats")).json(), (await http.get("/metrics")).text

    return asyncio.run(talk())


def bodies(**every):
    """A hundred requests that end in every way."""
    ends = [{}, {"max_tokens": 1}, {"max_tokens": 2}, {"stop": TOKENIZER.decode([WORDS[2]])}, {"stop": "never"}]
    ends += [{"stop_token_ids": [WORDS[3]]}, {"n": 2}, {"n": 1, "best_of": 2, "max_tokens": 4}]
    return [
        {"prompt": "x" if place % 3 else "a x", "temperature": 0.9, "seed": place, "max_tokens": 12}
        | ends[place % len(ends)]
        | every
        for place in range(100)
    ]


@pytest.mark.parametrize(("way", "end"), [(CHAIN, 2), (CHAIN, 3), (CHAIN, 4), (WAYS[1], 3), (WAYS[2], 4)], ids=str)
def test_r24_numbers_follow_from_the_trace(way, end):
    """The end of text comes as token 3, 4 and 5; the draft goes on behind it."""
    following = Following.chain([*WORDS[:end], END, *WORDS[end:]], starts=(START,))
    made = Pair(known_target(following), following.script).service(way)
    trace = traced(made)
    answers, stats, text = run(made, bodies())
    ended = {entry["id"]: entry for entry in stats["recent"]}
    completion = {name: entry["completion_tokens"] for name, entry in ended.items()}
    # The last hundred answers one by one, then all of them.
    usage = [answer["usage"] for answer in answers]
    assert stats["completion_tokens"] == sum(entry["completion_tokens"] for entry in usage)
    for name, entry in ended.items():
        alone = expected(trace, {name: completion[name]})
        shown = (entry["verify_steps"], entry["drafted_tokens"], entry["accepted_tokens"])
        assert shown == (alone["steps"], alone["drafted"], alone["accepted"])
        assert completion[name] == alone["emitted"] + 1
    details = [entry["completion_tokens_details"] for entry in usage]
    assert stats["accepted_tokens"] == sum(entry["accepted_prediction_tokens"] for entry in details)
    assert stats["drafted_tokens"] - stats["accepted_tokens"] == sum(
        entry["rejected_prediction_tokens"] for entry in details
    )
    prometheus = samples(text)
    for name, key in (
        ("spec_spec_decode_num_drafts_total", "verify_steps"),
        ("spec_spec_decode_num_draft_tokens_total", "drafted_tokens"),
        ("spec_spec_decode_num_accepted_tokens_total", "accepted_tokens"),
        ("spec_generation_tokens_total", "completion_tokens"),
    ):
        assert prometheus[name, ""] == stats[key]
    assert prometheus["spec_spec_decode_acceptance_length", ""] == pytest.approx(stats["acceptance_length"], abs=1e-9)
    count = sum(stats["requests"].values())
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    assert [prometheus[f"spec_{part}_seconds_count", ""] for part in parts] == [count] * len(parts)
    *inner, whole = (prometheus[f"spec_{part}_seconds_sum", ""] for part in parts)
    assert 0 < sum(inner) <= whole


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_r24_totals_and_rates_follow_from_the_trace(way):
    """Fifty requests, all of them in `recent`; some are preempted."""
    following = Following.chain([*WORDS[:4], END, *WORDS[4:]], starts=(START,))
    made = Pair(known_target(following), following.script).service(way, pages=24, max_running=8)
    trace = traced(made)
    requests = [body for body in bodies(prompt="a b c d e f g h x") if "n" not in body][:36]
    requests += [{**body, "ignore_eos": True, "max_tokens": 40} for body in requests[:14]]
    answers, stats, text = run(made, requests)
    assert stats["engine"]["preemptions"] > 0
    names = {entry["id"]: entry["completion_tokens"] for entry in stats["recent"]}
    assert len(names) == len(requests)
    wanted = expected(trace, names)
    assert (stats["verify_steps"], stats["drafted_tokens"], stats["accepted_tokens"]) == (
        wanted["steps"],
        wanted["drafted"],
        wanted["accepted"],
    )
    # Emitted by verify steps: all but the token of each prefill.
    assert wanted["emitted"] == sum(answer["usage"]["completion_tokens"] - 1 for answer in answers)
    steps = wanted["steps"]
    assert stats["acceptance_length"] == pytest.approx(wanted["accepted"] / steps + 1, abs=1e-9)
    assert stats["acceptance_rate"] == pytest.approx(wanted["accepted"] / wanted["drafted"], abs=1e-9)
    assert stats["accepted_per_position"] == pytest.approx([count / steps for count in wanted["depths"]], abs=1e-9)
    assert stats["accepted_per_position"] == sorted(stats["accepted_per_position"], reverse=True)
    assert all(0 <= rate <= 1 for rate in (stats["acceptance_rate"], *stats["accepted_per_position"]))
    assert sum(stats["accepted_histogram"]) == steps
    assert sum(kept * count for kept, count in enumerate(stats["accepted_histogram"])) == wanted["accepted"]
    prometheus = samples(text)
    for depth, count in enumerate(wanted["depths"]):
        assert prometheus["spec_spec_decode_num_accepted_tokens_per_pos_total", str(depth)] == count


def test_r24_nothing_behind_a_stop_string_counts():
    """The scripted engine drafts 9 nodes a step and keeps six tokens; the answer ends with the third of them."""
    made = service(saying(WORDS, runs=(6,), end=False))
    response = ask(made, COMPLETIONS, prompt="x", stop=TOKENIZER.decode([WORDS[3]]).strip(), max_tokens=12)
    counts = response.json()["usage"]["completion_tokens_details"]
    assert (counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]) == (3, 9 - 3)
    totals = made.metrics.json()
    assert (totals["verify_steps"], totals["accepted_tokens"], totals["drafted_tokens"]) == (1, 3, 9)
    assert (totals["acceptance_length"], totals["accepted_per_position"]) == (4.0, [1.0, 1.0, 1.0])


def test_r24_tokens_count_as_they_come():
    """Not only when a long answer ends; and its end adds nothing."""
    made = service(FakeEngine(lambda request: WORDS, seconds=0.005, context=10**6))
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with serving(made) as url, httpx.Client(base_url=url, timeout=30) as http:
        with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            seen = 0
            while seen < 20:
                seen += next(lines).startswith("data: ")
            stats, text = http.get("/stats").json(), http.get("/metrics").text
            assert stats["completion_tokens"] > 50 and stats["recent"] == []
            assert stats["running"][0]["accepted_tokens"] == stats["accepted_tokens"] > 0
            assert samples(text)["spec_generation_tokens_total", ""] >= stats["completion_tokens"]
        while (last := http.get("/stats").json())["running"]:
            time.sleep(0.01)
    assert last["completion_tokens"] == last["recent"][0]["completion_tokens"] >= stats["completion_tokens"]


def test_r24_times_begin_when_the_client_asks(monkeypatch):
    """Not when its prompt has been encoded, or the engine has taken it in."""
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda *rest, **options: time.sleep(0.1) or encode(*rest, **options))
    made = service(saying(WORDS))
    ask(made, COMPLETIONS, prompt="x", max_tokens=5)
    seen = samples(made.metrics.prometheus().decode())
    assert seen["spec_time_to_first_token_seconds_sum", ""] >= 0.1
    assert seen["spec_e2e_request_latency_seconds_sum", ""] >= seen["spec_time_to_first_token_seconds_sum", ""]


def sums_of(rank: int) -> StepSums:
    """What a rank may have counted: rows of three unrolled steps, some of which hit."""
    chance = torch.Generator().manual_seed(rank)
    return StepSums(*torch.rand(5, 3, generator=chance).mul(torch.tensor([9.0, 5, 2])).unbind())


def one_rank(rank: int, directory: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    mine = sums_of(rank)
    totals = [reduce_sums(mine).metrics() for _ in range(2)]  # twice: nothing may be added to what is summed
    torch.distributed.destroy_process_group()
    (Path(directory) / f"rank-{rank}.json").write_text(json.dumps(totals))


@pytest.mark.slow
def test_r24_training_figures_are_those_of_one_process(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    expected = (sums_of(0) + sums_of(1)).metrics()
    for rank in (0, 1):
        for totals in json.loads((tmp_path / f"rank-{rank}.json").read_text()):
            for name, value in expected.items():
                assert totals[name] == pytest.approx(value, rel=1e-6), name


def test_r24_no_rate_without_a_step():
    made = service(saying(WORDS))
    ask(made, COMPLETIONS, prompt="x", max_tokens=1)
    numbers = counts_json(made.metrics.totals)
    assert (numbers["acceptance_length"], numbers["acceptance_rate"]) == (None, None)
    assert (numbers["accepted_per_position"], numbers["accepted_histogram"]) == ([], [0])


def test_r24_one_number_and_its_definition_stand_together():
    """/stats has one acceptance length, not a second one of the engine's that counts what clients never saw."""
    made = service(saying(WORDS))
    ask(made, COMPLETIONS, prompt="x", max_tokens=9)
    stats = made.metrics.json()
    assert "bonus" in stats["definitions"]["acceptance_length"]
    assert not {name for name in stats["engine"] if re.search("accept|draft.*tokens|emitted|verify_steps", name)}
    assert "plus 1" in DEFINITIONS["AL"]

"""A target over several processes: to its users it is one target, and no process outlives the others."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from serve import lockstep, workers
from serve.load import EngineOptions, load_engine
from serve.lockstep import BeginGraph, Drop, EndGraph, Logits, ReplayGraph, follow, pack, unpack
from serve.request import SamplingParams
from serve.server import make_service
from serve.workers import TargetPlan, check_plan, lead_target
from target_model.batch import Batch
from target_model.errors import UserError
from target_model.resolve import resolve_target
from tests.devices import CPU_AND_TWO_GPUS
from tests.serve.http_client import serving
from tests.serve.pictures import data_url, picture, user

PROMPTS = (
    "def fib(n):",
    "Once upon a time",
    "import os\n\ndef read(path):\n",
    "The capital of France is",
    "x = [",
    "1 + 1 =",
)
SHARED = "Some rules that every request repeats, long enough for whole pages of the cache. " * 3


def test_a_batch_arrives_as_it_was_sent():
    batches = [
        Batch.causal(8, "cpu", [[5, 6, 7], [9]], [0, 30], [[3], [1, 2, 4, 5]]),
        Batch.tree(8, "cpu", [[1, 2, 3]], [9], [[0, 7]], [[0, 1, 1]], [[1, 3, (1 << 63) | 5]]),
        replace(
            Batch.causal(8, "cpu", [[4, 4]], [0], [[1]]),
            image_rows=torch.tensor([1]),
            image_features=torch.ones(1, 6),
        ),
    ]
    for batch in batches:
        layout, integers = pack(batch)
        again = unpack(layout, integers, batch.image_features)
        for field in fields(Batch):
            value, other = getattr(batch, field.name), getattr(again, field.name)
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype and torch.equal(other, value), field.name
            else:
                assert other == value, field.name


def test_a_graph_holds_what_was_told_between_its_ends(monkeypatch: pytest.MonkeyPatch):
    """Whatever the device: a process that follows makes the graph by its number, and replays it when it is told."""
    done: list[Any] = []

    class Graph:
        def __init__(self, run, pool):
            done.append("begin")
            run()
            done.append("end")

        def pool(self):
            return 0, 1

        def replay(self):
            done.append("again")

    monkeypatch.setattr(lockstep, "record_graph", Graph)
    monkeypatch.setattr(lockstep.dist, "broadcast", lambda tensor, source: None)
    told = [Logits((1,)), BeginGraph(4), Logits((2,)), EndGraph(), ReplayGraph(4), Logits((3,)), ReplayGraph(4)]
    messages = iter([*told, Drop(4), ReplayGraph(4)])
    target = SimpleNamespace(device="cpu", dtype=torch.float32, scores=lambda state: done.append(len(state)))
    with pytest.raises(KeyError):
        follow(target, lambda: next(messages))
    assert done == [1, "begin", 2, "end", "again", 3, "again"]


def test_what_cannot_be_split_is_refused_before_anything_starts():
    config = resolve_target("m3-tiny").config
    check_plan(config, TargetPlan("m3-tiny", 4, torch.float32, "cpu"))
    for size, device, words in (
        (3, "cpu", "cannot be split over 3 processes: its 8 query heads do not divide"),
        (2, "cuda:1", "2 processes take cuda:0 to cuda:1: the device is cuda, not cuda:1"),
        (8, "cuda", f"8 processes need as many GPUs: torch sees {torch.cuda.device_count()}"),
    ):
        with pytest.raises(UserError, match=words):
            check_plan(config, TargetPlan("m3-tiny", size, torch.float32, device))


@contextmanager
def server(tmp_path: Path, device: str, *options: str) -> Iterator[tuple[subprocess.Popen, str, int, Path]]:
    """`spec serve --tp 2` as a process: itself, its address, its worker's id, the file of its errors."""
    command = [sys.executable, "-c", "from spec.cli import main; main()", "serve", "--tp", "2", "--device", device]
    errors = tmp_path / "errors"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            start_new_session=True,
        )
    try:
        text = ""
        while "\nserving" not in text and (line := process.stdout.readline()):
            text += line
        assert "\nserving" in text, errors.read_text()
        yield process, re.search(r"http:\S+/v1", text)[0], int(re.search(r"leads (\d+)", text)[1]), errors
    finally:
        process.kill()
        process.wait()


def complaints(errors: Path) -> list[str]:
    """What a server has said besides its log, and besides what compiling took it on a GPU."""
    lines = errors.read_text().splitlines()
    return [line for line in lines if "INFO" not in line and not line.startswith("compiled kernels")]


def ended(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends soon; one that nobody has collected yet counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def answers(url: str) -> list[dict[str, Any]]:
    """Greedy and sampled, alone and together, a prefix that is found again, a picture; texts, tokens and reasons."""
    bodies = [
        {"prompt": prompt, "max_tokens": 40, "logprobs": 1, "temperature": temperature, "seed": 7}
        for prompt in (*PROMPTS, SHARED + "A", SHARED + "B")
        for temperature in (0.0, 1.0)
    ]

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(f"{url}/completions", json=body, timeout=120).raise_for_status().json()
        choice = response["choices"][0]
        return {"text": choice["text"], "tokens": choice["logprobs"]["tokens"], "reason": choice["finish_reason"]}

    first = ask(bodies[-1])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, bodies))
    body = {"messages": user(data_url(picture())), "max_tokens": 20, "seed": 3}
    shown = httpx.post(f"{url}/chat/completions", json=body, timeout=120).raise_for_status().json()
    return [first, *together, shown["choices"][0]["message"]]


@pytest.mark.slow
def test_answers_are_those_of_one_process(tmp_path: Path):
    """With so few pages that requests push each other out and are computed again."""
    pages = 18
    engine, tokenizer, about = load_engine(EngineOptions("m3-tiny", device="cpu", pages=pages, language_only=False))
    with serving(make_service(engine, tokenizer, about)) as url:
        alone = answers(f"{url}/v1")
    assert engine.stats()["preemptions"] > 0
    with server(tmp_path, "cpu", "--pages", str(pages)) as (_, url, _, _):
        assert answers(url) == alone
        assert httpx.get(f"{url[:-3]}/stats", timeout=60).json()["engine"]["preemptions"] > 0


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
def test_a_lost_worker_ends_the_server(tmp_path: Path, device: str):
    """An open stream gets the reason, the log one line, and nobody waits for an answer of the dead."""
    with server(tmp_path, device) as (process, url, worker, errors):
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(worker, signal.SIGKILL)
            last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
            assert f"worker 1 of 2 (process {worker}) has ended" in last["error"]["message"]
        assert process.wait(20) == workers.LOST
        assert complaints(errors) == [
            f"spec: worker 1 of 2 (process {worker}) has ended: killed by signal 9; the server cannot go on"
        ]
        assert list(tmp_path.glob("spec-workers-*")) == []


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_workers_end_with_the_server(tmp_path: Path, number: signal.Signals, device: str):
    """Killed alone, or told to stop as service managers do it, every process at once: then an open request may end."""
    with server(tmp_path, device, "--draft", "none") as (process, url, worker, errors):
        if number == signal.SIGKILL:
            process.kill()
            assert process.wait(20) == -signal.SIGKILL
        else:
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
            with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.killpg(process.pid, number)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert process.wait(20) == 0
        assert ended(worker)
        assert not complaints(errors)
        assert list(tmp_path.glob("spec-workers-*")) == []


@pytest.mark.slow
def test_a_worker_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only rank 0 finds its part here: what the worker lacks becomes the error of the whole."""
    monkeypatch.setattr(workers, "load_part", lambda *arguments, **options: None)
    plan = TargetPlan(str(tmp_path / "nothing"), 2, torch.float32, "cpu", threads=1)
    with pytest.raises(UserError, match=r"worker 1 of 2: .*nothing"):
        lead_target(plan, resolve_target("m3-tiny").config, language_only=True)


@pytest.mark.slow
def test_a_draft_that_attends_to_the_blocks_of_all_heads():
    """The draft goes by choices that are made in both processes: what it guesses right is what it does beside one."""
    counted = []
    for processes in (1, 2):
        engine, tokenizer, _ = load_engine(
            EngineOptions("m3-tiny", device="cpu", draft_attention="sparse", tensor_parallel=processes)
        )
        prompts = [tokenizer.encode(text) for text in ("def fib(n):\n    return n\n" * 30, "Once upon a time " * 30)]
        answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60))
        counted.append(([answer.token_ids for answer in answers], engine.stats()["accepted_per_depth"]))
    engine.runner.target.followers.close()
    assert counted[0] == counted[1]


@pytest.mark.slow
def test_random_weights_over_two_processes():
    """All processes draw the same routers: every token finds its experts, wherever they are."""
    from target_model.dummy import DummyWeights

    engine, _, _ = load_engine(
        EngineOptions("m3-tiny", None, device="cpu", dummy=DummyWeights("bf16", 5), tensor_parallel=2, pages=20)
    )
    try:
        answer = engine.generate([[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0]
        assert len(answer.token_ids) == 6
        cache = engine.runner.cache
        assert cache.k.shape[3] == 1 and cache.k.isfinite().all() and cache.k.any()
    finally:
        engine.runner.target.followers.close()

"""`spec bench soak`: what is wrong with a server under load is found, and nothing is wrong with ours."""

import json
import sys

import pytest

from serve.load import EngineOptions, load_engine
from serve.server import make_service
from serve.tree import TreeConfig
from spec import cli
from tests.serve.fake_engine import FakeEngine, service, tokenizer
from tests.serve.http_client import serving

WORDS = tokenizer().encode("One answer of several words, neither short nor very long, and the same for everybody. " * 3)


def soak(monkeypatch, capsys, url, *arguments):
    """Exit code, the JSON line, and the lines before it."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("spec.bench.soak.IDLE_PATIENCE", 0.5)
    monkeypatch.setattr(sys, "argv", ["spec", "bench", "soak", "--url", url, *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return stop.value.code or 0, json.loads(lines[-1]) if lines else None, "\n".join(lines[:-1]), captured.err


SHORT = ("--seconds", "0.5", "--streams", "20", "--different", "2")


def test_a_good_server(monkeypatch, capsys):
    made = service(FakeEngine(lambda request: WORDS, seconds=0.002))
    with serving(made) as url:
        code, line, _, _ = soak(monkeypatch, capsys, url, *SHORT)
    assert code == 0, line
    assert line["finished"] > 10 and line["aborted"] > 5
    assert (line["failed"], line["stuck"], line["different"], line["answers_changed_afterwards"]) == (0, 0, 0, 0)
    assert line["free_pages_before"] == line["free_pages_after"] and line["seconds_until_idle"] is not None
    assert len(made.engine.engine.aborted) > 3  # they did hang up


def test_what_is_wrong_is_found(monkeypatch, capsys):
    def crowded(request):
        return WORDS if len(engine.requests) < 2 else WORDS[::-1]

    engine = FakeEngine(crowded, seconds=0.002)
    with serving(service(engine)) as url:
        code, line, said, _ = soak(monkeypatch, capsys, url, *SHORT)
    assert code == 1 and line["different"] > 0 and "differ from the answer" in said

    leaking = FakeEngine(lambda request: WORDS, seconds=0.002)
    stats = leaking.stats
    leaking.stats = lambda: {**stats(), "pages_free": stats()["pages_free"] - len(leaking.aborted)}
    with serving(service(leaking)) as url:
        code, line, said, _ = soak(monkeypatch, capsys, url, *SHORT)
    assert code == 1 and "pages are not free again" in said and line["free_pages_after"] < line["free_pages_before"]

    slow = FakeEngine(lambda request: WORDS, seconds=0.1, running=1)
    with serving(service(slow)) as url:
        code, line, said, _ = soak(
            monkeypatch, capsys, url, *SHORT, "--timeout", "0.8", "--tokens", "5", "--abort", "0"
        )
    assert code == 1 and line["stuck"] > 0 and "were stuck" in said

    crashing = FakeEngine(lambda request: WORDS, seconds=0.002, fail_after=60)
    with serving(service(crashing)) as url:
        code, _, _, error = soak(monkeypatch, capsys, url, *SHORT)
    assert code == 2 and "has crashed" in error


def test_a_full_server_may_say_so(monkeypatch, capsys):
    made = service(FakeEngine(lambda request: WORDS, seconds=0.002), max_open=8)
    with serving(made) as url:
        code, line, _, _ = soak(monkeypatch, capsys, url, *SHORT)
    assert code == 0 and line["refused"] > 0 and line["finished"] > 0


@pytest.mark.slow
def test_two_hundred_streams_for_half_a_minute(monkeypatch, capsys):
    """The bundled pair, with pages for about a third of what may run: some requests are preempted."""
    engine, words, description = load_engine(EngineOptions(tree=TreeConfig(3, 2, 6), device="cpu", pages=40))
    made = make_service(engine, words, description)
    options = ("--streams", "200", "--seconds", "30", "--tokens", "24")
    with serving(made) as url:
        code, line, said, _ = soak(monkeypatch, capsys, url, *options)
        stats = made.engine.stats()
    assert code == 0, said
    assert line["finished"] > 50 and line["aborted"] > 50
    assert (stats["running"], stats["waiting"], stats["open_requests"]) == (0, 0, 0)
    assert stats["preemptions"] > 0 and made.metrics.json()["acceptance_length"] > 1.2

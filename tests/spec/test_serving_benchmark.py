"""`spec bench serve` against servers on loopback whose answers are known."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from serve.service import Settings
from spec import cli
from spec.bench.percentiles import spread
from spec.bench.server_counters import Drafting, parse_drafting
from spec.bench.serving import Record
from spec.streaming import base_url
from target_model.errors import UserError
from tests.serve.fake_engine import DRAFTED, FakeEngine, saying, service
from tests.serve.http_client import serving


def call(monkeypatch, capsys, url, *arguments):
    """Exit code, the JSON line, the lines before it, and stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["spec", "bench", "serve", "--url", url, *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return stop.value.code or 0, json.loads(lines[-1]) if lines else None, lines[:-1], captured.err


def test_counts_are_the_servers(monkeypatch, capsys, tmp_path):
    """20 tokens an answer: one from prefill, then runs of 4 of which 3 were drafted, the last run cut to 3."""
    made = service(FakeEngine(lambda request: [50], runs=(4,)))
    fake = made.engine.engine
    written = tmp_path / "all.json"
    with serving(made) as url:
        options = ["--requests", "6", "--concurrency", "3", "--warm-up", "2", "--tokens", "20", "--json", str(written)]
        code, line, _, _ = call(monkeypatch, capsys, url + "/v1", "--suite", "mt_bench", *options)
    assert code == 0 and (line["requests"], line["failed"]) == (6, 0)
    assert len(fake.seen) == 8 and {request.params.max_tokens for request in fake.seen} == {20}
    assert len({tuple(request.prompt_ids) for request in fake.seen}) == 8
    assert len({request.params.seed for request in fake.seen}) == 8
    assert (line["output_tokens"], line["tokens_counted_by"]) == (120, "server")
    assert (line["accepted_tokens"], line["drafted_tokens"]) == (6 * 15, 6 * 5 * DRAFTED)
    assert line["acceptance_rate"] == round(15 / (5 * DRAFTED), 4)
    assert (line["verify_steps"], line["acceptance_length"]) == (6 * 5, 4.0)  # without those of the warm-up
    assert line["output_tokens_per_second"] == pytest.approx(120 / line["seconds"], rel=0.1)  # seconds are rounded
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        figures = line[name]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
    whole = json.loads(written.read_text())
    assert len(whole["records"]) == 6 and whole["settings"]["tokens"] == 20


def test_at_most_so_many_at_a_time(monkeypatch, capsys):
    made = service(FakeEngine(lambda request: [50], seconds=0.002))
    fake, most = made.engine.engine, []
    step = fake.step
    fake.step = lambda: (most.append(len(fake.requests)), step())[1]
    with serving(made) as url:
        options = ["--requests", "7", "--tokens", "30", "--warm-up", "0"]
        assert call(monkeypatch, capsys, url, *options, "--concurrency", "2")[0] == 0
        assert max(most) == 2
        assert call(monkeypatch, capsys, url, *options, "--rate", "5000")[0] == 0
        assert max(most) > 2


def test_failed_requests_are_counted_and_named(monkeypatch, capsys):
    """The server takes one request and refuses those that come beside it."""
    made = service(FakeEngine(lambda request: [50], seconds=0.01), max_open=1)
    with serving(made) as url:
        code, line, lines, _ = call(monkeypatch, capsys, url, "--requests", "4", "--concurrency", "4", "--warm-up", "0")
    assert code == 1 and 0 < line["failed"] < 4
    assert any("failed" in text and "requests are open" in text for text in lines)
    assert line["output_tokens"] == (4 - line["failed"]) * 128


def test_what_the_user_can_mend_is_one_line(monkeypatch, capsys):
    closed = service(saying("x"), settings=Settings(api_keys=("secret",)))
    with serving(closed) as url:
        code, _, _, err = call(monkeypatch, capsys, url)
        assert code == 2 and "API key" in err and err.count("\n") == 1
        assert call(monkeypatch, capsys, url, "--api-key", "secret", "--requests", "1")[0] == 0
        code, _, _, err = call(monkeypatch, capsys, url, "--api-key", "secret", "--model", "other")
        assert code == 2 and "'other' is not served" in err
    code, _, _, err = call(monkeypatch, capsys, url, "--requests", "1")
    assert code == 2 and "does not answer" in err
    code, _, _, err = call(monkeypatch, capsys, "localhost:8000")
    assert code == 2 and "http://" in err
    code, _, _, err = call(monkeypatch, capsys, url, "--rate", "1", "--concurrency", "1")
    assert code == 2 and "--rate and --concurrency" in err


def test_health_while_a_long_prompt_is_tokenised(monkeypatch, capsys):
    made = service(saying("x"))
    with serving(made) as url:
        code, line, lines, _ = call(monkeypatch, capsys, url, "--requests", "1", "--health-mb", "1")
    assert code == 0 and line["health"]["megabytes"] == 1
    assert line["health"]["answers"] >= 1 and line["health"]["answer_ms"]["p99"] > 0
    assert any("/health meanwhile" in text for text in lines)


class Bare(BaseHTTPRequestHandler):
    """A server that has the two endpoints, streams without usage, and knows nothing of drafts, metrics or health."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status, content, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        if self.path == "/v1/models":
            self._send(200, b'{"data": [{"id": "bare"}]}', "application/json")
        else:
            self._send(404, b"not found", "text/plain")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        events = [json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]}) for word in ("a", "b", "c")]
        content = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        self._send(200, content.encode(), "text/event-stream")


def test_a_server_without_any_extras(monkeypatch, capsys):
    """Tokens are counted by chunks, and what it does not say is n/a, not zero."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Bare) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code, line, lines, _ = call(monkeypatch, capsys, url, "--requests", "5", "--warm-up", "1")
        health = call(monkeypatch, capsys, url, "--requests", "1", "--health-mb", "1")
        server.shutdown()
    assert code == 0 and (line["requests"], line["failed"], line["model"]) == (5, 0, "bare")
    assert (line["output_tokens"], line["tokens_counted_by"]) == (15, "chunks")
    unknown = ("accepted_tokens", "drafted_tokens", "acceptance_rate", "acceptance_length", "verify_steps", "health")
    assert [line[name] for name in unknown] == [None] * len(unknown)
    assert line["ttft_ms"]["mean"] > 0 and "accepted/drafted: n/a" in lines and "AL: n/a" in lines
    assert health[0] == 2 and health[3].count("\n") == 1


def test_times_of_a_record():
    def text(content):
        return {"choices": [{"delta": {"content": content}}]}

    record = Record(sent=10.0)
    record.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 10.5)
    for content, now in (("a", 11.0), ("b", 11.25), ("c", 12.0)):
        record.take(text(content), now)
    assert (record.first, record.last, record.gaps) == (11.0, 12.0, [0.25, 0.75])
    assert (record.tokens, record.counted, record.per_token) == (3, False, 0.5)
    record.take({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 11}}, 12.5)
    assert (record.tokens, record.counted, record.per_token) == (11, True, 0.1)
    assert record.accepted is None  # the server says nothing of drafts, so nothing is made up


def test_a_stream_that_breaks_off_has_failed():
    import asyncio

    from spec.streaming import ServerError, stream_chat

    def answer(request):
        return httpx.Response(200, content=b'data: {"choices": []}\n\n')

    async def read():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as http:
            return [chunk async for chunk in stream_chat(http, {})]

    with pytest.raises(ServerError, match=r"without \[DONE\]"):
        asyncio.run(read())


def test_percentiles_are_nearest_ranks():
    assert spread([]) is None
    figures = spread([n / 1000 for n in range(1, 201)])
    assert figures == {"mean": 100.5, "p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}


def test_counters_of_other_servers_are_read():
    text = (
        "# TYPE vllm:spec_decode_num_drafts counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0\n'
    )
    assert parse_drafting(text) == Drafting(40.0, 20.0)
    assert Drafting(40.0, 20.0).length == 1.5 and Drafting(0.0, 0.0).length is None
    assert parse_drafting("python_info 1.0\n") is None


def test_the_address_may_end_with_v1():
    assert {base_url(f"http://h:1{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://h:1"}
    with pytest.raises(UserError, match="http://"):
        base_url("h:1")

"""An engine that crashes; a server that starts, ends, drains and asks for keys: nothing hangs, nothing stays behind."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from serve.load import EngineOptions
from serve.logs import JsonLines
from serve.request import Request, SamplingParams
from serve.server import ServeOptions, bind
from serve.server import run as run_server
from serve.service import Settings
from spec import cli
from target_model.errors import UserError
from tests.serve.fake_engine import FakeEngine, saying, service
from tests.serve.http_client import ask, client, serving

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


def endless(**options):
    return FakeEngine(lambda request: [50], seconds=0.002, **options)


def test_a_crash_ends_every_stream_and_fails_health():
    made = service(endless(fail_after=20))

    async def run():
        async with client(made) as http:
            assert (await http.get("/health")).status_code == 200
            posts = [http.post(COMPLETIONS, json={**ENDLESS, "stream": stream}) for stream in (True, False, True)]
            streamed, whole, _ = await asyncio.gather(*posts)
            last = json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))
            assert last["error"]["type"] == "server_error"
            assert "scripted crash" in last["error"]["message"]
            assert "[DONE]" not in streamed.text
            assert whole.status_code == 503
            assert "scripted crash" in whole.json()["error"]["message"]
            for path in ("/health", "/health/ready"):
                assert (await http.get(path)).status_code == 503
            late = await http.post(COMPLETIONS, json=ENDLESS)
            assert late.status_code == 503

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_request_that_takes_too_long_is_ended():
    made = service(endless(), settings=Settings(request_timeout=0.2))
    response = ask(made, COMPLETIONS, **ENDLESS)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert not made.engine.engine.requests


def test_shutting_down_lets_open_requests_end():
    """A stream that is open when the server is told to stop goes on to its last token."""
    made = service(FakeEngine(lambda request: [50], seconds=0.005))
    server = contextlib.ExitStack()
    url = server.enter_context(serving(made))
    body = {**ENDLESS, "max_tokens": 200, "stream": True}
    with httpx.Client(timeout=30) as http, http.stream("POST", f"{url}{COMPLETIONS}", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        stopping = threading.Thread(target=server.close)
        stopping.start()
        rest = [line.removeprefix("data: ") for line in lines if line]
    stopping.join()
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert not made.engine.healthy


def test_what_outlasts_the_shutdown_gets_an_error(caplog):
    """As the answer, or as the last event of the stream; and nothing of it is a fault in the log."""
    made = service(FakeEngine(lambda request: [50], seconds=0.005, context=10**6), settings=Settings(drain_timeout=0))
    server, answers = contextlib.ExitStack(), {}
    url = server.enter_context(serving(made))

    def ask_for(stream: bool) -> None:
        body = {**ENDLESS, "max_tokens": 10**6, "stream": stream}
        answers[stream] = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60)

    clients = [threading.Thread(target=ask_for, args=(stream,)) for stream in (False, True)]
    for one in clients:
        one.start()
    while len(made.engine.engine.requests) < 2 or not made.engine.engine.steps:
        time.sleep(0.01)
    server.close()
    for one in clients:
        one.join()
    assert answers[False].status_code == 503
    last = answers[True].text.strip().split("\n\n")[-1].removeprefix("data: ")
    for error in (answers[False].json()["error"], json.loads(last)["error"]):
        assert error["message"] == "the server is shutting down"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_drain_refuses_new_requests_and_drops_what_outlasts_it():
    made = service(endless())

    async def run():
        made.engine.start()
        stream = await made.engine.submit(Request("a", [1], SamplingParams(max_tokens=10**6, ignore_eos=True)))
        draining = asyncio.create_task(made.engine.drain(0.2))
        await asyncio.sleep(0.05)
        assert made.engine.healthy
        assert not made.engine.ready
        with pytest.raises(Exception, match="shutting down"):
            await made.engine.submit(Request("b", [1], SamplingParams()))
        with pytest.raises(Exception, match="shutting down"):
            async for update in stream:
                assert update.finish_reason is None
        await draining

    asyncio.run(asyncio.wait_for(run(), 30))


def test_small_messages_are_sent_at_once():
    """With Nagle's algorithm on, every event of a stream would wait for the client's delayed acknowledgement."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # what asyncio looks at before it turns the algorithm off


def test_a_port_in_use_is_one_line():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot listen on no such host"):
        bind("no such host", 80)


def test_api_keys():
    made = service(saying("x"), settings=Settings(api_keys=("alpha", "bêta")))

    async def run():
        async with client(made) as http:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": "Bearer "}, 401),
                ({"Authorization": "Bearer alpha"}, 200),
                ({"Authorization": "Bearer bêta".encode()}, 200),
            ):
                response = await http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
                assert response.status_code == status, headers
            assert response.headers["x-request-id"]
            assert (await http.get("/stats")).status_code == 401
            for path in ("/health", "/health/live", "/health/ready", "/metrics"):
                assert (await http.get(path)).status_code == 200

    asyncio.run(run())


def test_request_ids_and_log_lines(caplog):
    caplog.set_level("INFO", logger="serve.access")
    made = service(saying("one two"))

    async def run():
        async with client(made) as http:
            body = {"messages": [{"role": "user", "content": "x"}], "user": "ann", "metadata": {"k": "v"}}
            named = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "trace-1"})
            drawn = await http.get("/v1/models", headers={"X-Request-Id": "not a plain word\t"})
            return named, drawn

    named, drawn = asyncio.run(run())
    assert named.headers["x-request-id"] == "trace-1"
    assert named.json()["id"] == "chatcmpl-trace-1"
    assert len(drawn.headers["x-request-id"]) == 32
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "serve.access", "request")
    assert (line["request_id"], line["status"], line["user"], line["metadata"]) == ("trace-1", 200, "ann", {"k": "v"})
    assert line["completion_tokens"] == named.json()["usage"]["completion_tokens"]
    assert line["finish_reasons"] == ["stop"]


def test_a_traceback_is_part_of_its_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("serve.engine", logging.ERROR, "", 0, "has %s", ("crashed",), sys.exc_info())
    text = JsonLines().format(record)
    line = json.loads(text)
    assert "\n" not in text and line["message"] == "has crashed" and "ValueError: two\nlines" in line["exception"]


def test_cors_is_off():
    async def run():
        async with client(service(saying("x"))) as http:
            preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
            return await http.options(COMPLETIONS, headers=preflight), await http.get("/v1/models", headers=preflight)

    for response in asyncio.run(run()):
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


def test_limits_of_the_command(monkeypatch):
    given = []
    monkeypatch.setattr("serve.server.run", given.append)
    options = "--api-key a --api-key b --max-body-mb 0.5 --request-timeout 7.5 --drain-timeout 3"
    monkeypatch.setattr(sys, "argv", ["spec", "serve", *options.split()])
    with pytest.raises(SystemExit):
        cli.main()
    assert given[0].host == "127.0.0.1"
    assert given[0].settings == Settings(("a", "b"), max_body=2**19, request_timeout=7.5, drain_timeout=3)


def test_nobody_waits_for_a_search_for_garbage(monkeypatch):
    """What is loaded before the server runs is not looked through while it serves."""
    frozen = []
    monkeypatch.setattr("serve.server.DrainingServer.run", lambda server, sockets: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("serve.server.log_to_stderr", lambda: None)
    assert gc.get_freeze_count() == 0
    run_server(ServeOptions(EngineOptions("m3-tiny", draft=None, device="cpu"), port=0))
    assert frozen[0] > 100_000 and gc.get_freeze_count() == 0


@pytest.mark.slow
def test_sigterm_ends_the_command_with_zero(tmp_path):
    command = [sys.executable, "-c", "from spec.cli import main; main()", "serve", "--draft", "none", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        lines = iter(process.stdout.readline, "")
        url = next(re.search(r"http:\S+/v1", line)[0] for line in lines if line.startswith("serving "))
        with (
            httpx.Client(timeout=60) as http,
            http.stream("POST", f"{url}/completions", json={**ENDLESS, "max_tokens": 300, "stream": True}) as response,
        ):
            rest = response.iter_lines()
            next(rest)
            process.send_signal(signal.SIGTERM)
            assert [line for line in rest if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()

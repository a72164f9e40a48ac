"""LIFECYCLE: aborted clients, blocked event loop, leaked resources.

Report R14: after the client hangs up the server generates on and holds its pages; a later fix aborted requests that had
ended by themselves. Against a real engine with a draft. Also tried, of the same kind: hanging up before the body is
complete, while a prompt is prefilled, while the prompt is still being encoded, in the middle of n answers, of a list of
prompts and of a stream that nobody reads; a reader that is dropped in this process; a stop string that ends a request
early; a crash with streams open; a long text beside short requests.
"""

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
import time

import httpx
import pytest

from serve.answer import Answer
from serve.async_engine import Stream
from serve.request import Request, SamplingParams, Sequence
from serve.service import Settings
from tests.serve.comparison import CHAT, COMPLETIONS, WAYS, Pair
from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import client, serving
from tests.serve.known_target import Following, known_target

TOKENIZER = tokenizer()
LETTERS = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token).isalpha()][:40]
START = TOKENIZER.encode("x")[0]
ENDLESS = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}
# How a client behaves: what it adds to the request, and when it hangs up.
CLIENTS = [
    ({"stream": True}, "chunks"),
    ({"stream": True}, "moment"),
    ({"stream": True}, "at once"),
    ({}, "moment"),
    ({}, "at once"),
    ({"n": 3}, "moment"),
    ({"n": 3, "stream": True}, "chunks"),
    ({"prompt": ["x", "a x", "b x"], "stream": True}, "moment"),
    ({"prompt": [LETTERS[place % 7] for place in range(4000)]}, "moment"),
    ({"prompt": "a" * 9000 + " x", "stream": True}, "at once"),
    ({}, "in the body"),
    ({"stream": True}, "unread"),
]


def until(condition, seconds=30.0):
    """Waits for a condition; only a broken program takes long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


def hang_up(url, body, when):
    """Sends a request by hand and closes the socket."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + (content[:20] if when == "in the body" else content))
        if when == "moment":
            time.sleep(0.02)
        elif when == "unread":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            time.sleep(0.05)
        elif when == "chunks":
            seen = b""
            while seen.count(b"data: ") < 2:
                seen += connection.recv(4096)


def idle(made) -> bool:
    stats = made.engine.stats()
    busy = stats["running"] + stats["waiting"] + stats["open_requests"]
    return not busy and stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_r14_hanging_up_frees_pages_sockets_and_memory(caplog):
    """200 clients hang up in every way beside two that stay; then 50 normal requests answer as usual."""
    following = Following.chain(LETTERS, starts=(START,))
    pair = Pair(known_target(following, max_position=8192), following.script)
    made = pair.service(WAYS[2], max_running=4, pages=4000)
    aborted = []
    abort = made.engine.engine.abort
    made.engine.engine.abort = lambda name: aborted.append(name) or abort(name)
    with serving(made) as url, httpx.Client(base_url=url, timeout=60) as http:
        expected = http.post(COMPLETIONS, json={"prompt": "x", "seed": 1, "max_tokens": 5}).json()["choices"]
        files = len(os.listdir("/proc/self/fd"))
        with contextlib.ExitStack() as staying:
            requests = [http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) for _ in range(2)]
            # Kept: a reader that is dropped closes its connection.
            readers = [staying.enter_context(request).iter_lines() for request in requests]
            assert all(next(reader).startswith("data: ") for reader in readers)
            for turn in range(200):
                body, when = CLIENTS[turn % len(CLIENTS)]
                hang_up(url, {**ENDLESS, **body}, when)
            until(lambda: made.engine.stats()["open_requests"] == 2)
        until(lambda: idle(made))
        assert len(aborted) > 150
        before = len(aborted)
        for _ in range(50):
            answer = http.post(COMPLETIONS, json={"prompt": "x", "seed": 1, "max_tokens": 5}).json()
            assert answer["choices"] == expected
        assert len(aborted) == before  # a request that ended by itself is not aborted as well
        until(lambda: idle(made))
        until(lambda: len(os.listdir("/proc/self/fd")) <= files)
        gc.collect()
        left = [thing for thing in gc.get_objects() if type(thing) in (Sequence, Stream, Answer)]
        assert len(left) <= 3  # the last request's, until the next
        assert sum(made.metrics.requests.values()) == made.metrics.requests["abort"] + 51
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ({"stream": True}, ("at once", "moment", "chunks")),
        ({}, ("at once", "moment")),
        ({"n": 3}, ("moment",)),
    ],
    ids=["stream", "whole", "three"],
)
def test_r14_hanging_up_in_the_queue(body, waits):
    """One request runs at a time, so these are dropped while they wait."""
    made = service(FakeEngine(lambda request: [50], seconds=0.002, running=1, context=10**6))
    fake = made.engine.engine
    with serving(made) as url, httpx.Client(base_url=url, timeout=30) as http:
        with http.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 10**5, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)  # it holds the only place
            for wait in waits * 3:
                hang_up(url, {**ENDLESS, **body}, "moment" if wait == "chunks" else wait)
            until(lambda: len(fake.requests) == 1)
        until(lambda: not fake.requests and idle(made))


def test_r14_stopping_to_read_frees_the_engine():
    """In-process: closing the response early ends the request."""
    made = service(FakeEngine(lambda request: [50], seconds=0.002))

    async def run():
        async with client(made) as http:
            task = asyncio.create_task(http.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 4000}))
            while not made.engine.engine.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            while made.engine.engine.requests:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_r14_a_request_that_has_ended_is_not_aborted():
    """Not even when it ended before anybody read that."""
    made = service(saying("x"))

    async def run():
        made.engine.start()
        stream = await made.engine.submit(Request("a", [1], SamplingParams()))
        await asyncio.to_thread(until, lambda: made.engine.stats()["open_requests"] == 0)
        stream.cancel()
        await made.engine.drain(1)

    asyncio.run(run())
    assert made.engine.engine.aborted == []


def test_r14_a_stop_string_ends_the_request_in_the_engine():
    made = service(saying(LETTERS, end=False, seconds=0.001))

    async def run():
        async with client(made) as http:
            stop = TOKENIZER.decode(LETTERS[2:4])
            response = await http.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 4000, "stop": stop})
            assert response.json()["choices"][0]["finish_reason"] == "stop"
            await asyncio.to_thread(until, lambda: not made.engine.engine.requests)

    asyncio.run(run())
    assert len(made.engine.engine.aborted) == 1


def test_r14_of_several_answers_each_ends_for_itself():
    """A stop string ends one of two; the engine drops it while the other goes on."""

    def script(request):
        return LETTERS if request.choice_index == 0 else LETTERS[20:]

    made = service(FakeEngine(script, seconds=0.002, context=10**6))
    fake = made.engine.engine
    body = {**ENDLESS, "max_tokens": 10**5, "n": 2, "stop": TOKENIZER.decode(LETTERS[2:4]), "stream": True}
    with serving(made) as url, httpx.Client(base_url=url, timeout=30) as http:
        with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            until(lambda: len(fake.aborted) == 1 and len(fake.requests) == 1)
        until(lambda: not fake.requests and idle(made))


def test_r14_a_client_that_does_not_read_is_cut_off():
    """Its answer has been produced, the pages are free; the rest of it is not kept for ever."""
    made = service(FakeEngine(lambda request: [50], context=10**6), settings=Settings(request_timeout=1.0, grace=0.5))
    with serving(made) as url:
        host, port = url.removeprefix("http://").split(":")
        content = json.dumps({**ENDLESS, "max_tokens": 60_000, "logprobs": 20, "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            until(lambda: made.engine.engine.seen)
            until(lambda: sum(made.metrics.requests.values()) == 1)
    assert idle(made)


def test_r14_a_body_that_never_comes_is_not_waited_for():
    made = service(saying("x"), settings=Settings(body_timeout=0.2))
    with serving(made) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
            answer = connection.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 408 ") and "the body did not arrive within 0.2 s" in answer


def test_r14_a_long_text_keeps_nobody_waiting(monkeypatch):
    """While one prompt is being encoded, for as long as this test wants, /health and short requests are answered; and
    when its client hangs up meanwhile, it never reaches the engine."""
    made = service(saying("Hello", context=2**20))
    encode, begun, go_on = TOKENIZER.encode, threading.Event(), threading.Event()

    def slowly(text, **options):
        if len(text) > 2**18:
            begun.set()
            assert go_on.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", slowly)
    with serving(made) as url, httpx.Client(base_url=url, timeout=30) as http:
        long = threading.Thread(target=hang_up, args=(url, {"prompt": "x " * 2**18}, "moment"))
        long.start()
        assert begun.wait(30)
        long.join()
        for _ in range(5):
            assert http.get("/health").status_code == 200
            short = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
            assert short.json()["choices"][0]["message"]["content"] == "Hello"
        go_on.set()
        assert http.post(COMPLETIONS, json={"prompt": "x " * 2**18, "max_tokens": 1}).status_code == 200
        until(lambda: idle(made))
    assert sum(len(request.prompt_ids) > 1000 for request in made.engine.engine.seen) == 1  # the one that stayed

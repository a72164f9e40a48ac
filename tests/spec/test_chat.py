"""`spec chat`: what is printed, what is asked, and what ends an answer but not the conversation."""

import io
import json
import signal
import subprocess
import sys
import time

import httpx
import pytest
from rich.console import Console

import spec.chat
from serve.load import load_engine
from serve.request import SamplingParams
from spec import cli
from spec.chat import STYLES, Piece, Remote, Sampling, converse, printable
from spec.local import Local
from target_model.errors import UserError
from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import serving


def talk(speaker, *lines, color=None):
    """What the terminal shows when a user types these lines."""
    waiting = list(lines)

    def read():
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    console = Console(file=io.StringIO(), width=200, force_terminal=color is not None, color_system=color)
    converse(speaker, console, read)
    return console.file.getvalue()


def test_a_server_is_talked_to():
    made = service(saying("One answer in words 🦙."))
    with serving(made) as url:
        speaker = Remote(url, None, None, Sampling(tokens=40, temperature=0.5, seed=3))
        shown = talk(speaker, "First", "", "Second", "/new", "Third", "/quit", "Fourth")
        assert shown.count("One answer in words 🦙.\n") == 3
        assert f"of {3 * 9} drafted tokens accepted" in shown and "acceptance length" in shown
    first, second, third = made.engine.engine.seen
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "One answer" in tokenizer().decode(second.prompt_ids) and len(third.prompt_ids) == len(first.prompt_ids)
    assert (first.params.max_tokens, first.params.temperature, first.params.seed) == (40, 0.5, 3)


def test_tokens_have_the_colour_of_their_depth():
    class Scripted:
        name = "scripted"

        async def answer(self, messages, turn):
            for depth in (0, 1, 2, 9, 0):
                yield Piece(f"[b]{depth}", depth)
            yield Piece("\x1b[2J", 0)

    shown = talk(Scripted(), "Go", color="truecolor")
    answer = shown[shown.index("ends.") :]
    assert "[b]0" in answer  # markup is text
    for depth, style in ((1, STYLES[1]), (2, STYLES[2]), (9, STYLES[-1])):
        red, green, blue = (int(style[-6:][place : place + 2], 16) for place in (0, 2, 4))
        assert f"48;2;{red};{green};{blue}m[b]{depth}\x1b[0m" in answer
    assert "6 tokens" in answer and "acceptance length 2.50" in answer
    assert "\x1b[2J" not in answer  # only the colours are escape sequences


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no more")])
def test_an_answer_that_ends_early_leaves_the_conversation(error):
    class Stopped:
        name, asked = "stopped", []

        async def answer(self, messages, turn):
            self.asked.append([message["content"] for message in messages])
            if messages[-1]["content"] != "nothing":
                yield Piece("part", 0)
            raise error

    speaker = Stopped()
    shown = talk(speaker, "one", "nothing", "two")
    assert shown.count("part\n") == 2
    assert shown.count("no more" if isinstance(error, UserError) else "stopped\n") >= 3
    assert speaker.asked == [["one"], ["one", "part", "nothing"], ["one", "part", "two"]]


def test_a_server_that_does_not_know_depths(monkeypatch):
    bodies = []

    def answer(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        bodies.append(json.loads(request.content))
        if "draft_tokens" in bodies[-1]:
            return httpx.Response(400, json={"error": {"message": "unknown field draft_tokens"}})
        chunk = {"choices": [{"delta": {"content": "plain"}}]}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(
        spec.chat, "connect", lambda *_: httpx.AsyncClient(transport=transport, base_url="http://other")
    )
    shown = talk(Remote("http://other", None, None, Sampling()), "one", "two")
    assert shown.count("plain\n1 pieces") == 2 and "unknown field" not in shown
    assert ["draft_tokens" in body for body in bodies] == [True, False, False]
    shown = talk(Remote("http://other", None, None, Sampling(thinking="enabled")), "one")
    assert "unknown field" in shown  # thinking that was asked for is not dropped


def test_a_crash_of_the_server_ends_the_answer():
    with serving(service(FakeEngine(lambda request: [50], fail_after=2))) as url:
        shown = talk(Remote(url, None, None, Sampling()), "one")
    assert "the engine has crashed" in shown


def test_a_chunk_that_is_no_chunk_is_one_line(monkeypatch):
    def answer(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        return httpx.Response(200, text='data: {"choices": [1]}\n\ndata: [DONE]\n\n')

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(
        spec.chat, "connect", lambda *_: httpx.AsyncClient(transport=transport, base_url="http://other")
    )
    assert "is not OpenAI's" in talk(Remote("http://other", None, None, Sampling()), "one")


def test_ctrl_c_stops_the_answer_and_nothing_else():
    made = service(FakeEngine(lambda request: [50], seconds=0.01, context=100_000))
    with serving(made) as url:
        command = [sys.executable, "-m", "spec.cli", "chat", "--url", url, "--tokens", "50000"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
            for asked in (1, 2):
                process.stdin.write("Go on\n")
                deadline = time.monotonic() + 60
                while len(made.engine.engine.seen) < asked or not made.engine.engine.steps:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.01)
                time.sleep(0.3)  # some of it is on the screen
                process.send_signal(signal.SIGINT)
                while made.engine.engine.requests:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            out, err = process.communicate("/quit\n", timeout=60)
    assert process.returncode == 0 and err == ""
    assert out.count("\nstopped\n") == 2


def test_the_local_engine_says_what_plain_decoding_says():
    loaded = load_engine("m3-tiny", "eagle3", context=512, max_running=1)
    shown = talk(Local(*loaded, Sampling(tokens=40, temperature=0.0)), "Write a haiku in Python.")
    engine, words, _ = load_engine("m3-tiny", None, context=512, max_running=1)
    prompt = words.render_chat([{"role": "user", "content": "Write a haiku in Python."}], thinking_mode="disabled")
    (plain,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40))
    text = words.decode(plain.token_ids)
    assert f"\n{text}\n{len(plain.token_ids)} tokens" in shown and "drafted tokens accepted" in shown
    assert "try /new" in talk(Local(*loaded, Sampling()), "word " * 600)


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\r\x07\x9b\tc\n") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\tc\n"


def test_the_command(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["spec", "chat", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    with serving(service(saying("An answer."))) as url:
        code, out, _ = call("--url", url)
    assert code == 0 and "An answer.\n" in out
    code, _, err = call("--url", url)
    assert code == 2 and "does not answer" in err
    assert call("--model", "x")[0] == 2 and call("--thinking", "perhaps")[0] == 2

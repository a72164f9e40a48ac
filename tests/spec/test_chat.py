"""`spec chat`: what is printed, what is asked, and what ends an answer but not the conversation."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest
from PIL import Image
from rich.console import Console

import spec.speaker
from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from spec import cli
from spec.attachments import read_picture, read_tools
from spec.chat import STYLES, Conversation, printable
from spec.local import local_server
from spec.speaker import Remote, Sampling
from target_model.errors import UserError
from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import serving


def talk(speaker, *lines, color=None, system=None):
    """What the terminal shows when a user types these lines."""
    waiting = list(lines)

    def read():
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    console = Console(file=io.StringIO(), width=200, force_terminal=color is not None, color_system=color)
    Conversation(speaker, console, read, system).run()
    return console.file.getvalue()


def token(text, depth, **fields):
    """A chunk with one token."""
    return {"choices": [{"delta": {"content": text}, "draft_tokens": [{"text": text, "depth": depth}], **fields}]}


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
                for piece in turn.take(token(f"[b]{depth}", depth)):
                    yield piece
            tree = {"tokens": ["a"] * 6, "parents": [-1, 0, 1, 2, 0, 0], "accepted": [1, 2, 3]}
            for piece in turn.take(token("\x1b[2J", 0, draft_trees=[tree, {**tree, "accepted": []}])):
                yield piece

    shown = talk(Scripted(), "/tree", "Go", "/tree", color="truecolor")
    answer = shown[shown.index("ends.") :]
    assert "[b]0" in answer  # markup is text
    for depth, style in ((1, STYLES[1]), (2, STYLES[2]), (9, STYLES[-1])):
        red, green, blue = (int(style[-6:][place : place + 2], 16) for place in (0, 2, 4))
        assert f"48;2;{red};{green};{blue}m[b]{depth}\x1b[0m" in answer
    assert "6 pieces" in answer and "acceptance length 2.50, 3 of 10 drafted tokens accepted" in answer
    assert "there is no tree yet" in shown
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in answer.splitlines()]
    start = lines.index("'a'")  # the last tree: nothing of it was accepted
    assert lines[start : start + 6] == ["'a'", "├── 'a'", "│   └── 'a'", "│       └── 'a'", "├── 'a'", "└── 'a'"]
    assert "\x1b[2J" not in answer  # only the colours are escape sequences


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no more")])
def test_an_answer_that_ends_early_leaves_the_conversation(error):
    class Stopped:
        name, asked = "stopped", []

        async def answer(self, messages, turn):
            self.asked.append([message["content"] for message in messages])
            if messages[-1]["content"] != "nothing":
                for piece in turn.take(token("part", 0)):
                    yield piece
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
        spec.speaker, "connect", lambda *_: httpx.AsyncClient(transport=transport, base_url="http://other")
    )
    shown = talk(Remote("http://other", None, None, Sampling()), "one", "two")
    assert shown.count("plain\n1 pieces, acceptance n/a") == 2 and "unknown field" not in shown
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
        spec.speaker, "connect", lambda *_: httpx.AsyncClient(transport=transport, base_url="http://other")
    )
    assert "is not OpenAI's" in talk(Remote("http://other", None, None, Sampling()), "one")


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "spec chat has ended"
        assert time.monotonic() < deadline, "spec chat hangs"
        time.sleep(0.01)


def answering(engine, asked):
    return len(engine.seen) == asked and engine.emitted[engine.seen[-1].id] > 20


def test_ctrl_c_stops_the_answer_and_nothing_else():
    engine = FakeEngine(lambda request: [50], seconds=0.01, context=100_000)
    with serving(service(engine)) as url:
        command = [sys.executable, "-m", "spec.cli", "chat", "--url", url, "--tokens", "50000"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
            for asked in (1, 2):
                process.stdin.write("Go on\n")
                wait_for(partial(answering, engine, asked), process)
                process.send_signal(signal.SIGINT)
                wait_for(lambda: not engine.requests, process)
            out, err = process.communicate("/quit\n", timeout=120)
    assert process.returncode == 0 and err == ""
    assert out.count("\nstopped\n") == 2


def test_the_local_engine_says_what_plain_decoding_says():
    loaded = load_engine(EngineOptions("m3-tiny", "eagle3", context=512, max_running=1))
    with local_server(*loaded) as server:
        speaker = Remote(server.url, server.api_key, None, Sampling(tokens=40, temperature=0.0))
        shown = talk(speaker, "Write a haiku in Python.", "word " * 600)
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 401  # only who has the key
    engine, words, _ = load_engine(EngineOptions("m3-tiny", None, context=512, max_running=1))
    prompt = words.render_chat([{"role": "user", "content": "Write a haiku in Python."}], thinking_mode="disabled")
    (plain,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40))
    text = words.decode(plain.token_ids)
    assert f"\n{text}\n{len(plain.token_ids)} tokens" in shown and "acceptance length" in shown
    assert "the context holds 512" in shown
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


def test_a_system_prompt_stays_through_new():
    made = service(saying("Yes."))
    with serving(made) as url:
        talk(Remote(url, None, None, Sampling()), "one", "/new", "two", system="Be kind to llamas.")
    prompts = [tokenizer().decode(request.prompt_ids) for request in made.engine.engine.seen]
    assert len(prompts) == 2 and all("Be kind to llamas." in prompt for prompt in prompts)
    assert "one" not in prompts[1]


def test_reasoning_is_dim():
    with serving(service(saying("First.</mm:think>Then."))) as url:
        shown = talk(Remote(url, None, None, Sampling(thinking="enabled")), "Go", color="truecolor")
    answer = shown[shown.index("ends.") : shown.index(" tokens")]
    runs = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)", answer)
    assert "".join(text for style, text in runs if style.startswith("2;3")) == "First."
    assert "Then" in "".join(text for style, text in runs if not style.startswith("2;3")) + answer.split("\x1b")[-1]


def test_pictures_go_with_the_next_question(tmp_path):
    asked = []

    class Seeing:
        name = "seeing"

        async def answer(self, messages, turn):
            asked.append([message["content"] for message in messages])
            for piece in turn.take(token("A dot.", 0)):
                yield piece

    Image.new("RGB", (3, 3), "red").save(tmp_path / "red dot.png")
    (tmp_path / "text.png").write_text("no picture")
    lines = (f"/image {tmp_path}/red dot.png", "What is it?", f"/image {tmp_path}/text.png", "/image", "And now?")
    shown = talk(Seeing(), *lines, "/imagine", "/etc/hosts is what?")
    part, text = asked[0][0]
    assert part["image_url"]["url"].startswith("data:image/png;base64,") and text == {"type": "text", "text": lines[1]}
    assert asked[1][-1] == "And now?" and asked[1][0] == asked[0][0]
    assert "red dot.png goes with" in shown and "text.png is not a picture" in shown and "cannot be read" in shown
    assert "there is no command /imagine" in shown and asked[2][-1] == "/etc/hosts is what?"
    with pytest.raises(UserError, match="cannot be read"):
        read_picture(str(tmp_path / "nothing.png"))


def test_a_server_that_sees_no_pictures_says_so(tmp_path):
    Image.new("RGB", (3, 3)).save(tmp_path / "dot.png")
    with serving(service(saying("Yes."))) as url:
        shown = talk(Remote(url, None, None, Sampling()), f"/image {tmp_path}/dot.png", "What?", "Well?")
    assert "sees no pictures" in shown and shown.count("Yes.") == 1


NS = "]<]minimax[>["
CALL = f'{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Oslo{NS}</city>{NS}</invoke>\n{NS}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_tools_are_called_and_answered(tmp_path):
    def answers(request):
        text = "Rain." if "wet" in tokenizer().decode(request.prompt_ids) else f"Let me see.{CALL}"
        return [*tokenizer().encode(text, allow_special=True), 2]

    made = service(FakeEngine(answers, runs=(3, 5)))
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    with serving(made) as url:
        speaker = Remote(url, None, None, Sampling(), read_tools(tmp_path / "tools.json"))
        shown = talk(speaker, "How is it?", "wet", "Thanks", "again")
    assert 'Let me see.\nweather({"city": "Oslo"})' in shown and "\nRain.\n" in shown
    assert shown.count("acceptance length") == 4  # also where tokens cannot be told apart
    first, second, third, _ = (tokenizer().decode(request.prompt_ids) for request in made.engine.engine.seen)
    assert "weather" in first and second.count("Oslo") == 1 and third.count("Rain.") == 1
    shown = talk(Silent(), "How is it?")
    assert "no result, so the question is dropped" in shown


def test_a_call_that_the_length_cut_is_not_answered():
    made = service(FakeEngine(lambda request: tokenizer().encode(CALL, allow_special=True), runs=(3, 5)))
    cut = len(tokenizer().encode(CALL, allow_special=True)) - 8
    with serving(made) as url:
        shown = talk(Remote(url, None, None, Sampling(tokens=cut), TOOLS), "How is it?", "Well?")
    assert shown.count("--tokens cut the answer within its calls") == 2 and "result of" not in shown
    assert len(made.engine.engine.seen) == 2


class Silent:
    """Calls a tool that nobody answers."""

    name = "silent"

    async def answer(self, messages, turn):
        call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
        for piece in turn.take({"choices": [{"delta": {"content": "Hm.", "tool_calls": [call]}}]}):
            yield piece


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must hold a list"),
        ("[]", "must hold a list"),
        ('[{"type": "function"}]', "entry 0 has no function with a name"),
        ("[", "is not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_tools_is_one_line(tmp_path, text, message):
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_tools(path)


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\r\x07\x9b\tc\n") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\tc\n"


def test_bytes_that_are_no_text_cost_one_line():
    made = service(saying("An answer."))
    program = "from spec import cli; cli.main()"
    with serving(made) as url:
        command = [sys.executable, "-c", program, "chat", "--url", url]
        done = subprocess.run(command, input=b"caf\xe9\nHi\n", capture_output=True, timeout=60)
        shown = done.stdout.decode()
        assert (done.returncode, done.stderr) == (0, b"")
        assert shown.count("left out: it has bytes that are not UTF-8") == 1 and "An answer.\n" in shown
        refused = subprocess.run([*command, "--system", b"\xff"], input=b"", capture_output=True, timeout=60)
        assert refused.returncode == 2 and refused.stderr.startswith(b"spec: --system")
    assert len(made.engine.engine.seen) == 1


@pytest.mark.parametrize("option", ["--draft", "--tree", "--target", "--device"])
def test_a_server_has_its_own_engine(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["spec", "chat", "--url", "http://127.0.0.1:1", option, "eagle3"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and f"{option} chooses an engine" in capsys.readouterr().err


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

"""The command line as a user meets it: what is imported, what is printed, and the exit code."""

import socket
import subprocess
import sys

import pytest

from spec import __version__
from tests.commands import call

HEAVY = "torch transformers deepspeed datasets wandb fastapi uvicorn matplotlib triton numpy".split()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["bench", "acceptance", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\nfrom spec.cli import main\n"
        f"sys.argv = ['spec', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_version(monkeypatch, capsys):
    assert call(monkeypatch, capsys, "--version") == (0, f"spec {__version__}\n", "")


@pytest.mark.parametrize("command", ["train", "serve", "demo", "doctor", "bench"])
def test_help_names_every_command(monkeypatch, capsys, command):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0 and command in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "trian"),
        (["train", "--tagret", "m3-tiny"], "--tagret"),
        (["train", "optimizer.nope=1", "--plan"], "nope"),
        (["train", "just-a-word", "--plan"], "just-a-word"),
        (["train", "--config", "no-such-recipe", "--plan"], "no-such-recipe"),
        (["train", "--target", "no-such-target", "--plan"], "no-such-target"),
        (["train", "--config", "demo", "--target", "no-such-target", "--plan"], "no-such-target"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--tree", "4,2"], "depth,width,nodes"),
        (["serve", "--dtype", "int3"], "int3"),
        (["serve", "--draft", "none", "--tree", "3,2,6"], "--tree is about"),
        (["serve", "--draft", "none", "--tree-file", "no-such.yaml"], "--tree-file is about"),
        (["serve", "--draft", "none", "--sampling", "rejection"], "--sampling rejection is about"),
        (["serve", "--draft", "none", "--synthetic-acceptance-length", "2"], "--synthetic-acceptance-length is about"),
        (["serve", "--draft", "none", "--draft-dtype", "float32"], "--draft-dtype is about"),
        (["serve", "--draft", "none", "--draft-weights", "mxfp8"], "--draft-weights is about"),
        (["serve", "--draft-weights", "nvfp4"], "unknown draft weights 'nvfp4'"),
        (["serve", "--draft", "none", "--draft-attention", "sparse"], "--draft-attention is about"),
        (["serve", "--device", "gpu"], "gpu"),
        (["serve", "--device", "cuda:99"], "cuda:99"),
        (["serve", "--port", "0", "--draft", "no-such-draft"], "no-such-draft"),
        (["bench", "acceptance", "--suite", "no-such.jsonl"], "no-such.jsonl"),
        (["bench", "acceptance", "--chain", "9..1"], "9..1"),
        (["bench", "acceptance", "--chain", "none", "--tree", "none"], "nothing to measure"),
        (["bench", "acceptance", "--temperature", "warm"], "warm"),
        (["bench", "acceptance", "--temperature", "-1"], "-1"),
        (["bench", "acceptance", "--prompts", "0"], "--prompts"),
        (["bench", "acceptance", "--json", "/dev/null/x.json"], "/dev/null"),
        (["bench", "acceptance", "--json", "/nope/x"], "/nope"),
        (["bench", "acceptance", "--report", "/nope/x"], "/nope"),
        (["bench", "acceptance", "--draft", "none"], "--draft none"),
        (["bench", "compare", "a", "b", "--json", "/nope/x"], "/nope"),
        (["bench", "costs", "--draft", "none"], "--draft none"),
        (["bench", "costs", "--output", "/nope/x"], "/nope"),
        (["bench", "quantization", "--json", "/nope/x"], "/nope"),
        (["bench", "serve", "--json", "/nope/x"], "/nope"),
        (["bench", "train", "--json", "/nope/x"], "/nope"),
        (["tune", "tree", "--draft", "none"], "--draft none"),
        (["tune", "tree", "--output", "/nope/x"], "/nope"),
        (["tune", "tree", "--output", "/"], "is a directory"),
        (["quantize", "m3-tiny", "/nope/x", "--format", "mxfp8"], "/nope"),
        (["quantize", "m3-tiny", "/proc/x", "--format", "mxfp8"], "/proc/x"),
        (["export", "eagle3", "--target", "m3-tiny", "--to", "hf", "--output", "/nope/x"], "/nope"),
        (["import", "draft_model/bundled/m3-tiny-eagle3", "--output", "/nope/x"], "/nope"),
        (["data", "regenerate", "no-such.jsonl", "--output", "/nope/x"], "/nope"),
    ],
)
def test_bad_input_is_named_without_a_traceback(monkeypatch, capsys, arguments, named):
    code, _, err = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert named in err and "Traceback" not in err and len(err.splitlines()) == 1


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = call(monkeypatch, capsys, "serve", "--port", str(port))
    assert code == 2
    assert str(port) in err and "in use" in err and len(err.splitlines()) == 1


def raise_from_demo(monkeypatch, error: BaseException) -> None:
    def run(**settings):
        raise error

    monkeypatch.setattr("spec.demo.run", run)


def test_interrupt_exits_130(monkeypatch, capsys):
    raise_from_demo(monkeypatch, KeyboardInterrupt())
    code, _, err = call(monkeypatch, capsys, "demo")
    assert code == 130 and "Traceback" not in err


@pytest.mark.parametrize("writer", ["python", "torch", "safetensors"])
def test_a_full_disk_is_one_line(monkeypatch, capsys, writer):
    """/dev/full refuses every write as a full disk does. Libraries wrap that error, or only quote it."""
    from safetensors import SafetensorError

    def run(**settings):
        if writer == "safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        try:
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"0")
        except OSError:
            if writer == "torch":
                # What torch.save makes of a disk that fills up in mid-file (text of torch 2.13).
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904
            raise

    monkeypatch.setattr("spec.demo.run", run)
    code, _, err = call(monkeypatch, capsys, "demo")
    assert code == 2
    assert "disk is full" in err and len(err.splitlines()) == 1


def test_a_missing_file_is_named(monkeypatch, capsys):
    raise_from_demo(monkeypatch, FileNotFoundError(2, "No such file or directory", "weights.bin"))
    code, _, err = call(monkeypatch, capsys, "demo")
    assert (code, err) == (2, "spec: weights.bin: No such file or directory\n")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch, capsys):
    raise_from_demo(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        call(monkeypatch, capsys, "demo")

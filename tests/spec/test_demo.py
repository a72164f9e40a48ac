"""The demo: its coloured answer, and the whole of it with a tiny budget."""

import pytest

from spec import cli
from spec.demo import DEPTH_STYLES, coloured


class Bytes:
    """A tokenizer whose token i is the i-th piece."""

    def __init__(self, *pieces: bytes):
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def styles(text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], span.style) for span in text.spans]


def test_tokens_wear_the_colour_of_their_depth():
    text = coloured(Bytes(b"def", b" add", b"("), [0, 1, 2], [0, 1, 2])
    assert styles(text) == [("def", DEPTH_STYLES[0]), (" add", DEPTH_STYLES[1]), ("(", DEPTH_STYLES[2])]


def test_a_character_in_two_tokens_is_shown_whole():
    first, second = "é".encode()[:1], "é".encode()[1:]
    text = coloured(Bytes(b"caf", first, second, b"!"), [0, 1, 2, 3], [0, 1, 2, 0])
    assert text.plain == "café!" and ("é", DEPTH_STYLES[2]) in styles(text)


def test_a_character_that_is_cut_off_does_not_fail():
    assert coloured(Bytes(b"a", "é".encode()[:1]), [0, 1], [0, 1]).plain == "a�"


def test_depths_beyond_the_palette_share_its_last_colour():
    assert styles(coloured(Bytes(b"x"), [0], [99])) == [("x", DEPTH_STYLES[-1])]


@pytest.mark.slow
def test_demo_with_a_tiny_budget(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", "spec demo --steps 2 --prompts 1 --tokens 8".split())
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    out = capsys.readouterr().out
    for name in ("before training", "after training", "bundled"):
        assert name in out
    assert "12 of 12 answers are the same" in out
    assert "spec serve --draft eagle3" in out
    assert (tmp_path / "runs" / "demo" / "draft" / "model.safetensors").is_file()

"""Text while it arrives: whole characters, no beginning of a stop string, the same for every way of cutting a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.detokenize import Detokenizer
from tests.serve.fake_engine import tokenizer

TOKENIZER = tokenizer()
# An accent, CJK, a 4-byte emoji, a joined emoji sequence, a combining mark: 1 to 4 bytes, single-byte tokens included.
TEXT = "naïve 語 🎉 👩‍👩‍👧 e\u0301 end"
BYTE_IDS = {
    TOKENIZER.token_bytes(token): token
    for token in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(token)) == 1
}
IDS = TOKENIZER.encode(TEXT)
BYTEWISE = [BYTE_IDS[bytes([byte])] for byte in TEXT.encode()]
THINK, NS = TOKENIZER.special["<mm:think>"], TOKENIZER.special["]<]minimax[>["]


def pieces(ids, sizes, stop=(), **options):
    """Segments of every push of runs of the given sizes (the last repeats), then of the end, and all starts."""
    detokenizer = Detokenizer(TOKENIZER, stop, **options)
    results, position, turn = [], 0, 0
    while position < len(ids) and detokenizer.stopped is None:
        size = sizes[min(turn, len(sizes) - 1)]
        results.append(detokenizer.push(ids[position : position + size]))
        position, turn = position + size, turn + 1
    results.append(detokenizer.finish())
    return detokenizer, results


def text_of(results):
    return "".join(segment for result in results for segment in result.segments if isinstance(segment, str))


@pytest.mark.parametrize("ids", [IDS, BYTEWISE], ids=["tokens", "bytes"])
@pytest.mark.parametrize("size", range(1, 8))
def test_whole_characters_at_every_border(ids, size):
    for first in range(1, size + 1):
        _, results = pieces(ids, [first, size])
        assert text_of(results) == TEXT
        assert not any("\ufffd" in str(segment) for result in results for segment in result.segments)
        assert sum(len(result.starts) for result in results) == len(ids)


@pytest.mark.parametrize("cut", range(1, len(BYTEWISE) + 1))
def test_a_cut_character_becomes_one_replacement(cut):
    whole = text_of(pieces(BYTEWISE[:cut], [cut])[1])
    assert whole == TEXT.encode()[:cut].decode("utf-8", "replace") == TOKENIZER.decode(BYTEWISE[:cut])
    for size in (1, 3):
        _, results = pieces(BYTEWISE[:cut], [size])
        assert text_of(results) == whole
        assert whole.count("\ufffd") <= 1
        assert "\ufffd" not in text_of(results[:-1])


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.lists(st.integers(1, 6), min_size=1, max_size=5)
)
def test_any_ids_give_the_one_shot_text(ids, sizes):
    _, results = pieces(ids, sizes, show_special=True)
    assert text_of(results) == TOKENIZER.decode(ids)


def simulate(text, stops):
    """The definition: the text up to the first place at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


ALPHABET = st.text("ab🎉", max_size=24)
STOPS = st.lists(st.text("ab🎉", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(ALPHABET, STOPS, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
def test_stop_strings_are_exact(text, stops, sizes, bytewise):
    """Near misses are delivered whole, no beginning of a stop string leaks, and the cut does not depend on the runs."""
    ids = [BYTE_IDS[bytes([byte])] for byte in text.encode()] if bytewise else TOKENIZER.encode(text)
    expected, stopped = simulate(text, stops)
    detokenizer, results = pieces(ids, sizes, stops)
    assert text_of(results) == expected
    assert (detokenizer.stopped is not None) == stopped
    so_far = ""
    for result in results:
        so_far += text_of([result])
        assert expected.startswith(so_far)
    taken = detokenizer.tokens_in
    assert sum(len(result.starts) for result in results) == taken
    if stopped:
        # The last token taken in is the one that completes the stop string.
        assert simulate(TOKENIZER.decode(ids[:taken]), stops)[1]
        assert not simulate(TOKENIZER.decode(ids[: taken - 1]).rstrip("\ufffd"), stops)[1]


def test_nothing_is_held_that_cannot_begin_a_stop_string():
    detokenizer = Detokenizer(TOKENIZER, ["END"])
    assert detokenizer.push(TOKENIZER.encode("hello")).segments == ["hello"]
    held = detokenizer.push(TOKENIZER.encode(" E"))
    assert held.segments == [" "]
    assert held.starts == []
    released = detokenizer.push(TOKENIZER.encode("ND"))
    assert (released.segments, released.stopped) == ([], "END")


def test_a_stop_string_before_min_tokens_does_not_count():
    ids = [BYTE_IDS[bytes([byte])] for byte in b"abcabcabc"]
    for least, expected in ((0, "ab"), (2, "ab"), (3, "abcab"), (5, "abcab"), (6, "abcabcab"), (9, "abcabcabc")):
        assert text_of(pieces(ids, [4], ["c"], min_tokens=least)[1]) == expected


def test_special_tokens_are_segments_and_borders():
    ids = [*TOKENIZER.encode("ST"), THINK, *TOKENIZER.encode("OP"), NS, BYTE_IDS[b"\xf0"], THINK]
    detokenizer, results = pieces(ids, [1], ["STOP"])
    flat = [segment for result in results for segment in result.segments]
    assert detokenizer.stopped is None
    assert [segment for segment in flat if isinstance(segment, int)] == [THINK, NS, THINK]
    assert text_of(results) == "STOP\ufffd"


def test_shown_special_tokens_are_text():
    ids = [*TOKENIZER.encode("a"), THINK, *TOKENIZER.encode("b")]
    assert text_of(pieces(ids, [2], show_special=True)[1]) == "a<mm:think>b"


def test_starts_are_places_in_the_text():
    ids = TOKENIZER.encode("one 語 two")
    _, results = pieces(ids, [2], ["never"])
    starts = [start for result in results for start in result.starts]
    expected, text = [], ""
    for taken in range(1, len(ids) + 1):
        expected.append(len(text))
        text = TOKENIZER.decode(ids[:taken]).rstrip("\ufffd")
    assert starts == expected

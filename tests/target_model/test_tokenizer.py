"""Text to ids and back; what messages say never becomes a special token."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from target_model.chat import TextGuard
from target_model.errors import UserError
from target_model.resolve import BUNDLED
from target_model.tokenizer import load_tokenizer

DIRECTORY = BUNDLED / "m3-tiny"
TOKENIZER = load_tokenizer(DIRECTORY)
REFERENCE = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
SPECIAL = list(TOKENIZER.special)
# Pieces whose joins complete special tokens, next to characters of one to four bytes.
PIECES = st.sampled_from(
    [*SPECIAL, "]~", "b]", "[e", "~[", "]<]minimax[>", "[>[", "<mm:", "think>", "a", " b", "\n", "é", "語", "🎉"]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=8).map("".join), st.text(max_size=20))


@given(TEXTS)
def test_plain_text_round_trips_and_holds_no_special_token(text):
    ids = TOKENIZER.encode(text)
    assert not set(ids) & TOKENIZER.special_ids
    assert TOKENIZER.decode(ids) == text


@given(st.text(max_size=30))
def test_ids_are_those_of_the_tokenizers_library(text):
    assert TOKENIZER.encode(text) == REFERENCE.encode(text, add_special_tokens=False).ids


@given(st.lists(st.sampled_from([*SPECIAL, "one", " two\n"]), max_size=6).map("".join))
def test_special_text_is_special_on_request(text):
    assert TOKENIZER.encode(text, allow_special=True) == REFERENCE.encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12))
def test_any_ids_decode_like_the_tokenizers_library(ids):
    assert TOKENIZER.decode(ids) == REFERENCE.decode(ids, skip_special_tokens=False)


@given(
    st.lists(TEXTS, min_size=1, max_size=4), st.lists(st.sampled_from(["", "]", "[e~[", "<", "]~b]user\n"]), min_size=5)
)
def test_guarded_texts_never_form_a_special_token_with_their_surroundings(texts, between):
    """Whatever stands beside a text, the special tokens of the whole are those of the surroundings."""
    guard = TextGuard(TOKENIZER.special)
    closed = guard.close_messages([{"role": "user", "content": text} for text in texts])
    whole = between[0] + "".join(m["content"] + after for m, after in zip(closed, between[1:], strict=False))
    expected = [piece for text in between[: len(texts) + 1] for piece in TOKENIZER._splitter.split(text)[1::2]]
    assert TOKENIZER._splitter.split(whole)[1::2] == expected
    assert [guard.open(m["content"]) for m in closed] == texts


def test_a_noncharacter_in_a_text_survives():
    text = "\ufdd0\ufdd1 \ufdd0\ufdd2 \ufdd0]~b]\ufdd0"
    ids = TOKENIZER.render_chat([{"role": "user", "content": text}])
    assert f"user\n{text}[e~[" in TOKENIZER.decode(ids)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UserError, match="surrogate"):
        TOKENIZER.encode("a\ud800b")


def test_padding_ids_of_the_model_are_empty():
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5]) == ""


@pytest.fixture
def checkpoint(tmp_path):
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((DIRECTORY / name).read_bytes())
    return tmp_path


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint):
    edit(checkpoint / "config.json", lambda config: config["text_config"].update(vocab_size=4095))
    with pytest.raises(UserError, match=r"4096 ids.*vocab_size is 4095"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", "{", "tokenizer.json: not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("generation_config.json", "[", "generation_config.json: not valid JSON"),
    ],
)
def test_a_broken_file_is_named(checkpoint, name, content, message):
    (checkpoint / name).unlink() if content is None else (checkpoint / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(checkpoint)


def test_a_tokenizer_that_is_not_byte_level_is_refused(checkpoint):
    edit(checkpoint / "tokenizer.json", lambda values: values["model"]["vocab"].update({"▁word": 3000}))
    with pytest.raises(UserError, match="not byte-level"):
        load_tokenizer(checkpoint)


def test_the_checkpoints_own_template_is_used_only_when_it_is_full(checkpoint):
    packaged = load_tokenizer(checkpoint).template
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load_tokenizer(checkpoint).template == packaged
    (checkpoint / "chat_template.jinja").write_text("{{ tools }}{{ messages[0]['content'] }}")
    assert load_tokenizer(checkpoint).template.startswith("{{ tools }}")
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ tools }} of old"}))
    assert load_tokenizer(checkpoint).template == "{{ tools }} of old"


def test_several_end_tokens(checkpoint):
    edit(checkpoint / "generation_config.json", lambda values: values.update(eos_token_id=[2, 0]))
    assert load_tokenizer(checkpoint).eos_ids == (2, 0)


def test_the_bundled_template_is_the_packages():
    assert (DIRECTORY / "chat_template.jinja").read_text() == (BUNDLED.parent / "chat_template.jinja").read_text()

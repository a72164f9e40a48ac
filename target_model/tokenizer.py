"""Text to token ids and back, and conversations to prompts and training rows.

The encoder is the checkpoint's byte-level BPE (tokenizer.json). Text is encoded without special tokens unless the
caller asks; in a rendered conversation only the template's own words become special tokens, whatever the messages
contain.
"""

import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from target_model.chat import THINKING_MODES, TextGuard, normalise_messages, normalise_tools
from target_model.errors import UserError

ThinkingMode = Literal["enabled", "disabled", "adaptive"]
TURN_START = "]~b]"


class Tokenizer:
    """Encoder, decoder and chat template of one checkpoint.

    vocab_size counts the ids the tokenizer knows; the model's may be larger. eos_ids end an answer; the first one is
    the template's end-of-turn token. special maps the text of each added token to its id.
    """

    def __init__(self, definition: dict[str, Any], *, eos_ids: tuple[int, ...], template: str):
        added = definition["added_tokens"] or []
        self.special: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_ids = frozenset(self.special.values())
        self.eos_ids = eos_ids
        self.template = template
        # Without its added tokens the encoder cannot produce one, whatever the text.
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": []}))
        self._bytes = _token_bytes(definition)
        self.vocab_size = len(self._bytes)
        self.longest_token = max(map(len, self._bytes))
        longest_first = sorted(self.special, key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self.special else None
        self._guard = TextGuard(self.special)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of a text. With `allow_special` the text of a special token becomes that token."""
        if allow_special:
            return self._encode_rendered(text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("text holds half of a surrogate pair, which UTF-8 cannot carry") from None
        # The batch call, unlike the one for a single text, lets other threads run; the fast one skips offsets.
        return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of all the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; none for the unused ids with which a model pads its vocabulary."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def render_chat(
        self,
        messages: list[Mapping[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
        thinking_mode: ThinkingMode = "disabled",
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Prompt ids of a conversation; thinking_mode decides how the answer opens."""
        if thinking_mode not in THINKING_MODES:
            raise UserError(
                f"thinking_mode: unknown mode {thinking_mode!r}, must be one of {', '.join(THINKING_MODES)}"
            )
        guarded, tools = self._guarded(messages, tools)
        return self._encode_rendered(self._render(guarded, tools, thinking_mode, add_generation_prompt))

    def render_training(
        self,
        messages: list[Mapping[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
        thinking_mode: ThinkingMode | Literal["auto"] = "auto",
        last_turn_only: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and which of them the model has to produce.

        For every assistant turn (or only the last) the mask covers the reasoning the template keeps, the answer, its
        tool calls and the end-of-turn token. The ids before them equal `render_chat` of the messages so far in the
        same mode. "auto" takes the mode each turn was written in: enabled where it has reasoning, else disabled. A
        conversation in which the server's prompt is not what precedes an answer is refused with a UserError that says
        so, as is one without an assistant turn, and one with images: training has no features to put in their place.
        """
        guarded, tools = self._guarded(messages, tools)
        for index, message in enumerate(guarded):
            content = message["content"]
            if isinstance(content, list) and any(part["type"] == "image" for part in content):
                raise UserError(f"messages[{index}]: shows an image, and training has no features of images")
        turns = [index for index, message in enumerate(guarded) if message["role"] == "assistant"]
        if not turns:
            raise UserError("messages: no assistant turn to learn from")
        whole = self._render(guarded, tools, "disabled", add_generation_prompt=False)
        end_of_turn = self._end_of_turn()
        token_ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for index in turns[-1:] if last_turn_only else turns:
            start = self._answer_start(whole, guarded, tools, index, thinking_mode)
            end = whole.index(end_of_turn, start) + len(end_of_turn)
            for piece, produced in ((whole[position:start], False), (whole[start:end], True)):
                ids = self._encode_rendered(piece)
                token_ids += ids
                mask += [produced] * len(ids)
            position = end
        tail = self._encode_rendered(whole[position:])
        return token_ids + tail, mask + [False] * len(tail)

    def _answer_start(self, whole: str, guarded: list[dict], tools: list[dict], index: int, thinking_mode: str) -> int:
        """Length of the prompt the server builds for assistant turn `index`; the conversation must begin with it."""
        modes: tuple[str, ...] = (thinking_mode,)
        if thinking_mode == "auto":
            modes = ("enabled", "disabled") if guarded[index]["reasoning_content"] else ("disabled",)
        for mode in modes:
            prompt = self._render(guarded[:index], tools, mode, add_generation_prompt=True)
            if whole.startswith(prompt):
                return len(prompt)
        reason = "has reasoning" if guarded[index]["reasoning_content"] else "has no reasoning"
        raise UserError(f"messages[{index}]: {reason}, which no prompt with thinking_mode {thinking_mode} leads to")

    def _end_of_turn(self) -> str:
        for text, token_id in self.special.items():
            if token_id == self.eos_ids[0]:
                return text
        raise UserError(f"the tokenizer has no special token with the end-of-text id {self.eos_ids[0]}")

    def _guarded(self, messages: list, tools: list | None) -> tuple[list[dict], list[dict]]:
        guarded = self._guard.close_messages(normalise_messages(messages))
        return guarded, self._guard.close_tools(normalise_tools(tools))

    def _render(self, guarded: list[dict], tools: list[dict], thinking_mode: str, add_generation_prompt: bool) -> str:
        """Rendered text, still guarded."""
        if TURN_START not in self.special:
            raise UserError(f"the tokenizer has no token {TURN_START!r}, which the chat format needs")
        try:
            texts, _ = render_jinja_template(
                [guarded],
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                thinking_mode=thinking_mode,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"messages: the chat template refuses them: {error}") from None
        return texts[0]

    def _encode_rendered(self, text: str) -> list[int]:
        if self._splitter is None:
            return self.encode(self._guard.open(text))
        token_ids: list[int] = []
        # Splitting by a group leaves plain text at even places and special tokens at odd ones.
        for index, piece in enumerate(self._splitter.split(text)):
            if index % 2:
                token_ids.append(self.special[piece])
            elif piece:
                token_ids += self.encode(self._guard.open(piece))
        return token_ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads tokenizer.json and the end-of-text ids of a checkpoint directory.

    The chat template is the checkpoint's where it can render tools, else the one of this package. UserError for a
    missing or broken file, a tokenizer that is not byte-level, or one with more ids than the model has rows.
    """
    directory = Path(path)
    definition = _read_json(directory / "tokenizer.json")
    config = _read_json(directory / "config.json")
    eos_ids = _eos_ids(directory, config)
    try:
        tokenizer = Tokenizer(definition, eos_ids=eos_ids, template=_template(directory))
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / 'tokenizer.json'}: not a tokenizer of the expected form ({error})") from None
    model_size = config.get("text_config", config)["vocab_size"]
    if tokenizer.vocab_size > model_size:
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {model_size}: "
            "they do not belong together"
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def _eos_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    for source in (_read_json(generation) if generation.exists() else {}, config, config.get("text_config", {})):
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    raise UserError(f"{directory}: neither generation_config.json nor config.json names an eos_token_id")


def _template(directory: Path) -> str:
    """The checkpoint's own template, from either of its two places, if it knows tools; else the package's."""
    own, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    text = own.read_text(encoding="utf-8") if own.exists() else None
    if text is None and settings.exists():
        text = _read_json(settings).get("chat_template")
    if isinstance(text, str) and "tools" in text:
        return text
    return resources.files("target_model").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _token_bytes(definition: dict[str, Any]) -> list[bytes]:
    """Bytes of every id. Byte-level BPE writes each byte as one printable character."""
    vocabulary = definition["model"]["vocab"]
    table = {character: byte for byte, character in enumerate(_byte_characters())}
    tokens = {token["content"] for token in definition["added_tokens"] or []}
    size = 1 + max([*vocabulary.values(), *(token["id"] for token in definition["added_tokens"] or [])])
    result = [b""] * size
    for text, token_id in vocabulary.items():
        if text in tokens:
            continue
        try:
            result[token_id] = bytes(table[character] for character in text)
        except KeyError:
            raise UserError(
                f"tokenizer.json: token {text!r} is not byte-level; only byte-level BPE is supported"
            ) from None
    for token in definition["added_tokens"] or []:
        result[token["id"]] = token["content"].encode("utf-8")
    return result


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, shifted = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(shifted))
            shifted += 1
    return characters

"""`spec chat`: a conversation in the terminal, every token coloured by its depth in the draft tree."""

import asyncio
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from spec.attachments import read_picture
from spec.speaker import Message, Speaker, Turn
from target_model.errors import UserError

# Tokens of the target's own, then of depth 1, 2, ... in the tree; the last one also for all that are deeper.
STYLES = ("", "black on #c9f0d8", "black on #a5e3bf", "black on #7fd4a4", "black on #58c389", "black on #33b06e")
HELP = (
    "Ctrl-C stops an answer; /tree draws its last draft tree; /image PATH shows a picture with the next question; "
    "/new begins another conversation; /quit or Ctrl-D ends."
)


class Conversation:
    """Questions from `read`, one a line, and their answers on the console."""

    def __init__(self, speaker: Speaker, console: Console, read: Callable[[], str] = input, system: str | None = None):
        self._speaker, self._console, self._read = speaker, console, read
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._pictures: list[dict[str, Any]] = []
        self._tree: dict[str, Any] | None = None

    def run(self, settings: tuple[str, ...] = ()) -> None:
        """Until `read` raises EOFError. An error ends its answer, not the talk."""
        self._console.print(_legend(self._speaker.name))
        for line in (*settings, HELP):
            self._say(line)
        while True:
            try:
                text = self._ask("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if text == "/quit":
                return
            if text:
                self._take(text)

    def _take(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if command == "/new":
            self._messages, self._pictures = list(self._start), []
            self._say("a new conversation")
        elif command == "/tree":
            self._console.print(drawn(self._tree) if self._tree else "there is no tree yet", style="dim")
        elif command == "/image":
            self._add_picture(rest.strip())
        elif command.startswith("/") and command.count("/") == 1 and command[1:].isalpha():
            self._say(f"there is no command {command}: {HELP}", "red")
        else:
            self._answer(text)

    def _add_picture(self, path: str) -> None:
        try:
            self._pictures.append(read_picture(path))
        except UserError as error:
            self._say(str(error), "red")
        else:
            self._say(f"{path} goes with the next question")

    def _answer(self, text: str) -> None:
        """Asks, with tool calls as often as the model makes some. The conversation keeps what was answered, and not
        a question that was not."""
        content = [*self._pictures, {"type": "text", "text": text}] if self._pictures else text
        self._pictures = []
        messages = [*self._messages, {"role": "user", "content": content}]
        while True:
            turn = Turn()
            problem = self._listen(messages, turn)
            if problem is not None and turn.calls:
                return  # half a call cannot be repeated
            if not turn.calls:
                if turn.text:
                    self._messages = [*messages, turn.message()]
                return
            results = self._results(turn.calls)
            if results is None:
                return
            messages = [*messages, turn.message(), *results]

    def _listen(self, messages: list[Message], turn: Turn) -> str | None:
        """Prints an answer as it comes, and what ended it early."""

        async def listen() -> None:
            async for piece in self._speaker.answer(messages, turn):
                style = Style.parse(STYLES[min(piece.depth or 0, len(STYLES) - 1)])
                style += Style(dim=piece.reasoning, italic=piece.reasoning)
                self._console.print(Text(printable(piece.text), style), end="", soft_wrap=True)

        problem = None
        try:
            asyncio.run(listen())
        except KeyboardInterrupt:
            problem = "stopped"
        except UserError as error:
            problem = str(error)
        if problem is None and turn.calls and turn.cut:
            problem = "--tokens cut the answer within its calls, so the question is dropped"
        self._console.print()
        self._tree = turn.tree
        for call in turn.calls:
            self._say(printable(f"{call['function']['name']}({call['function']['arguments']})"), "bold cyan")
        if turn.times:
            self._say(turn.line())
        if problem is not None:
            self._say(problem, "red")
        return problem

    def _results(self, calls: list[dict[str, Any]]) -> list[Message] | None:
        """What the user says that each call returned; None when they do not."""
        results = []
        try:
            for call in calls:
                result = self._ask(f"result of {call['function']['name']}: ")
                results.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            self._say("no result, so the question is dropped", "red")
            return None
        return results

    def _ask(self, prompt: str) -> str:
        while True:
            if sys.stdin.isatty():
                self._console.print(printable(prompt), style="bold", end="", highlight=False, markup=False)
            line = self._read()
            if encodable(line):
                return line
            self._say("this line was left out: it has bytes that are not UTF-8", "red")

    def _say(self, line: str, style: str = "dim") -> None:
        self._console.print(line, style=style, highlight=False, markup=False)


def drawn(tree: dict[str, Any]) -> Tree:
    """A verified tree as `draft_trees` has it; accepted nodes have the colour of their depth."""
    branches: list[Tree] = []
    depths: list[int] = []
    for node, (token, parent) in enumerate(zip(tree["tokens"], tree["parents"], strict=True)):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        style = STYLES[min(depths[node], len(STYLES) - 1)] if node in tree["accepted"] else ""
        label = Text(printable(repr(token)), style)
        branches.append(Tree(label) if parent < 0 else branches[parent].add(label))
    return branches[0]


def encodable(text: str) -> bool:
    """Whether a text can be sent: bytes that are not UTF-8 come from the terminal as lone surrogates, which cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def printable(text: str) -> str:
    """Without control characters, with which an answer could take over the terminal."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _legend(name: str) -> Text:
    text = Text.assemble((name, "bold"), "   plain: the target's own; coloured: drafted and accepted, at depth ")
    for depth, style in enumerate(STYLES[1:], 1):
        text.append(f" {depth}{'+' if depth == len(STYLES) - 1 else ''} ", style)
    return text

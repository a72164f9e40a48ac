"""What kind of token each one of an answer is."""

from collections.abc import Sequence

from target_model.tokenizer import Tokenizer

PLACES = ("code", "prose")
KINDS = ("whitespace", "digits", "names", "words", "symbols", "special")
FENCE = b"```"


def kinds(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[tuple[str, str]]:
    """For each token its place (inside a fenced block or not) and its kind.

    Names are identifiers with an underscore or a capital inside, in code every word, in prose those with a capital.
    """
    special, result, text = set(tokenizer.special.values()), [], b""
    for token in token_ids:
        piece = b"" if token in special else tokenizer.token_bytes(token)
        place = "code" if text.count(FENCE) % 2 else "prose"
        result.append((place, "special" if token in special else _kind(piece, place)))
        text += piece
    return result


def _kind(piece: bytes, place: str) -> str:
    word = piece.decode("utf-8", errors="replace").strip()
    if not word:
        return "whitespace"
    if any(c.isdigit() for c in word) and not any(c.isalpha() for c in word):
        return "digits"
    if not any(c.isalpha() for c in word):
        return "symbols"
    return "names" if place == "code" or "_" in word or any(c.isupper() for c in word) else "words"

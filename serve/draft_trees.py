"""The trees that an answer was verified with: the field `draft_trees` of stream chunks."""

from typing import Any

from serve.tree import Verified
from target_model.tokenizer import Tokenizer


def tree_json(verified: Verified, tokenizer: Tokenizer) -> dict[str, Any]:
    """{"tokens", "parents", "accepted"}: the text of each node, and its parent among them, which comes first.

    Node 0 is the root, the last token decided before the step; its parent is -1. `accepted` are the nodes below it that
    became part of the answer, in order. A token that is part of a character shows as U+FFFD.
    """
    tree = verified.tree
    texts = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tree.tokens]
    return {"tokens": texts, "parents": list(tree.parents), "accepted": list(verified.path)}

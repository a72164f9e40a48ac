"""A closer look at a recorded run: where the guesses are right, what is missed, what other trees would give.

Three figures for a group of positions: `first`, the share where the draft's best guess is the target's token; `among`,
where the token is one of the recorded best; `chain`, the mean number of tokens that a chain from there would accept.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.tree import TreeConfig
from spec.bench.recording import Recording
from spec.bench.replay import acceptance, best_static_tree, oracle, walk
from spec.bench.token_types import KINDS, PLACES, kinds
from target_model.tokenizer import Tokenizer

POSITIONS = (0, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 64, 128, 256, 512, 1024, 4096, 16_384, 65_536)
ENTROPIES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0)
MOST_MISSED = 20
BUDGETS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 63)
WIDTHS = (2, 4, 8, 16)


def breakdown(recording: Recording, tokenizer: Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """The three figures by group, and the tokens that are missed most often."""
    places = [place for text in recording.texts for place in range(text.positions)]
    contexts = [text.prompt_length + place for text in recording.texts for place in range(text.positions)]
    types = [pair for text in recording.texts for pair in kinds(tokenizer, text.tokens)[1:]]
    categories = [
        f"{text.suite}: {text.category}" if text.category else text.suite
        for text in recording.texts
        for _ in range(text.positions)
    ]
    turns = [f"turn {text.turn}" for text in recording.texts for _ in range(text.positions)]
    figures = _figures(recording)
    by_type = [
        *_grouped(figures, [place for place, _ in types], PLACES),
        *_grouped(figures, [kind for _, kind in types], KINDS),
    ]
    return {
        "category": _grouped(figures, categories, tuple(dict.fromkeys(categories))),
        "turn": _grouped(figures, turns, tuple(dict.fromkeys(turns))),
        "position": _binned(figures, places, POSITIONS),
        "token type": by_type,
        "context": _binned(figures, contexts, CONTEXTS),
        "entropy": _binned(figures, recording.entropy, ENTROPIES),
        "missed": _missed(recording, tokenizer),
    }


def _figures(recording: Recording) -> np.ndarray:
    """[n, 3]: first, among, chain."""
    rank = recording.rank
    return np.stack([rank[:, 0] == 0, rank[:, 0] >= 0, (rank == 0).cumprod(1).sum(1)], 1).astype(float)


def _grouped(figures: np.ndarray, names: Sequence[str], order: Sequence[str]) -> list[dict[str, Any]]:
    names = np.array(names)
    rows = []
    for name in order:
        chosen = figures[names == name]
        if len(chosen):
            first, among, chain = (round(float(value), 4) for value in chosen.mean(0))
            rows.append({"group": name, "tokens": len(chosen), "first": first, "among": among, "chain": chain})
    return rows


def _binned(figures: np.ndarray, values: Sequence[float], edges: Sequence[float]) -> list[dict[str, Any]]:
    labels = [f"{low:g} to {high:g}" for low, high in zip(edges, edges[1:], strict=False)] + [f"from {edges[-1]:g}"]
    bins = np.searchsorted(edges, values, side="right") - 1
    return _grouped(figures, [labels[place] for place in np.clip(bins, 0, None)], labels)


def _missed(recording: Recording, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Tokens of the target that the best guess was not, most often first, and what was guessed instead."""
    seen: Counter[int] = Counter()
    instead: dict[int, Counter[int]] = defaultdict(Counter)
    tokens = [token for text in recording.texts for token in text.tokens[1:]]
    for token, guess, rank in zip(tokens, recording.guess.tolist(), recording.rank[:, 0].tolist(), strict=True):
        seen[token] += 1
        if rank != 0 and guess >= 0:
            instead[token][guess] += 1
    worst = sorted(instead, key=lambda token: (-instead[token].total(), token))[:MOST_MISSED]
    return [
        {
            "token": tokenizer.decode([token]),
            "missed": instead[token].total(),
            "seen": seen[token],
            "guessed": tokenizer.decode([instead[token].most_common(1)[0][0]]),
        }
        for token in worst
    ]


def budgets(recording: Recording) -> list[dict[str, Any]]:
    """AL by drafted nodes, replayed: of a chain, of the best static and the best dynamic tree of that many nodes, and
    of chains that an oracle leads through the draft's 2, 3, ... best tokens. A chain of more than the recorded depth is
    not known.
    """
    rows = []
    for budget in BUDGETS:
        row: dict[str, Any] = {"nodes": budget}
        if budget <= recording.depth:
            row["chain"] = acceptance(recording, TreeConfig.chain(budget)).length
            for width in (2, 3, recording.width):
                row[f"oracle {width}"] = walk(recording, oracle(recording, width, budget), budget).length
        static = best_static_tree(recording, budget + 1, recording.depth)
        row["static"] = acceptance(recording, static).length
        lengths = {shape: acceptance(recording, shape).length for shape in dynamic_shapes(recording, budget + 1)}
        best = max(lengths, key=lambda shape: lengths[shape] or 0.0)
        rows.append(row | {"dynamic": lengths[best], "dynamic tree": f"{best.depth},{best.width},{best.nodes}"})
    return rows


def dynamic_shapes(recording: Recording, nodes: int) -> list[TreeConfig]:
    """Dynamic trees of this many nodes that the recorded one can hold and that differ in what they verify."""
    shapes = []
    for depth in range(1, min(recording.depth, nodes - 1) + 1):
        for width in (1, *WIDTHS):
            candidates = width + (depth - 1) * width**2
            if width <= recording.width and candidates >= nodes - 1 and width * (depth - 1) <= 64:
                shapes.append(TreeConfig(depth, width, nodes))
    return shapes or [TreeConfig.chain(nodes - 1)]


def replayed(recording: Recording, shapes: Sequence[TreeConfig]) -> dict[TreeConfig, float | None]:
    """AL of each shape that the recorded tree can hold."""
    known = [shape for shape in shapes if shape.depth <= recording.depth and shape.width <= recording.width]
    return {shape: acceptance(recording, shape).length for shape in known}

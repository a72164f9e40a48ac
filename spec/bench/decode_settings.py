"""What `spec bench decode` is asked to measure, read from its options.

With random weights acceptance is decreed (`serve/synthetic.py`): for chains the AL of MiniMax-M3's published draft
(coding prompts, thinking on, T = 1: `published.json`; 2.83 at k = 3), for trees that of the chain of their depth
times TREE_GAIN. A quantised, pruned or sparsely attending draft is given the same AL: what it costs is measured on real
pairs.
"""

from dataclasses import dataclass

from draft_model.quantised import draft_format
from serve.tree import TreeConfig
from spec.bench.acceptance import parse_shapes
from spec.bench.compare import published
from target_model.dummy import DummyWeights
from target_model.errors import UserError

# AL of these trees over that of the chain of their depth: m3-tiny and its bundled draft, 30 prompts of MT-Bench,
# greedy, where a chain of 3 has an AL of 2.85.
TREE_GAIN = {"3,2,6": 1.08, "5,4,24": 1.25, "8,4,32": 1.29}


@dataclass(frozen=True)
class Shape:
    """A chain or tree, and the AL that is decreed for it; None: what the target accepts."""

    tree: TreeConfig
    length: float | None


@dataclass(frozen=True)
class Variant:
    """What may be changed in a draft: its weights ("none": as loaded, or a format), its vocabulary (None: whole) and
    its attention.
    """

    weights: str = "none"
    vocab: int | None = None
    attention: str = "full"

    def __str__(self) -> str:
        """As options of the command line; nothing for a draft as it is."""
        words = [] if self.weights == "none" else [f"--draft-weights {self.weights}"]
        words += [] if self.vocab is None else [f"--draft-vocab {self.vocab}"]
        words += [] if self.attention == "full" else [f"--draft-attention {self.attention}"]
        return " ".join(words)

    @property
    def short(self) -> str:
        """For narrow tables: "mxfp4 32768 sparse"."""
        changed = (self.weights != "none" and self.weights, self.vocab, self.attention != "full" and self.attention)
        return " ".join(str(each) for each in changed if each) or "draft as it is"


@dataclass(frozen=True)
class Settings:
    """See `spec bench decode --help`. context: None for prompts as they are, with real weights."""

    target: str
    draft: str
    dummy: DummyWeights | None
    shapes: tuple[Shape, ...]
    variants: tuple[Variant, ...]
    batches: tuple[int, ...]
    context: int | None
    temperature: float
    steps: int
    device: str


def parse_variants(weights: str, vocabularies: str, attentions: str, synthetic: bool) -> tuple[Variant, ...]:
    """From comma separated lists. The first of each is the base; every other one is measured alone, then the last of
    each together.
    """
    kinds = [text.split(",") for text in (weights, vocabularies, attentions)]
    for name in kinds[0]:
        draft_format(name)  # refuses unknown ones
    sizes = [_vocabulary(text) for text in kinds[1]]
    if not synthetic and sizes != [None]:
        raise UserError("--draft-vocab is for --dummy-weights: a draft that is loaded has the vocabulary that it has")
    options = (kinds[0], sizes, kinds[2])
    base = tuple(each[0] for each in options)
    found = [base]
    for place, values in enumerate(options):
        found += [(*base[:place], value, *base[place + 1 :]) for value in values]
    found.append(tuple(each[-1] for each in options))
    return tuple(Variant(*each) for each in dict.fromkeys(found))


def parse_decode_shapes(chain: str, trees: list[str], synthetic: bool) -> tuple[Shape, ...]:
    """Chains as `parse_shapes` reads them, or none; trees as "depth,width,nodes" or, where acceptance is decreed,
    "depth,width,nodes=AL".
    """
    curve = next(each["AL"] for each in published()["curves"] if each["name"] == "thinking on")
    shapes = []
    for tree in parse_shapes(chain, ["none"]) if chain != "none" else ():
        if synthetic and tree.depth > len(curve):
            raise UserError(f"--chain: the AL of a chain of {tree.depth} is not known, {len(curve)} is the longest")
        shapes.append(Shape(tree, curve[tree.depth - 1] if synthetic else None))
    for text in trees if trees != ["none"] else ():
        name, given, length = text.partition("=")
        tree = TreeConfig.parse(name)
        if given and not synthetic:
            raise UserError(f"--tree {text}: with real weights the acceptance length is measured")
        if given:
            shapes.append(Shape(tree, _number(text, length)))
        elif not synthetic:
            shapes.append(Shape(tree, None))
        elif name in TREE_GAIN:
            shapes.append(Shape(tree, round(curve[tree.depth - 1] * TREE_GAIN[name], 2)))
        else:
            raise UserError(f"--tree {text}: its AL is not known, give one, for example {name}=3.1")
    if not shapes:
        raise UserError("nothing to measure: --chain is none and there is no --tree")
    return tuple(dict.fromkeys(shapes))


def _vocabulary(text: str) -> int | None:
    if text != "full" and not (text.isdecimal() and int(text)):
        raise UserError(f"--draft-vocab must be full or a number of tokens, got {text!r}")
    return None if text == "full" else int(text)


def _number(text: str, length: str) -> float:
    try:
        return float(length)
    except ValueError:
        raise UserError(f"--tree {text}: the AL behind = must be a number") from None

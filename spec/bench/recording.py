"""A recorded run: at every position of the target's own answers, what the draft would have proposed.

The draft's tree grows from the decided tokens alone, so it is a function of the position, not of the tree that was
served. One run that grows a large tree at every position, and verifies none of it, is enough to work out later what
any smaller tree would have accepted (replay.py). The branch that the target will take is always expanded, so that the
ranks of its tokens are known at every depth.

n positions, W width and D depth of the recorded tree, M = W + (D - 1) * W * W candidates of a position.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_model.model import Eagle3Draft
from serve.drafter import Drafter, Pool
from serve.engine import Engine
from serve.request import Sequence as Running
from serve.tree import Tree, TreeConfig
from spec.bench.sweep import Condition
from spec.pair import Pair
from spec.suites import Prompt
from target_model.cache import PagedCache
from target_model.errors import UserError, atomic_write

FORMAT = 1
DEFAULT = TreeConfig(8, 8, 64)


@dataclass(frozen=True)
class Text:
    """One recorded answer. `tokens`: of the answer, with the one that ended it. Its first one comes from the prefill,
    each other one is the target's choice at a recorded position.
    """

    suite: str
    prompt: str
    category: str
    turn: int
    seed: int
    prompt_length: int
    tokens: tuple[int, ...]

    @property
    def positions(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Recording:
    """All positions of all texts, one text after the other.

    score: fp32 [n, M], the log of the chance of each candidate's path, -inf where there is none. Candidates of a depth
    are the W best children of each of the W expanded ones of the depth above. expanded: int16 [n, D - 1, W], places of
    the expanded ones among their depth's candidates. rank: int16 [n, D], rank of the target's token among the children
    of the target's previous one, -1 where it is not among the best W. guess: int32 [n], the most likely first token.
    entropy: fp32 [n], of the target's distribution at temperature 1, in nats. `about`: where all this comes from.
    """

    depth: int
    width: int
    texts: tuple[Text, ...]
    score: np.ndarray
    expanded: np.ndarray
    rank: np.ndarray
    guess: np.ndarray
    entropy: np.ndarray
    about: dict[str, Any]

    def level(self, depth: int) -> slice:
        """Columns of the candidates of a depth, from 1."""
        first = 0 if depth == 1 else self.width + (depth - 2) * self.width**2
        return slice(first, first + (self.width if depth == 1 else self.width**2))

    def save(self, path: Path) -> None:
        header = {
            "format": FORMAT,
            "depth": self.depth,
            "width": self.width,
            "texts": [asdict(text) for text in self.texts],
            "about": self.about,
        }
        arrays = {name: getattr(self, name) for name in ("score", "expanded", "rank", "guess", "entropy")}
        with atomic_write(path) as file:
            np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)

    @staticmethod
    def load(path: Path) -> "Recording":
        try:
            with np.load(path) as stored:
                header = json.loads(str(stored["header"]))
                arrays = {name: stored[name] for name in stored.files if name != "header"}
            if header["format"] != FORMAT:
                raise UserError(f"{path} was recorded by another version of spec: record again")
            texts = tuple(Text(**{**each, "tokens": tuple(each["tokens"])}) for each in header["texts"])
            return Recording(header["depth"], header["width"], texts, **arrays, about=header["about"])
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is no recorded run, or only a part of one") from None


class Recorder(Drafter):
    """Grows the large tree at every position, keeps it, and proposes nothing. `answers`: by request, the tokens that
    will be decided. `pools`: by request and position, score, expanded, rank and guess as in a Recording.
    """

    def __init__(self, draft: Eagle3Draft, cache: PagedCache, shape: TreeConfig):
        super().__init__(draft, cache)
        self.shape = shape
        self.answers: dict[str, tuple[int, ...]] = {}
        self.pools: dict[tuple[str, int], tuple[np.ndarray, ...]] = {}

    def propose(
        self, sequences: list[Running], limits: list[int], noise_RDV: Tensor | None, shape: TreeConfig
    ) -> list[Tree]:
        depth, device = self.shape.depth, self.page_taps.device
        places = [sequence.output_length for sequence in sequences]  # the root is the token before
        known = [
            self.answers[sequence.request.id][place : place + depth]
            for sequence, place in zip(sequences, places, strict=True)
        ]
        padded = [[*tokens, *[-1] * (depth - len(tokens))] for tokens in known]
        self._future_RD = torch.tensor(padded, device=device)
        self._parent_R1 = torch.full((len(sequences), 1), -1, device=device)
        self._grown, self._expanded, self._ranks = 0, [], []
        pool = self.grow(sequences, limits, noise_RDV, self.shape)
        self._follow(self._last_level(pool))
        kept = [
            pool.score_RM,
            torch.stack(self._expanded, 1) if self._expanded else pool.parent_RM.new_zeros(len(limits), 0, 0),
            torch.stack(self._ranks, 1),
            pool.token_RM[:, 0],
        ]
        for index, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
            self.pools[sequence.request.id, place - 1] = tuple(each[index].cpu().numpy() for each in kept)
        return [Tree([sequence.token_ids[-1]], [-1]) for sequence in sequences]

    def frontier(self, level: int, candidates: Pool, shape: TreeConfig) -> Tensor:
        hit_RM = self._follow(candidates)
        best_RW = candidates.score_RM.masked_fill(hit_RM, float("inf")).topk(shape.width, dim=1).indices
        self._expanded.append(best_RW)
        return best_RW

    def _follow(self, candidates: Pool) -> Tensor:
        """Finds the target's token among a depth's candidates, and notes its rank."""
        future_R1 = self._future_RD[:, len(self._ranks), None]
        hit_RM = (candidates.parent_RM == self._parent_R1) & (candidates.token_RM == future_R1)
        hit_RM &= candidates.score_RM > float("-inf")
        place_R1, found_R1 = hit_RM.int().argmax(1, keepdim=True), hit_RM.any(1, keepdim=True)
        self._ranks.append(torch.where(found_R1, place_R1 % self.shape.width, -1)[:, 0])
        self._parent_R1 = torch.where(found_R1, self._grown + place_R1, -2)
        self._grown += hit_RM.shape[1]
        return hit_RM

    def _last_level(self, pool: Pool) -> Pool:
        return Pool(pool.token_RM[:, self._grown :], pool.score_RM[:, self._grown :], pool.parent_RM[:, self._grown :])


def record(
    pair: Pair,
    suites: dict[str, Sequence[Prompt]],
    condition: Condition,
    *,
    tokens: int,
    seed: int,
    longest: int,
    shape: TreeConfig = DEFAULT,
    together: int = 8,
    about: dict[str, Any] | None = None,
) -> Recording:
    """Answers all prompts as the sweep does, `together` at a time, with the same seeds, and records every position.

    `longest` bounds a conversation in tokens. An answer that the recorded run does not repeat token for token is left
    out and counted in `about`: on a GPU a near tie can bring that about. Raises UserError when none is left.
    """
    plain, engine = pair.engine(None, longest, together), pair.engine(shape, longest, together)
    engine.runner.drafter, engine.runner.device_step = Recorder(pair.draft, engine.runner.cache, shape), None
    texts: list[Text] = []
    parts: list[tuple[np.ndarray, ...]] = []
    seeded = [(suite, prompt, seed + i) for suite, prompts in suites.items() for i, prompt in enumerate(prompts)]
    for start in range(0, len(seeded), together):
        for text, arrays in _record_group(pair, plain, engine, seeded[start : start + together], condition, tokens):
            texts.append(text)
            parts.append(arrays)
    asked = sum(len(prompt.turns) for _, prompt, _ in seeded)
    if not texts:
        raise UserError("no answer of the target was the same twice: record in fp32, where no near tie decides")
    joined = (np.concatenate(each) for each in zip(*parts, strict=True))
    about = {**(about or {}), "answers left out": asked - len(texts)}
    return Recording(shape.depth, shape.width, tuple(texts), *joined, about=about)


def _record_group(
    pair: Pair,
    plain: Engine,
    engine: Engine,
    group: list[tuple[str, Prompt, int]],
    condition: Condition,
    tokens: int,
) -> Iterator[tuple[Text, tuple[np.ndarray, ...]]]:
    recorder, shape = engine.runner.drafter, engine.tree
    talks: list[list[dict[str, str]]] = [[] for _ in group]
    for turn in range(max(len(prompt.turns) for _, prompt, _ in group)):
        places = [place for place, (_, prompt, _) in enumerate(group) if turn < len(prompt.turns)]
        for place in places:
            talks[place].append({"role": "user", "content": group[place][1].turns[turn]})
        asked = [pair.render_conversation(talks[place], condition.thinking) for place in places]
        params = [condition.params(tokens, group[place][2]) for place in places]
        answers = plain.generate(asked, params)
        ends = [() if each.stop_token is None else (each.stop_token,) for each in answers]
        decided = [(*each.token_ids, *end) for each, end in zip(answers, ends, strict=True)]
        recorder.answers = {f"generate-{order}": each for order, each in enumerate(decided)}
        recorder.pools.clear()
        again = engine.generate(asked, params)
        for order, place in enumerate(places):
            talks[place].append(pair.answer_message(answers[order].token_ids, condition.thinking))
            if again[order].token_ids != answers[order].token_ids:
                continue
            suite, prompt, seed = group[place]
            about = (suite, prompt.id, prompt.category, turn + 1, seed)
            text = Text(*about, len(asked[order]), decided[order])
            pools = [recorder.pools.get((f"generate-{order}", index)) for index in range(text.positions)]
            yield text, (*_stack(pools, shape), _entropy(pair, [*asked[order], *decided[order]], text))


def _stack(pools: list[tuple[np.ndarray, ...] | None], shape: TreeConfig) -> tuple[np.ndarray, ...]:
    """Score, expanded, rank and guess of one text; positions with fewer depths, or none, are filled up."""
    depth, width, count = shape.depth, shape.width, len(pools)
    score = np.full((count, width + (depth - 1) * width**2), -np.inf, np.float32)
    expanded = np.full((count, depth - 1, width), -1, np.int16)
    rank = np.full((count, depth), -1, np.int16)
    guess = np.full(count, -1, np.int32)
    for index, pool in enumerate(pools):
        if pool is not None:
            score[index, : pool[0].shape[0]] = pool[0]
            if len(pool[1]):
                expanded[index, : len(pool[1])] = pool[1]
            rank[index, : pool[2].shape[0]] = pool[2]
            guess[index] = pool[3]
    return score, expanded, rank, guess


@torch.inference_mode()
def _entropy(pair: Pair, token_ids: list[int], text: Text) -> np.ndarray:
    """fp32 [positions], in nats."""
    final, _ = pair.target.capture(torch.tensor([token_ids], device=pair.target.device), pair.draft.config.taps)
    parts = []
    for rows in final[0, text.prompt_length : text.prompt_length + text.positions].split(256):
        logp = pair.target.logits(rows).float().log_softmax(-1)
        parts.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)

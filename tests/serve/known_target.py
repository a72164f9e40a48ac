"""A real target, built by hand, whose answers are known: each token is followed by the one that a table names."""

import torch

from serve.request import Sequence
from target_model.model import TargetModel
from tests.fixtures import random_target
from tests.serve.fake_engine import tokenizer

EMBEDDING, LOGIT = 800.0, 12.0  # far above what the random layers add, and above what other tokens score


class Following(dict[int, int]):
    """token -> the token behind it."""

    @staticmethod
    def chain(tokens: list[int], *, starts: tuple[int, ...] = (), cycle: bool = True) -> "Following":
        """`tokens`, all different, in order (and again from the first), also behind each of `starts`."""
        assert len(set(tokens) | set(starts)) == len(tokens) + len(starts)
        table = Following(zip(tokens, tokens[1:], strict=False))
        if cycle:
            table[tokens[-1]] = tokens[0]
        return Following(table | dict.fromkeys(starts, tokens[0]))

    def script(self, sequence: Sequence) -> list[int]:
        """What comes next, for a scripted draft: it knows nothing of stops and goes on behind every end."""
        token, coming = sequence.token_ids[-1], []
        for _ in range(16):
            token = self.get(token, 0)
            coming.append(token)
        return coming


def known_target(following: Following, *, vocab_size: int | None = None, seed: int = 0, **overrides) -> TargetModel:
    """T0 with the bundled tokenizer's vocabulary; the head finds the embedding of the token before again.

    All layers, norms, caches and block choices are a random target's and at work; they are too quiet to be heard.
    """
    size = vocab_size or tokenizer().vocab_size
    target = random_target(seed, vocab_size=size, eos_token_ids=tokenizer().eos_ids, **overrides)
    direction_VH = torch.nn.functional.normalize(target.embed_tokens.weight, dim=-1)
    target.embed_tokens.weight.copy_(direction_VH * EMBEDDING)
    target.lm_head.weight.mul_(0.02)
    width = target.config.hidden_size
    for token, coming in following.items():
        target.lm_head.weight[coming] += LOGIT * width**-0.5 * direction_VH[token] / target.norm.scale
    return target

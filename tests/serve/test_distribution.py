"""What comes out follows the target's processed distribution exactly, in both modes of sampling.

Short runs of a target with 32 tokens, each with a seed of its own, against the distribution computed by plain forward
passes. The first token comes from prefill and proves nothing about trees; tokens 2 to 4 and their joint are tested.
"""

import itertools
from collections import Counter

import pytest
import torch

from serve.engine import Engine
from serve.request import Request, SamplingParams, Sequence
from serve.sampling import Row, filtered
from serve.tree import TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache
from tests.fixtures import random_target
from tests.serve.drafts import random_draft

VOCAB = 32
PROMPT = [3, 17, 8]
SETTINGS = {
    "cold": {"temperature": 0.7, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8, "top_k": 6},
    "hot min-p": {"temperature": 1.5, "min_p": 0.15, "top_k": 6},
    "penalised": {"temperature": 1.0, "top_k": 5, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def target():
    model = random_target(seed=1, vocab_size=VOCAB, bos_token_id=0, eos_token_ids=(31,), max_position=64)
    model.lm_head.weight.data *= 0.06  # several tokens are likely, not one
    return model


@pytest.fixture(scope="module")
def draft(target):
    """An untrained draft whose output head is fitted to the target's logits behind random continuations."""
    draft = random_draft(target, seed=2)
    ids = torch.cat([torch.tensor(PROMPT).expand(800, 3), torch.randint(VOCAB, (800, 4))], 1)
    final, aux = target.capture(ids, draft.config.taps)
    cache = PagedCache(target.config, 800, dtype=torch.float32, device="cpu", draft=draft.kv_shape)
    batch = Batch.causal(8, "cpu", ids[:, 1:].tolist(), [1] * 800, [[page] for page in range(800)])
    with torch.inference_mode():
        state = draft.norm(draft(batch, draft.project(aux[:, :-1].flatten(0, 1)), cache.draft()))
        fitted = torch.linalg.lstsq(state, target.logits(final[:, 1:]).flatten(0, 1)).solution
    draft.lm_head.weight.data = fitted.T.contiguous()
    return draft


def params(**settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **settings})


def exact_joint(target, settings: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every four tokens that can follow the prompt."""
    joint = {(): 1.0}
    for _ in range(4):
        paths = list(joint)
        length = len(PROMPT) + len(paths[0])
        pages = -(-length // 8)
        cache = PagedCache(target.config, pages * len(paths), dtype=torch.float32, device="cpu")
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(len(paths))]
        batch = Batch.causal(8, "cpu", [PROMPT + list(path) for path in paths], [0] * len(paths), tables)
        logits = target.logits(target(batch, cache).final_state[length - 1 :: length])
        following = {}
        for path, logits_V in zip(paths, logits, strict=True):
            sequence = Sequence(Request("r", PROMPT, settings))
            adjusted = _adjusted(logits_V, Row(sequence, path))
            for token, p in enumerate(filtered(adjusted[None], [Row(sequence, path)]).softmax(-1)[0].tolist()):
                if p > 0:
                    following[*path, token] = joint[path] * p
        joint = following
    return joint


def _adjusted(logits_V: torch.Tensor, row: Row) -> torch.Tensor:
    """The penalties once more, written token by token."""
    settings, logits_V = row.sequence.params, logits_V.clone()
    for token in set(PROMPT) | set(row.path):
        factor = settings.repetition_penalty
        logits_V[token] = logits_V[token] / factor if logits_V[token] > 0 else logits_V[token] * factor
    for token in row.path:
        logits_V[token] -= settings.frequency_penalty
    return logits_V


def sample(target, draft, mode: str, settings: SamplingParams, runs: int) -> tuple[Counter, float]:
    """Four tokens of every run, and the mean acceptance length."""
    engine = Engine(target, draft, TreeConfig(2, 4, 12), sampling=mode, max_running=256, pages=2000)
    requests = [
        Request(str(i), PROMPT, SamplingParams(**{**vars(settings), "seed": 7919 * i + 1})) for i in range(runs)
    ]
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    todo = iter(requests)
    for chunk in iter(lambda: list(itertools.islice(todo, 256)), []):
        for request in chunk:
            engine.add(request)
        while engine.has_work():
            for update in engine.step():
                texts[update.id] += update.token_ids
    stats = engine.stats()
    return Counter(map(tuple, texts.values())), 1 + stats["accepted_tokens"] / stats["verify_steps"]


def chi_square(observed: Counter, expected: dict, runs: int) -> float:
    """The p-value; cells that expect fewer than 5 are put together."""
    assert set(observed) <= set(expected), "an outcome that the filters exclude"
    large = [cell for cell, p in expected.items() if p * runs >= 5]
    pairs = [(observed[cell], expected[cell] * runs) for cell in large]
    rest = runs - sum(o for o, _ in pairs), runs - sum(e for _, e in pairs)
    if rest[1] >= 5:
        pairs.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def marginal(counts: dict, places: tuple[int, ...]) -> Counter:
    total: Counter = Counter()
    for cell, count in counts.items():
        total[tuple(cell[place] for place in places)] += count
    return total


def check(target, draft, mode: str, name: str, runs: int) -> None:
    settings = params(**SETTINGS[name])
    observed, acceptance = sample(target, draft, mode, settings, runs)
    assert acceptance > 1.3, acceptance
    joint = exact_joint(target, settings)
    for places in ((1,), (2,), (3,), (1, 2, 3)):
        p = chi_square(marginal(observed, places), marginal(joint, places), runs)
        assert p > 1e-3, (mode, name, places, p)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_short_runs(target, draft, mode):
    check(target, draft, mode, "top-p", 2000)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_many_short_runs(target, draft, mode, name):
    check(target, draft, mode, name, 20_000)

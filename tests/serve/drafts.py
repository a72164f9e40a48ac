"""Drafts for tests: an untrained one, and drafters that follow a script of the target's own continuation."""

import random
from collections.abc import Callable, Iterable

import torch
from torch import nn

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from serve.drafter import Drafter, Pool
from serve.engine import Engine
from serve.request import Completion, Request, SamplingParams, Sequence, Update
from serve.tree import Tree, TreeConfig
from target_model.config import M3Config
from target_model.model import TargetModel


def draft_config(config: M3Config, taps: tuple[int, ...] = (1, 3, 5), **changes) -> DraftConfig:
    values = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "max_position": config.max_position,
        "rms_norm_eps": 1e-6,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        "attention_bias": False,
        "taps": taps,
    }
    return DraftConfig(**{**values, **changes})


def random_draft(target: TargetModel, seed: int = 0, taps: tuple[int, ...] = (1, 3, 5), **changes) -> Eagle3Draft:
    """Untrained, with non-trivial norms; it accepts nearly nothing."""
    torch.manual_seed(seed)
    draft = Eagle3Draft(draft_config(target.config, taps, **changes)).eval()
    for module in draft.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.data.uniform_(0.5, 1.5)
    return draft


class ScriptedDrafter(Drafter):
    """Keeps the real draft's rows up to date but proposes from a script: `script(sequence)` gives the tokens to come.

    `hit(sequence, depth)` tells whether the true token is among the guesses of that depth, `rank` at which place among
    its siblings it stands. All other nodes are wrong on purpose.
    """

    def __init__(
        self,
        drafter: Drafter,
        script: Callable[[Sequence], list[int]],
        hit: Callable[[Sequence, int], bool],
        rank: int = 0,
    ):
        super().__init__(drafter.draft, drafter.cache)
        self.script, self.hit, self.rank = script, hit, rank
        self._asked: list[Sequence] = []

    def propose(self, sequences, limits, noise_RDV, shape):
        super().propose(sequences, limits, noise_RDV, shape)  # its guessed rows must do no harm
        return [self._tree(sequence, limit, shape) for sequence, limit in zip(sequences, limits, strict=True)]

    def follow(self, sequences):
        super().follow(sequences)
        self._asked = sequences

    def grow_from(self, roots, guesses, shape, depth):
        """For a device step: all nodes of the scripted trees, padded with candidates that are not allowed."""
        pool = super().grow_from(roots, guesses, shape, depth)
        limits, lengths = roots.limit_R1[:, 0].tolist(), roots.length_R.tolist()
        trees = [
            self._tree(sequence, limit, shape, length - len(sequence.token_ids))
            for sequence, limit, length in zip(self._asked, limits, lengths, strict=True)
        ]
        room = pool.token_RM.shape[1]
        tokens = [tree.tokens[1:] + [0] * (room + 1 - len(tree)) for tree in trees]
        parents = [[p - 1 for p in tree.parents[1:]] + [-1] * (room + 1 - len(tree)) for tree in trees]
        scores = [[-0.01 * n for n in range(1, len(tree))] + [float("-inf")] * (room + 1 - len(tree)) for tree in trees]
        return Pool(torch.tensor(tokens), torch.tensor(scores), torch.tensor(parents))

    def _tree(self, sequence: Sequence, limit: int, shape: TreeConfig, ahead: int = 0) -> Tree:
        """`ahead`: tokens that have been decided, but that the sequence has not been told of."""
        coming, vocab = self.script(sequence)[ahead:], self.draft.config.vocab_size
        tree = Tree([sequence.token_ids[-1]], [-1])
        node = 0
        for depth in range(1, min(shape.depth, limit) + 1):
            truth = coming[depth - 1] if depth <= len(coming) else 0
            guesses = [(truth + 1 + i) % vocab for i in range(shape.width)]
            hit = self.hit(sequence, ahead + depth) and self.rank < shape.width
            if hit:
                guesses[self.rank] = truth
            guesses = guesses[: shape.nodes - len(tree)]
            children = range(len(tree), len(tree) + len(guesses))
            tree.tokens.extend(guesses)
            tree.parents.extend([node] * len(guesses))
            if not hit or truth not in guesses:
                # Below a wrong guess the tree goes on, for nothing.
                node = children[0] if children else node
                continue
            node = children[guesses.index(truth)]
        return tree


def scripted_engine(
    target: TargetModel,
    continuations: dict[tuple[int, ...], list[int]],
    tree: TreeConfig,
    *,
    agreement: float = 1.0,
    rank: int = 0,
    seed: int = 0,
    **settings,
) -> Engine:
    """An engine whose draft knows each prompt's plain continuation and tells the truth with the given probability.

    When it does depends on the prompt and the place, so a request meets the same draft alone and in a crowd.
    """
    engine = Engine(target, random_draft(target), tree, **settings)

    def script(sequence: Sequence) -> list[int]:
        return continuations[tuple(sequence.request.prompt_ids)][sequence.output_length :]

    def hit(sequence: Sequence, depth: int) -> bool:
        return (
            random.Random(f"{seed} {sequence.request.prompt_ids} {len(sequence.token_ids) + depth}").random()
            < agreement
        )

    use_drafter(engine, ScriptedDrafter(engine.runner.drafter, script, hit, rank))
    return engine


def use_drafter(engine: Engine, drafter: Drafter) -> None:
    """Puts another drafter in the place of the engine's own."""
    engine.runner.drafter = drafter
    if engine.runner.device_step is not None:
        engine.runner.device_step.drafter = drafter
        drafter.stay_on_device(None)


def prompts(lengths: Iterable[int], seed: int = 3, vocab: int = 300) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(vocab) for _ in range(length)] for length in lengths]


def plain(target: TargetModel, params: SamplingParams, batch: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """The answers without a draft, each prompt alone."""
    return {tuple(prompt): Engine(target).generate([prompt], params)[0].token_ids for prompt in batch}


def mean_length(completions: Iterable[Completion]) -> float:
    """Tokens emitted per verify step."""
    steps = [step for completion in completions for step in completion.steps]
    return sum(step.emitted for step in steps) / len(steps)


def drive(
    engine: Engine,
    requests: list[Request],
    arrivals: dict[str, int] | None = None,
    aborts: dict[str, int] | None = None,
) -> dict[str, Completion]:
    """Runs the engine until all requests have ended; they arrive and are aborted at the given steps (0 and never).

    After every step each page must be accounted for: free, cached, or in the tables of those who run.
    """
    arrivals, aborts = arrivals or {}, aborts or {}
    updates: dict[str, list[Update]] = {request.id: [] for request in requests}
    for tick in range(5000):
        for request in requests:
            if arrivals.get(request.id, 0) == tick:
                engine.add(request)
            if aborts.get(request.id) == tick:
                engine.abort(request.id)
        if not engine.has_work() and tick > max(arrivals.values(), default=0):
            break
        for update in engine.step():
            updates[update.id].append(update)
        check_pages(engine)
    assert not engine.has_work() and engine.scheduler.allocator.used == 0
    return {name: Completion.of(collected) for name, collected in updates.items() if collected}


def check_pages(engine: Engine) -> None:
    scheduler, allocator = engine.scheduler, engine.scheduler.allocator
    tables = [sequence.pages for _, _, sequence in scheduler.running]
    assert allocator.free + allocator.used + allocator.cached == allocator.total
    assert allocator.used == len({page for table in tables for page in table})
    assert all(len(set(table)) == len(table) for table in tables)
    shared = [page for table in tables for page in table]
    for _, _, sequence in scheduler.running:
        writable = sequence.pages[sequence.computed // scheduler.page_size :]
        assert all(shared.count(page) == 1 for page in writable), "a shared page is about to be written"

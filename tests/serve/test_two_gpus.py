"""A target over two GPUs: every token that its engine emits is the choice of the same target on one GPU, greedy and
sampled, plain, in chains and in trees.
"""

from collections.abc import Iterator

import pytest
import torch

from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.tree import TreeConfig
from spec.pair import Pair
from target_model.checkpoint import load_target
from target_model.model import TargetModel
from tests.devices import TWO_GPUS
from tests.serve.test_gpu import DEVICE, QUESTIONS, check_choices, five_requests

pytestmark = TWO_GPUS
TREES = {"chain": TreeConfig.chain(3), "tree": TreeConfig(3, 2, 6), "plain": None}


@pytest.fixture(scope="module")
def split() -> Iterator[Pair]:
    """In fp32, over two processes."""
    options = EngineOptions(device=DEVICE, dtype=torch.float32, draft_dtype=torch.float32, tensor_parallel=2)
    engine, tokenizer, _ = load_engine(options)
    yield Pair(engine.runner.target, engine.runner.drafter.draft, tokenizer, "")
    engine.runner.target.followers.close()


@pytest.fixture(scope="module")
def whole() -> TargetModel:
    return load_target("m3-tiny", device=DEVICE)


@pytest.mark.parametrize("device_step", [False, True])
@pytest.mark.parametrize("settings", ["greedy", "sampled"])
@pytest.mark.parametrize("tree", TREES)
def test_two_gpus_say_what_one_says(split, whole, tree, settings, device_step):
    """Operation by operation, and as CUDA graphs that every process replays."""
    prompts, params = [split.render(question) for question in QUESTIONS], five_requests(settings)
    draft = split.draft if TREES[tree] else None
    engine = Engine(split.target, draft, TREES[tree], pages=200, device_step=device_step)
    answers = engine.generate(prompts, params)
    check_choices(whole, prompts, answers, params)
    if tree != "plain":
        assert engine.stats()["acceptance_length"] > 1.2
    if device_step and DEVICE == "cuda":
        assert split.target.followers.graphs

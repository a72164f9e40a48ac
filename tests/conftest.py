"""Settings of every test: no network, no telemetry, one thread."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    WANDB_MODE="disabled",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)

"""Settings of every test: no network, no telemetry, one thread; without a GPU Triton's kernels are interpreted."""

import os
import signal

os.environ.update(
    HF_HUB_OFFLINE="1",
    WANDB_MODE="disabled",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)
# Triton reads this when it is first imported, by whichever package comes first.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

# A background job of a shell ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

if torch.cuda.is_available():
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)

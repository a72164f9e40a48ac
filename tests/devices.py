"""Where tests of several processes run."""

import pytest
import torch

# Marks of a test that needs two GPUs.
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
# Processes on a CPU are slow tests; on GPUs each has one of its own.
CPU_AND_TWO_GPUS = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=TWO_GPUS)]

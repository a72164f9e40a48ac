"""Without a GPU the kernels run in Triton's CPU interpreter, which has to be asked for before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

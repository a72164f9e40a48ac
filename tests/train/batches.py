"""Random features for tests."""

import numpy as np
import torch

from draft_model.config import DraftConfig
from train.data import valid_steps
from train.features import Features, document_positions


def random_features(
    config: DraftConfig, documents: list[list[int]], spans: list[list[int]], steps: int, seed: int = 0
) -> Features:
    """Rows laid out by document and span numbers, everything else random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(documents), len(documents[0]))
    numbers = np.array(documents, np.int32)
    return Features(
        token_ids=torch.randint(0, config.vocab_size, shape, generator=generator),
        documents=torch.tensor(documents),
        positions=torch.from_numpy(document_positions(numbers).astype(np.int64)),
        valid_steps=torch.from_numpy(valid_steps(numbers, np.array(spans, np.int32), steps).astype(np.int64)),
        aux=torch.randn(*shape, config.num_aux * config.target_hidden_size, generator=generator),
        final_state=torch.randn(*shape, config.target_hidden_size, generator=generator),
        packed=bool(numbers.max() > 1),
    )

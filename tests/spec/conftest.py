"""A pair on disk: the bundled target with a draft that starts from its weights and has learned nothing."""

import pytest

from draft_model.checkpoint import save_draft
from target_model.checkpoint import load_target
from train.config import DraftSettings
from train.initialise import new_draft


@pytest.fixture(scope="session")
def untrained_draft(tmp_path_factory) -> str:
    """Directory of the draft."""
    directory = tmp_path_factory.mktemp("draft") / "untrained"
    save_draft(new_draft(DraftSettings(), load_target("m3-tiny"), None, seed=0), directory)
    return str(directory)

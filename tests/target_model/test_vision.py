"""The vision side equals transformers', both in fp32: features of the tower, and logits with images in the prompt."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.checkpoint import load_target
from target_model.model import TargetModel
from target_model.resolve import BUNDLED
from target_model.vision import Grid
from tests.fixtures import TINY_VISION, tiny_config, write_checkpoint

TOLERANCE = 1e-4
IMAGE, VIDEO = 10, 11
# Beside m3-tiny: several layers, head dims that three axes divide and that they do not, another RoPE, a larger merge.
SHAPES = {
    "deep": replace(TINY_VISION, num_layers=4, rope_theta=100.0),
    "wide_heads": replace(TINY_VISION, hidden_size=36, num_heads=2, num_layers=2, layer_norm_eps=1e-3),
    "merge_three": replace(TINY_VISION, spatial_merge_size=3, temporal_patch_size=1, patch_size=4, num_layers=2),
}
ONE: list[Grid] = [(1, 6, 12)]
SEVERAL: list[Grid] = [(1, 6, 6), (1, 12, 6), (1, 6, 18)]
VIDEO_SEGMENTS: list[Grid] = [(4, 6, 6), (3, 6, 6)]


@dataclass
class Pair:
    """The same checkpoint here and in transformers."""

    ours: TargetModel
    theirs: MiniMaxM3SparseForConditionalGeneration

    def patches(self, grids: list[Grid], seed: int = 0) -> Tensor:
        values = self.ours.vision.patch_weight[0].numel()
        count = sum(frames * rows * columns for frames, rows, columns in grids)
        return torch.randn(count, values, generator=torch.Generator().manual_seed(seed))

    def rows(self, grids: list[Grid]) -> int:
        return sum(f * r * c for f, r, c in grids) // self.ours.config.vision.spatial_merge_size**2


def load_pair(path) -> Pair:
    theirs, report = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return Pair(load_target(path, language_only=False), theirs.eval())


@pytest.fixture(scope="module", params=["m3-tiny", *SHAPES])
def pair(request, tmp_path_factory) -> Pair:
    if request.param == "m3-tiny":
        return load_pair(BUNDLED / "m3-tiny")
    config = tiny_config(vision=SHAPES[request.param], image_token_id=IMAGE, video_token_id=VIDEO)
    seed = list(SHAPES).index(request.param)
    return load_pair(write_checkpoint(config, tmp_path_factory.mktemp(request.param), seed))


@pytest.mark.parametrize("grids", [ONE, SEVERAL, VIDEO_SEGMENTS], ids=["one", "several", "video"])
@torch.no_grad()
def test_features(pair: Pair, grids: list[Grid]):
    patches = pair.patches(grids)
    theirs = torch.cat(pair.theirs.model.get_image_features(patches, torch.tensor(grids)).pooler_output)
    ours = pair.ours.vision(patches, grids)
    assert ours.shape == theirs.shape == (pair.rows(grids), pair.ours.config.hidden_size)
    assert (ours - theirs).abs().max() < TOLERANCE
    # Neighbouring rows differ by far more than the tolerance: a wrong order would show.
    assert (theirs[1:] - theirs[:-1]).abs().amax(1).min() > 100 * TOLERANCE


def test_segments_do_not_see_each_other(pair: Pair):
    alone = pair.ours.vision(pair.patches([(2, 6, 6)]), [(2, 6, 6)])
    both = torch.cat([pair.patches([(2, 6, 6)]), pair.patches([(1, 6, 6)], seed=1)])
    first = pair.ours.vision(both, [(2, 6, 6), (1, 6, 6)])[: len(alone)]
    assert (first - alone).abs().max() < 1e-5
    joined = pair.ours.vision(both, [(3, 6, 6)])[: len(alone)]
    assert (joined - alone).abs().max() > 1e-3


def prompt(pair: Pair, images: list[list[Grid]], video: list[Grid]) -> list[int]:
    """Text, images, and a video frame by frame, between words."""
    config = pair.ours.config
    generator = torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(20, config.vocab_size, (count,), generator=generator).tolist()

    ids = words(5)
    for grids in images:
        ids += [config.image_token_id] * pair.rows(grids) + words(7)
    for frames, rows, columns in video:
        for _ in range(frames):
            ids += [config.video_token_id] * pair.rows([(1, rows, columns)]) + words(2)
    return ids + words(60)


def our_logits(pair: Pair, ids: list[int], features: Tensor, cuts: list[int]) -> Tensor:
    """Logits of all rows, computed in chunks that end at `cuts`."""
    config = pair.ours.config
    pages = -(-len(ids) // config.block_size)
    cache = PagedCache(config, pages, dtype=torch.float32, device="cpu")
    placeholders = [slot for slot, token in enumerate(ids) if token in (config.image_token_id, config.video_token_id)]
    states = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        batch = Batch.causal(config.block_size, "cpu", [ids[start:end]], [start], [list(range(pages))])
        inside = [place for place, slot in enumerate(placeholders) if start <= slot < end]
        if inside:
            rows = torch.tensor([placeholders[place] - start for place in inside])
            batch = replace(batch, image_rows=rows, image_features=features[inside])
        states.append(pair.ours(batch, cache).final_state)
    return pair.ours.logits(torch.cat(states))


@pytest.mark.parametrize("case", ["one", "several", "video"])
@torch.no_grad()
def test_logits(pair: Pair, case: str):
    images = {"one": [ONE], "several": [[grid] for grid in SEVERAL], "video": [ONE]}[case]
    video = VIDEO_SEGMENTS if case == "video" else []
    ids = prompt(pair, images, video)
    assert len(ids) > pair.ours.config.block_size * pair.ours.config.top_k_blocks or case == "one"
    flat = [grid for grids in images for grid in grids]
    patches = pair.patches(flat)
    given = {"pixel_values": patches, "image_grid_thw": torch.tensor(flat)}
    features = pair.ours.vision(patches, flat)
    if video:
        frames = pair.patches(video, seed=1)
        given |= {"pixel_values_videos": frames, "video_grid_thw": torch.tensor(video)}
        features = torch.cat([features, pair.ours.vision(frames, video)])
    theirs = pair.theirs(input_ids=torch.tensor([ids]), **given).logits[0]
    assert (our_logits(pair, ids, features, []) - theirs).abs().max() < TOLERANCE
    # In chunks: the first cut lies inside an image, another between two words.
    assert (our_logits(pair, ids, features, [6, 7, len(ids) - 4]) - theirs).abs().max() < TOLERANCE
    # The images matter, and so does which is which.
    blank = our_logits(pair, ids, torch.zeros_like(features), [])
    assert (blank - theirs)[-1].abs().max() > 100 * TOLERANCE


def test_wrong_number_of_patches(pair: Pair):
    with pytest.raises(ValueError, match="patches for grids"):
        pair.ours.vision(pair.patches(ONE)[1:], ONE)

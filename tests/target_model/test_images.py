"""Pictures to patches: equal to transformers' processors, in an order written out by hand, and bounded as they say."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from target_model.errors import UserError
from target_model.images import PixelRules, VisionProcessor, sample_frames, video_text
from tests.fixtures import TINY_VISION

PROCESSOR = VisionProcessor(TINY_VISION, PixelRules())
M3_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 672 * 672}
# What two ways of resizing may differ by: two steps of 1/255, divided by the smallest deviation of a channel.
TWO_STEPS = 2.01 / 255 / 0.2613


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def normalised(frame: Image.Image) -> Tensor:
    """[3, height, width]"""
    rules = PixelRules()
    values = torch.from_numpy(np.array(frame)).permute(2, 0, 1).float() / 255
    return (values - torch.tensor(rules.mean)[:, None, None]) / torch.tensor(rules.deviation)[:, None, None]


def by_hand(frames: list[Image.Image]) -> Tensor:
    """Patches of 14 x 14 of two frames each; those of a 2 x 2 group follow each other."""
    values = torch.stack([normalised(frame) for frame in frames])
    _, _, height, width = values.shape
    patches = [
        values[first : first + 2, :, y : y + 14, x : x + 14].transpose(0, 1).flatten()
        for first in range(0, len(frames), 2)
        for group_y in range(0, height, 28)
        for group_x in range(0, width, 28)
        for y in (group_y, group_y + 14)
        for x in (group_x, group_x + 14)
    ]
    return torch.stack(patches)


def test_an_image_by_hand():
    frame = picture(84, 56)
    made = PROCESSOR.image(frame)
    assert made.kind == "image" and made.grids == ((1, 4, 6),) and made.rows == 6
    assert (made.patches - by_hand([frame, frame])).abs().max() < 1e-6


def test_a_video_by_hand():
    """Eleven frames: the last is repeated, six temporal patches form segments of four and two."""
    frames = [picture(84, 56, seed) for seed in range(11)]
    made = PROCESSOR.video(frames)
    assert made.kind == "video" and made.grids == ((4, 4, 6), (2, 4, 6)) and made.rows == 36
    assert (made.patches - by_hand([*frames, frames[-1]])).abs().max() < 1e-6


@pytest.mark.parametrize("size", [(336, 336), (100, 80), (1000, 700), (31, 900), (10, 10), (700, 40)])
def test_images_equal_the_qwen_processor(size: tuple[int, int]):
    """Which follows the same rules, and needs no torchvision. The area stays in bounds, the shape is kept."""
    theirs = Qwen2VLImageProcessorPil(size=dict(M3_SIZE))(picture(*size), return_tensors="pt")
    ours = PROCESSOR.image(picture(*size))
    assert [list(grid) for grid in ours.grids] == theirs["image_grid_thw"].tolist()
    assert torch.equal(ours.patches, theirs["pixel_values"])
    _, rows, columns = ours.grids[0]
    assert 3136 <= rows * columns * 14**2 <= 672 * 672 and rows % 2 == columns % 2 == 0
    assert abs(math.log(columns / rows * size[1] / size[0])) < math.log(2.01)


@pytest.mark.parametrize("size", [(336, 336), (100, 80), (1000, 700)])
def test_equal_to_the_torchvision_processors(size: tuple[int, int]):
    """Transformers' own processors, where torchvision is installed. It rounds resized pixels differently."""
    pytest.importorskip("torchvision")
    from transformers.models.minimax_m3_vl import MiniMaxM3VLImageProcessor, MiniMaxM3VLVideoProcessor

    tolerance = 1e-5 if size == (336, 336) else TWO_STEPS
    theirs = MiniMaxM3VLImageProcessor()(picture(*size), return_tensors="pt")
    ours = PROCESSOR.image(picture(*size))
    assert [list(grid) for grid in ours.grids] == theirs["image_grid_thw"].tolist()
    assert (ours.patches - theirs["pixel_values"]).abs().max() < tolerance
    frames = [picture(*size, seed) for seed in range(9)]
    video = np.stack([np.asarray(frame) for frame in frames])
    theirs = MiniMaxM3VLVideoProcessor()(video, return_tensors="pt")
    ours = PROCESSOR.video(frames)
    assert [list(grid) for grid in ours.grids] == theirs["video_grid_thw"].tolist()
    assert (ours.patches - theirs["pixel_values_videos"]).abs().max() < tolerance


def test_digests_tell_inputs_apart():
    one = PROCESSOR.image(picture(84, 56))
    assert PROCESSOR.image(picture(84, 56)).digest == one.digest
    changed = picture(84, 56)
    changed.putpixel((83, 55), tuple(255 - value for value in changed.getpixel((83, 55))))
    others = [
        PROCESSOR.image(changed),
        PROCESSOR.image(picture(56, 84)),
        PROCESSOR.video([picture(84, 56)]),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4
    # The still picture and the video of one frame have the same patches, but other placeholders.
    assert torch.equal(one.patches, others[2].patches)


def test_modes_and_orientation():
    """Whatever a file holds becomes upright RGB."""
    base = picture(84, 56)
    for mode in ("L", "P", "RGBA", "CMYK", "1", "LA"):
        assert PROCESSOR.image(base.convert(mode)).grids == ((1, 4, 6),)
    turned = base.copy()
    turned.getexif()[0x0112] = 6
    assert PROCESSOR.image(turned).digest == PROCESSOR.image(base.transpose(Image.Transpose.ROTATE_270)).digest


def test_refused_inputs():
    with pytest.raises(UserError, match="aspect ratio"):
        PROCESSOR.image(picture(2010, 10))
    with pytest.raises(UserError, match="all of one size"):
        PROCESSOR.video([picture(84, 56), picture(56, 84)])
    with pytest.raises(UserError, match="needs frames"):
        PROCESSOR.video([])


def test_frames():
    assert sample_frames(90, 30.0) == [0, 30, 60]
    assert sample_frames(10, 30.0) == [0]
    assert sample_frames(3, 0.5) == [0, 1, 2]
    longest = sample_frames(30 * 3600, 30.0)
    assert len(longest) == 768 and longest == sorted(set(longest)) and longest[-1] < 30 * 3600


def test_words_of_a_video():
    """As transformers' processor of this model writes them."""
    frames = [picture(56, 56, seed) for seed in range(11)]
    taken = sample_frames(110, 10.0)
    made = PROCESSOR.video(frames)
    theirs = MiniMaxM3VLProcessor.replace_video_token(
        SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            VISION_START_TOKEN=MiniMaxM3VLProcessor.VISION_START_TOKEN,
            VISION_END_TOKEN=MiniMaxM3VLProcessor.VISION_END_TOKEN,
            VIDEO_TOKEN=MiniMaxM3VLProcessor.VIDEO_TOKEN,
        ),
        {
            "num_chunks_per_video": [len(made.grids)],
            "video_grid_thw": torch.tensor(made.grids),
            "video_metadata": [SimpleNamespace(fps=10.0, frames_indices=taken)],
        },
        0,
    )
    assert video_text(made, [index / 10.0 for index in taken], 2) == theirs


def rules(tmp_path: Path, **values) -> PixelRules:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    return PixelRules.read(tmp_path, TINY_VISION)


def test_rules_of_a_checkpoint(tmp_path: Path):
    assert PixelRules.read(tmp_path, TINY_VISION) == PixelRules()
    # The published file: its size is not what was used.
    assert rules(tmp_path, size=[672, 672], patch_size=14, image_processor_type="x") == PixelRules()
    assert rules(tmp_path, size={"shortest_edge": 784, "longest_edge": 7840}) == PixelRules(784, 7840)
    assert rules(tmp_path, min_pixels=784, image_mean=[0.1, 0.2, 0.3]) == PixelRules(784, mean=(0.1, 0.2, 0.3))
    for wrong in ({"patch_size": 16}, {"merge_size": 1}, {"do_resize": False}, {"resample": 2}, {"image_std": [1.0]}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            rules(tmp_path, **wrong)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        PixelRules.read(tmp_path, TINY_VISION)


def test_rules_are_followed():
    small = VisionProcessor(TINY_VISION, PixelRules(784, 28 * 28 * 4))
    assert small.image(picture(500, 500)).grids == ((1, 4, 4),)
    assert small.video([picture(500, 500)]).grids != ((1, 4, 4),)

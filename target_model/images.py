"""Pictures and videos to what the vision tower reads, and their placeholders in a prompt.

The steps are those of transformers' MiniMaxM3VLImageProcessor and MiniMaxM3VLVideoProcessor, which need torchvision.
Its Qwen2VLImageProcessorPil follows the same rules (resize, normalise, order of patches) with Pillow and NumPy: it
does the work here, one frame at a time, so that torchvision is not needed and its presence changes no pixel.

Shapes: F frames, N patches, C values of a patch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from target_model.config import VisionConfig
from target_model.errors import UserError
from target_model.json_section import Section
from target_model.vision import Grid

IMAGE_TOKEN, VIDEO_TOKEN = "]<]image[>[", "]<]video[>["
IMAGE_START, IMAGE_END = "]<]start of image[>[", "]<]end of image[>["
IMAGE_RULES = "preprocessor_config.json"
# Frames of a video may be larger than a picture: they share no budget.
VIDEO_PIXELS = (4 * 28 * 28, 768 * 28 * 28)
FRAMES_PER_SECOND = 1.0
MAX_FRAMES = 768


@dataclass(frozen=True, eq=False)
class VisionInput:
    """One picture or video, ready for the tower.

    patches   fp32 [N, C], grouped so that the patches of one row stand together
    grids     the segments that the patches form, in order; a picture is one
    rows      placeholders in the prompt = rows the tower makes of it
    digest    of kind, grids and patches: equal digests are equal inputs. Placeholders all have one token id, so
              whatever is shared between prompts by their token ids has to take these digests into the key
    """

    kind: Literal["image", "video"]
    patches: Tensor
    grids: tuple[Grid, ...]
    rows: int
    digest: bytes


@dataclass(frozen=True)
class PixelRules:
    """What a checkpoint says of its pictures: bounds of the area they are resized to, in pixels, mean and deviation of
    each channel.
    """

    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 672 * 672
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    deviation: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @staticmethod
    def read(directory: Path, vision: VisionConfig) -> "PixelRules":
        """From the checkpoint's preprocessor_config.json, where it has one. Raises UserError naming the field."""
        path = directory / IMAGE_RULES
        if not path.exists():
            return PixelRules()
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold a JSON object")
        # The published file names a square size that was never used.
        if values.get("size") == [672, 672]:
            del values["size"]
        return _pixel_rules(Section(values, str(path)), vision)


def _pixel_rules(section: Section, vision: VisionConfig) -> PixelRules:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        section.require(name, (True, None))
    section.require("resample", (Image.Resampling.BICUBIC,))
    section.require("patch_size", (vision.patch_size,))
    section.require("temporal_patch_size", (vision.temporal_patch_size,))
    section.require("merge_size", (vision.spatial_merge_size,))
    size, default = section.section("size"), PixelRules()

    def bound(name: str, edge: str, fallback: int) -> int:
        return section.integer(name) if name in section else size.integer(edge, default=fallback)

    def channels(name: str, fallback: tuple[float, ...]) -> tuple[float, ...]:
        values = section.get(name) or fallback
        if not isinstance(values, list | tuple) or len(values) != vision.num_channels:
            raise UserError(f"{section.name(name)} must hold {vision.num_channels} numbers")
        return tuple(float(value) for value in values)

    return PixelRules(
        bound("min_pixels", "shortest_edge", default.min_pixels),
        bound("max_pixels", "longest_edge", default.max_pixels),
        channels("image_mean", default.mean),
        channels("image_std", default.deviation),
    )


class VisionProcessor:
    """Resizes, normalises and cuts pictures into patches, by the rules of one checkpoint. Safe to share by threads."""

    def __init__(self, vision: VisionConfig, rules: PixelRules):
        # Costs seconds, which those who show the model no pictures need not wait.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.vision, self.rules = vision, rules
        self._frames = Qwen2VLImageProcessorPil(
            image_mean=list(rules.mean),
            image_std=list(rules.deviation),
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=1,  # a frame at a time; frames are paired below
        )

    def image(self, picture: Image.Image) -> VisionInput:
        """A still picture: one frame, shown twice. Raises UserError when it is too long and thin."""
        frames = self._patches([picture], (self.rules.min_pixels, self.rules.max_pixels))
        return self._input("image", *frames, segment_frames=1)

    def video(self, frames: Sequence[Image.Image]) -> VisionInput:
        """Frames of one size (`sample_frames` says which to take), the last one repeated to fill a temporal patch."""
        if not frames or len({frame.size for frame in frames}) != 1:
            raise UserError("a video needs frames, all of one size")
        return self._input("video", *self._patches(frames, VIDEO_PIXELS), segment_frames=self.vision.segment_max_frames)

    def _patches(self, pictures: Sequence[Image.Image], pixels: tuple[int, int]) -> tuple[Tensor, int, int]:
        """Values of each frame's patches [F, N, channels, 1, patch * patch], rows and columns of patches."""
        upright = [ImageOps.exif_transpose(picture).convert("RGB") for picture in pictures]
        try:
            made = self._frames(upright, size={"shortest_edge": pixels[0], "longest_edge": pixels[1]})
        except ValueError as error:
            raise UserError(str(error)) from None
        _, rows, columns = (int(extent) for extent in made["image_grid_thw"][0])
        patches = torch.from_numpy(np.ascontiguousarray(made["pixel_values"]))
        return patches.view(len(pictures), rows * columns, self.vision.num_channels, 1, -1), rows, columns

    def _input(
        self, kind: Literal["image", "video"], frames: Tensor, rows: int, columns: int, segment_frames: int
    ) -> VisionInput:
        together = self.vision.temporal_patch_size
        missing = -len(frames) % together
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1, -1)))
        steps = len(frames) // together
        patches = frames.unflatten(0, (steps, together)).movedim(1, -2).flatten(3).flatten(0, 1)
        # [steps * N, channels, frames * patch * patch]: a patch holds its channels, each with its frames.
        patches = patches.reshape(steps * rows * columns, -1).contiguous()
        starts = range(0, steps, segment_frames)
        grids = tuple((min(segment_frames, steps - start), rows, columns) for start in starts)
        digest = hashlib.sha256(repr((kind, grids)).encode())
        digest.update(patches.numpy())
        return VisionInput(kind, patches, grids, len(patches) // self.vision.spatial_merge_size**2, digest.digest())


def sample_frames(total: int, frames_per_second: float) -> list[int]:
    """Which of a video's `total` frames to show: one a second, evenly spread, at least one and at most 768."""
    wanted = min(max(1, int(total / frames_per_second * FRAMES_PER_SECOND)), total, MAX_FRAMES)
    return [index * total // wanted for index in range(wanted)]


def video_text(video: VisionInput, seconds: Sequence[float], merge: int) -> str:
    """The words that stand for a video in a prompt, special tokens among them: for each temporal patch its time and
    its placeholders. `seconds` holds the time of each frame given.
    """
    steps = sum(frames for frames, _, _ in video.grids)
    rows = video.grids[0][1] * video.grids[0][2] // merge**2
    together = -(-len(seconds) // steps)
    times = [seconds[min(step * together, len(seconds) - 1)] for step in range(steps)]
    return "".join(f"]<]{time:.1f} seconds[>[{IMAGE_START}{VIDEO_TOKEN * rows}{IMAGE_END}" for time in times)

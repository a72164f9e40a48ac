"""Videos that come with a chat: from the URL of a content part to the frames that are shown."""

import io
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from serve.api_errors import refusal
from serve.pictures import ANIMATED, PictureLimits, bytes_of
from target_model.errors import UserError
from target_model.images import VisionInput, VisionProcessor, sample_frames

FRAMES = 20_000  # of a video, shown or not: all up to the last one shown have to be decoded


@dataclass(frozen=True)
class Video:
    """What the tower reads, and when each of the frames shown was, in seconds."""

    input: VisionInput
    seconds: tuple[float, ...]


def load_video(url: str, processor: VisionProcessor, limits: PictureLimits, where: str) -> Video:
    """The video behind a URL, one frame a second of it. ApiError 400 names the field `where` and what is wrong.

    Animated pictures are read by Pillow, everything else by PyAV, where that is installed.
    """
    data = bytes_of(url, limits, where, kind="video")
    if len(data) > limits.size:
        raise refusal(f"the video has {len(data)} bytes, this server takes {limits.size}", where)
    try:
        animation = Image.open(io.BytesIO(data), formats=ANIMATED)
    except Exception:
        animation = None
    try:
        reading = _animation(animation, limits) if animation is not None else _film(data, limits)
        frames, seconds = zip(*reading, strict=True)
        return Video(processor.video(frames), seconds)
    except UserError as error:
        raise refusal(str(error), where) from None
    # Decoders meet hostile bytes with exceptions of every kind; whichever it is, the video is at fault.
    except Exception:
        raise refusal("the video cannot be decoded", where) from None


def _animation(picture: Image.Image, limits: PictureLimits) -> Iterator[tuple[Image.Image, float]]:
    total = picture.n_frames
    _check(total, *picture.size, total, limits)
    ends, end = [], 0.0
    for index in range(total):
        picture.seek(index)
        picture.load()  # some formats only then say how long a frame stays
        end += picture.info.get("duration", 100) / 1000
        ends.append(end)
    rate = total / end if end else float(total)
    for index in _chosen(total, rate, *picture.size, limits):
        picture.seek(index)
        yield picture.convert("RGB"), index / rate


def _film(data: bytes, limits: PictureLimits) -> Iterator[tuple[Image.Image, float]]:
    try:
        import av  # optional, and large
    except ImportError:
        raise UserError("this server has no decoder for such videos (pip install av): send a GIF or WebP") from None
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 0)
        length = container.duration / av.time_base if container.duration else 0.0
        total = stream.frames or int(length * rate)
        if total < 1 or not rate > 0:
            raise UserError("the video does not say how long it is")
        wanted = set(_chosen(total, rate, stream.width, stream.height, limits))
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                yield frame.to_image(), index / rate
            if index >= max(wanted):
                break


def _chosen(total: int, rate: float, width: int, height: int, limits: PictureLimits) -> list[int]:
    chosen = sample_frames(total, rate)
    _check(total, width, height, len(chosen), limits)
    return chosen


def _check(total: int, width: int, height: int, shown: int, limits: PictureLimits) -> None:
    if total > FRAMES:
        raise UserError(f"the video has {total} frames, this server takes {FRAMES}")
    if shown * width * height > 2 * limits.pixels:
        raise UserError(
            f"the {shown} frames to show have {shown * width * height} pixels, this server takes {2 * limits.pixels}"
        )

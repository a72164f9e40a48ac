"""Pictures that come with a chat: from the URL of a content part to an image. Nothing is fetched from the network."""

import base64
import binascii
import io
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image

from serve.api_errors import refusal
from target_model.errors import UserError
from target_model.images import VisionInput, VisionProcessor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ANIMATED = ("PNG", "WEBP", "GIF")  # a JPEG with several pictures in it shows its first


@dataclass(frozen=True)
class PictureLimits:
    """What a server accepts.

    directory: file: URLs may name pictures under it; None: no local files. pixels, size: of one picture, its size in
    bytes. count: pictures of a request.
    """

    directory: Path | None = None
    pixels: int = 50_000_000
    size: int = 64 * 2**20
    count: int = 64


def load_picture(url: str, processor: VisionProcessor, limits: PictureLimits, where: str) -> VisionInput:
    """The picture behind a URL, ready for the model. ApiError 400 names the field `where` and what is wrong."""
    data = bytes_of(url, limits, where)
    if len(data) > limits.size:
        raise refusal(f"the picture has {len(data)} bytes, this server takes {limits.size}", where)
    # Decoders meet hostile bytes with exceptions of every kind; whichever it is, the picture is at fault.
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        frames = picture.n_frames if picture.format in ANIMATED else 1
    except Exception:
        raise refusal(f"this is no picture in one of the formats {', '.join(FORMATS)}", where) from None
    if width * height > limits.pixels:
        raise refusal(f"the picture has {width} x {height} pixels, this server takes {limits.pixels}", where)
    if frames > 1:
        raise refusal(f"an animation of {frames} frames: only still pictures are supported", where)
    try:
        picture.load()
    except Exception as error:
        raise refusal(f"the picture cannot be decoded: {error}", where) from None
    try:
        return processor.image(picture)
    except UserError as error:
        raise refusal(str(error), where) from None


def bytes_of(url: str, limits: PictureLimits, where: str, kind: str = "image") -> bytes:
    """The bytes behind a data: URL of this kind, or a file: URL where the server reads them."""
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _decoded(url, where, kind)
    if scheme == "file":
        return _read(url, limits, where)
    if scheme in ("http", "https"):
        raise refusal("nothing is fetched from the network: send it itself as a data: URL", where)
    raise refusal(f"unknown kind of URL {url[:20]!r}: send it as a data: URL", where)


def _decoded(url: str, where: str, kind: str) -> bytes:
    header, comma, text = url.partition(",")
    if not comma or not header.lower().startswith(f"data:{kind}/") or not header.lower().endswith(";base64"):
        raise refusal(f"must have the form data:{kind}/TYPE;base64,DATA", where)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refusal(f"not valid base64: {error}", where) from None


def _read(url: str, limits: PictureLimits, where: str) -> bytes:
    if limits.directory is None:
        raise refusal("this server reads no local files: send it as a data: URL", where)
    parts = urlsplit(url)
    try:
        # Links are followed first: what counts is where the file really is.
        path = Path(unquote(parts.path)).resolve()
        inside = path.is_relative_to(limits.directory.resolve())
        # One answer for all, so that it tells nothing of files elsewhere.
        if parts.netloc not in ("", "localhost") or not inside or not path.is_file():
            raise refusal("no such file in the directory whose pictures this server reads", where)
        with path.open("rb") as file:
            return file.read(limits.size + 1)
    except (OSError, ValueError):
        raise refusal("the file cannot be read", where) from None

"""Pictures for tests, and the bundled target with its vision tower."""

import base64
import functools
import io

import numpy as np
from PIL import Image

from serve.description import Description
from serve.load import EngineOptions, load_engine
from target_model.model import TargetModel
from target_model.tokenizer import Tokenizer

IMAGE, VIDEO = 4, 5  # placeholders of m3-tiny


@functools.cache
def seeing() -> tuple[TargetModel, Tokenizer, Description]:
    """m3-tiny with its tower."""
    engine, tokenizer, description = load_engine(EngineOptions(draft=None, device="cpu", pages=64, language_only=False))
    return engine.runner.target, tokenizer, description


def picture(width: int = 140, height: int = 112, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(shown: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    shown.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes | Image.Image) -> str:
    data = data if isinstance(data, bytes) else encoded(data)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def user(*urls: str, text: str = "What is this?") -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]

"""What `spec chat` reads from files: pictures that go with a question, and tools that the model may call."""

import base64
import json
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from target_model.errors import UserError


def read_picture(path: str) -> dict[str, Any]:
    """A picture as a part of a message. UserError when it is none."""
    try:
        data = Path(path).expanduser().read_bytes()
        with Image.open(Path(path).expanduser()) as picture:
            kind = Image.MIME[picture.format]
    except (UnidentifiedImageError, KeyError):
        raise UserError(f"{path} is not a picture") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    url = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_tools(path: Path) -> list[dict[str, Any]]:
    """The tools in a JSON file, a list as OpenAI's clients send it. UserError names what is wrong."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--tools {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--tools {path} is not JSON: {error}") from None
    form = '[{"type": "function", "function": {"name": ..., "parameters": ...}}, ...]'
    if not isinstance(tools, list) or not tools:
        raise UserError(f"--tools {path} must hold a list {form}")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"--tools {path}: entry {place} has no function with a name, expected {form}")
    return tools

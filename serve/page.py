"""The page at /: a chat in the browser. One file, served as it is, allowed to talk to this server only."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    html = (files("serve") / "page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(html), "X-Content-Type-Options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)


def _policy(html: str) -> str:
    """Only the page's own style and script, by their hashes; nothing from anywhere else, and no frame around it."""
    hashes = {}
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    allowed = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    nowhere = "; ".join(f"{name} 'none'" for name in ("frame-ancestors", "base-uri", "form-action"))
    return f"default-src 'none'; {allowed}; connect-src 'self'; {nowhere}"

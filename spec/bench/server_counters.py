"""Speculation counters of a server, read from its Prometheus metrics: ours, and others of the same names."""

import asyncio
import re
from dataclasses import dataclass

import httpx

_COUNTER = re.compile(
    r"^\w+?[:_]spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)", flags=re.MULTILINE | re.ASCII
)


@dataclass(frozen=True)
class Drafting:
    """Verify steps, and the drafted tokens that they kept."""

    steps: float
    accepted: float

    @property
    def length(self) -> float | None:
        return round(self.accepted / self.steps + 1, 4) if self.steps else None

    async def change(self, http: httpx.AsyncClient, accepted: int) -> "Drafting | None":
        """What came since. A server counts an answer a moment after its end: `accepted` tokens are waited for, at most
        a second."""
        for _ in range(20):
            now = await read_drafting(http)
            if now is None or now.accepted - self.accepted >= accepted > 0:
                break
            await asyncio.sleep(0.05)
        return now and Drafting(now.steps - self.steps, now.accepted - self.accepted)


async def read_drafting(http: httpx.AsyncClient) -> Drafting | None:
    """The counters so far, summed over their labels; None when the server has none."""
    try:
        response = await http.get("/metrics")
    except httpx.HTTPError:
        return None
    return parse_drafting(response.text) if response.status_code == 200 else None


def parse_drafting(text: str) -> Drafting | None:
    sums: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return Drafting(sums.get("drafts", 0.0), sums.get("accepted_tokens", 0.0)) if sums else None

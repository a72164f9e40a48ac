"""Which pages of the cache are free."""


class PageAllocator:
    """Hands out page ids. Lowest ids first, so a run is reproducible."""

    def __init__(self, pages: int):
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when there are not as many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))

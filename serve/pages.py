"""Which pages of the cache are free, which are in use and by how many sequences, and which keep a prefix for later.

Only whole pages of decided tokens are shared, and sequences write behind their decided tokens: nobody ever writes a
shared page, so none has to be copied.
"""

import hashlib
from array import array
from collections import OrderedDict

from serve.request import Sequence


def prefix_keys(sequence: Sequence, salt: bytes, page_size: int) -> list[bytes]:
    """Keys of all full pages of the sequence's tokens; kept in `sequence.page_keys`, which grows with them.

    A page's key covers everything its cache rows depend on: all tokens up to its end, the images shown there, and
    `salt`, which says what the engine is.
    """
    keys, tokens = sequence.page_keys, sequence.token_ids
    for page in range(len(keys), len(tokens) // page_size):
        start, end = page * page_size, (page + 1) * page_size
        digest = hashlib.blake2b(keys[-1] if keys else salt, digest_size=16)
        digest.update(array("q", tokens[start:end]).tobytes())
        for span in sequence.request.images:
            if span.start < end and start < span.end:
                digest.update(array("q", [span.start, span.end]).tobytes() + span.digest)
        keys.append(digest.digest())
    return keys


class PageAllocator:
    """Hands out page ids, lowest first, so a run is reproducible. free + used + cached = total.

    A page is *used* while sequences refer to it. When the last one lets go, it is *cached* if it was published under a
    prefix key, else *free*. Cached pages are given out again for other content when no free one is left, least
    recently used first.
    """

    def __init__(self, pages: int):
        self.total = pages
        self.evictions = 0
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return sum(count > 0 for count in self._references)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with no content, or None (and nothing taken) when there are not as many."""
        if count > len(self._free) + len(self._cached):
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: list[int]) -> None:
        """Takes one reference off each page. Later pages are evicted first: they are of no use without the earlier."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Says that a used page is full and holds the prefix `key`. The first page published under a key stays it."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def holds(self, key: bytes) -> bool:
        return key in self._page_of

    def take_prefix(self, keys: list[bytes]) -> list[int]:
        """The pages that hold the longest published prefix, each with one more reference."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._references[page] += 1
            self._cached.pop(page, None)
            pages.append(page)
        return pages

    def forget(self) -> None:
        """Makes all cached pages free, and starts counting anew."""
        for page in self._cached:
            del self._page_of[self._key_of.pop(page)]
        self._free = sorted([*self._free, *self._cached], reverse=True)
        self._cached.clear()
        self.evictions = 0

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page

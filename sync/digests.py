"""The digests of a run, taken while it is written."""

import xxhash
from torch import Tensor

from sync.layout import Layout


class RunDigests:
    """Digests bytes in order, as they come to stand: what was written a moment ago is read from the cache, at a fraction of
    what it costs to read gigabytes from memory once more."""

    def __init__(self, layout: Layout, run: Tensor) -> None:
        """`run`: [layout.num_bytes] uint8, in host memory."""
        self._buckets = layout.buckets
        self._bytes = run.numpy().data
        self._state = xxhash.xxh3_128()
        self._ended: list[str] = []
        self.at = 0
        """All before this byte has been digested, and must not change any more."""

    def advance(self, to: int) -> None:
        """All before byte `to` stands."""
        while self.at < to:
            bucket = self._buckets[len(self._ended)]
            stop = min(to, bucket.stop)
            self._state.update(self._bytes[self.at : stop])
            self.at = stop
            if stop == bucket.stop:
                self._ended.append(self._state.hexdigest())
                self._state.reset()

    def all(self) -> tuple[str, ...]:
        """One per bucket, as `Layout.digests` has them; the whole run stands."""
        self.advance(self._buckets[-1].stop if self._buckets else 0)
        return tuple(self._ended)

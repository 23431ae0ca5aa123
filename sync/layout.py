"""Where each tensor of a receiver lies in one flat run of bytes, and how that run is cut into buckets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

from sync.manifest import Manifest

ALIGNMENT = 64
"""Bytes. A cache line, and the widest vector load: a parameter may be re-pointed at its place in the run."""


@dataclass(frozen=True)
class Bucket:
    """The bytes `[start, stop)` of a layout, sent and verified as one."""

    index: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Sender and receiver derive equal layouts from equal arguments, so payload is read by offset, never by order.

    The rule: slots lie in the manifest's order, each at the next multiple of 64 bytes, in the receiver's dtype. Buckets
    cut the run every `bucket_bytes`, wherever that falls, so that a tensor may be larger than a bucket.
    """

    manifest: Manifest
    bucket_bytes: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each slot, and the end of the run."""
        offsets = [0]
        for slot in self.manifest.slots:
            end = offsets[-1] + slot.num_bytes
            offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        """Of the whole run."""
        return self.offsets[-1]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        edges = [*range(0, self.num_bytes, self.bucket_bytes), self.num_bytes]
        return tuple(Bucket(index, start, stop) for index, (start, stop) in enumerate(pairwise(edges)))

    def views(self, run: Tensor) -> list[Tensor]:
        """One tensor per slot, over the bytes of `run` ([num_bytes], uint8)."""
        with torch.inference_mode(False):  # as in `empty_run`
            return [
                run[offset : offset + slot.num_bytes].view(slot.dtype).view(slot.shape)
                for slot, offset in zip(self.manifest.slots, self.offsets, strict=False)
            ]

    def parts(self, run: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with its bytes."""
        for bucket in self.buckets:
            yield bucket, run[bucket.start : bucket.stop]

    def digests(self, run: Tensor) -> tuple[str, ...]:
        """One per bucket; `run` in host memory."""
        return tuple(digest(part) for _, part in self.parts(run))


def digest(part: Tensor) -> str:
    """XXH3-128 of bytes in host memory: against accidents, at the speed of memory. It proves nothing against an attacker."""
    return xxhash.xxh3_128_hexdigest(part.numpy().data)


def seal(digests: Sequence[str]) -> str:
    """One digest for all buckets, in order."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def empty_run(num_bytes: int, device: torch.device, *, zeroed: bool = False) -> Tensor:
    """Memory for a run. Gaps between slots are digested too, so that a sender's run must begin as zeros."""
    # Made while the caller is in inference mode, it could not be written to outside it by a later publish.
    with torch.inference_mode(False):
        make = torch.zeros if zeroed else torch.empty
        return make(num_bytes, dtype=torch.uint8, device=device)

"""A version on its way into an engine, until it is committed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sync.layout import Layout, empty_run
from sync.ticket import Package


class Cargo(Protocol):
    """A whole version that lies somewhere this process can read it. Picklable where it crosses a process."""

    def open(self, layout: Layout) -> "OpenCargo": ...


class OpenCargo(Protocol):
    """A version's bytes, readable until `close`."""

    run: Tensor  # [layout.num_bytes] uint8

    def verify(self, package: Package) -> None:
        """SyncError unless these are the bytes that were sealed, as far as they have travelled."""

    def close(self) -> None: ...


class Parcel(Protocol):
    """One bucket of a version on its way. Picklable."""

    def read(self, into: Tensor) -> None:
        """Write the bucket's bytes ([num_bytes] uint8); raises what went wrong."""


class DerivedTensors(Protocol):
    """Something computed from an engine's weights (packed or quantised copies) that must change with them."""

    def prepare(self, staged: Mapping[str, Tensor]) -> Any:
        """While generation goes on: compute what belongs to the new weights. `staged` must not be kept."""

    def install(self, prepared: Any) -> None:
        """Inside the pause, after the weights have changed; only quick work."""


@dataclass
class Arrival:
    """The bytes of a version beside the weights that the engine runs on."""

    package: Package
    run: Tensor  # [layout.num_bytes] uint8
    missing: set[int]
    """The buckets that have not been verified yet."""
    source: OpenCargo | None
    """Where the bytes lie if not in the receiver's own memory."""
    is_pointed_into: bool = False
    """Whether a remap has begun: parameters lie in it, whatever became of the rest."""
    prepared: list[Any] = field(default_factory=list)
    """For each of the receiver's derived tensors."""

    def receive(self, index: int, parcel: Parcel) -> None:
        """Take one bucket, which is missing until its bytes are those that were sealed."""
        bucket = self.package.layout.buckets[index]
        part = self.run[bucket.start : bucket.stop]
        self.missing.add(index)
        if part.device.type == "cpu":
            parcel.read(part)
            self.package.verify(index, part)
        else:
            host = empty_run(bucket.num_bytes, torch.device("cpu"))
            parcel.read(host)
            self.package.verify(index, host)
            part.copy_(host)
        self.missing.discard(index)

    def prepare(self, derived: Sequence[DerivedTensors]) -> None:
        """Once nothing is missing: what belongs to these weights, of everything that is derived."""
        self.prepared = []
        if derived:
            layout = self.package.layout
            named = {
                name: view
                for slot, view in zip(layout.manifest.slots, layout.views(self.run), strict=True)
                for name in slot.names
            }
            self.prepared = [each.prepare(named) for each in derived]


def memory_for(layout: Layout) -> Tensor:
    """Where the engine's weights are, so that the pause holds one copy on the device; else in pinned host memory."""
    device = layout.manifest.device
    if device.type == "cuda":
        with suppress(torch.cuda.OutOfMemoryError):
            return empty_run(layout.num_bytes, device)
        return empty_run(layout.num_bytes, torch.device("cpu")).pin_memory()
    return empty_run(layout.num_bytes, device)

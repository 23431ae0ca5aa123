"""Whole weights out of a model whose ranks may hold shards of them, a bucket at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sync import TensorSpec
from sync.sources import Export, merged_exports
from trainer_adapters.errors import AdapterError

Bucket = list[tuple[str, Tensor]]
"""Whole tensors under the engine's names. They stay as they are while later buckets are gathered."""
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Makes parameters whole, in place, for the length of a `with`, as `deepspeed.zero.GatheredParameters` does."""


class Reader(Protocol):
    """How one kind of model gives its weights. The order of tensors is that of the model's modules, so every rank has the
    same; every rank constructs the reader and exhausts `buckets`."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Of every tensor when whole. Communicates nothing."""

    def buckets(self, dtype: torch.dtype | None, max_bytes: int) -> Iterator[Bucket]:
        """Every tensor; floating-point ones as `dtype` if that is given. The gather of a bucket is complete on this rank
        before the bucket is handed out, so a receiver that is slow holds up no collective under way."""


class TensorReader:
    """Plain tensors, handed out as they are, and DTensors (FSDP2), gathered one at a time; a model may have both."""

    def __init__(self, model: nn.Module, adapter: str | None) -> None:
        self._model = model
        self._adapter = adapter

    def specs(self) -> Mapping[str, TensorSpec]:
        return {export.name: export.spec for export in self._exports()}

    def buckets(self, dtype: torch.dtype | None, max_bytes: int) -> Iterator[Bucket]:
        for exports in split(self._exports(), max_bytes):
            yield [
                (export.name, export.compute([whole(part) for part in export.parts], target_dtype(export, dtype)))
                for export in exports
            ]

    def _exports(self) -> list[Export]:
        # Read anew each time: a trainer may have replaced a parameter since. The state dict that this reads also makes
        # FSDP2 put its shards back where a forward left low-precision copies of the whole in their place.
        exports = merged_exports(self._model, self._adapter)
        for export in exports:
            if any(part.is_meta for part in export.parts):
                raise AdapterError(
                    f"{export.name} is on the meta device, as offloaded weights are; load the model fully"
                )
        return exports


class PartitionReader:
    """ZeRO-3: parameters that are empty outside `gather`, which gets those of a whole bucket at once."""

    def __init__(self, model: nn.Module, adapter: str | None, gather: Gather) -> None:
        self._model = model
        self._adapter = adapter
        self._gather = gather

    def specs(self) -> Mapping[str, TensorSpec]:
        return {export.name: export.spec for export in merged_exports(self._model, self._adapter)}

    def buckets(self, dtype: torch.dtype | None, max_bytes: int) -> Iterator[Bucket]:
        for exports in split(merged_exports(self._model, self._adapter), max_bytes):
            partitioned = {id(part): part for export in exports for part in export.parts if is_partitioned(part)}
            with self._gather(list(partitioned.values())):
                bucket = [(export.name, copied(export, dtype)) for export in exports]
            yield bucket


def split(exports: Sequence[Export], max_bytes: int) -> list[list[Export]]:
    """The exports in their order, in buckets of at most `max_bytes` when whole; a larger one has a bucket of its own."""
    buckets: list[list[Export]] = []
    room = 0
    for export in exports:
        size = torch.Size(export.spec.shape).numel() * export.spec.dtype.itemsize
        if not buckets or size > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(export)
        room -= size
    return buckets


def target_dtype(export: Export, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor travels as: `dtype` takes the place of a floating-point type only."""
    own = export.base.dtype
    return own if dtype is None or not own.is_floating_point else dtype


def copied(export: Export, dtype: torch.dtype | None) -> Tensor:
    """The engine's tensor, in memory that is still there when the parts, now whole, are sharded again."""
    result = export.compute(export.parts, target_dtype(export, dtype))
    return result.clone() if result.data_ptr() == export.base.data_ptr() else result


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor, complete; any other tensor as it is. Collective over the DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh_device = tensor.device_mesh.device_type
    with torch.no_grad():
        # Shards may be offloaded, and the backend of a GPU mesh moves no bytes of a CPU.
        full: Tensor = tensor.to(mesh_device).full_tensor()  # type: ignore[attr-defined]
    return full


def is_partitioned(tensor: Tensor) -> bool:
    """Whether ZeRO-3 holds the tensor: the attribute that it adds is the only sign of it."""
    return hasattr(tensor, "ds_shape")

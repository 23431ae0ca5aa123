"""The weights of a model in training, as a source for `WeightSync.publish`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from sync import TensorSpec
from trainer_adapters.errors import AdapterError
from trainer_adapters.fsdp1 import UnitReader
from trainer_adapters.gather import Gather, PartitionReader, Reader, TensorReader, is_partitioned


class Unwraps(Protocol):
    """The part of `accelerate.Accelerator` that is needed."""

    def unwrap_model(self, model: nn.Module, *, keep_torch_compile: bool) -> Any: ...


class PolicyView:
    """A WeightSource over a model in training: plain, `torch.compile`d, under DDP, FSDP1, FSDP2 (`fully_shard`) or
    ZeRO-3, with or without LoRA adapters (see `sync.MergedLora` for those). Each parameter and persistent buffer
    comes whole, once, under the name that the bare model gives it. Reads only; the model is never altered.

    In a run of several ranks every rank makes the view, and takes every tensor of every `tensors()`, also a rank that
    sends nothing and one whose sending failed: where weights are sharded, each bucket is a collective. Not inside a
    forward or backward, and no rank may run one beside it.

    Extra memory: at most two buckets, the one in hand and the one being gathered. A tensor larger than `bucket_bytes`
    (and, under FSDP1, a unit) is a bucket of its own. Plain tensors that need no cast are handed out as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Unwraps | None = None,
        dtype: torch.dtype | None = None,
        *,
        adapter: str | None = None,
        bucket_bytes: int = 256 << 20,
        gather: Gather | None = None,
    ) -> None:
        """`accelerator` takes off what it put around the model. `dtype` casts floating-point tensors on the way, so that
        a bf16 engine's staging receives half the bytes. `adapter` names a LoRA adapter that counts instead of the active
        ones. `gather` is for ZeRO-3; None: `deepspeed.zero.GatheredParameters`.

        Raises AdapterError for a setting that cannot work, and ManifestError or SyncError for a model that cannot be
        published: quantised, with adapters that cannot be merged, or with a wrapper that is not known.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise AdapterError(f"dtype must be a floating-point type or None, got {dtype}")
        if bucket_bytes < 1:
            raise AdapterError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self._reader = _reader_of(model, accelerator, adapter, gather)
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self.specs()  # a model that cannot be published is refused here, and not after the first step

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: self._as_sent(spec) for name, spec in self._reader.specs().items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._reader.buckets(self._dtype, self._bucket_bytes):
            bucket.reverse()
            while bucket:  # emptied while it is handed out, so that a third bucket never exists
                yield bucket.pop()

    def _as_sent(self, spec: TensorSpec) -> TensorSpec:
        if self._dtype is None or not spec.dtype.is_floating_point:
            return spec
        return TensorSpec(shape=spec.shape, dtype=self._dtype)


def _reader_of(model: nn.Module, accelerator: Unwraps | None, adapter: str | None, gather: Gather | None) -> Reader:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return UnitReader(model, adapter)  # not unwrapped: the outermost instance shards weights too
    if accelerator is not None:
        model = accelerator.unwrap_model(model, keep_torch_compile=False)
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        return PartitionReader(model, adapter, gather if gather is not None else _gather_by_deepspeed)
    return TensorReader(model, adapter)


def _gather_by_deepspeed(parameters: Any) -> AbstractContextManager[object]:
    # Not accelerate's wrapper of it, which gathers nothing where the model was not built under ZeRO-3's own init.
    import deepspeed

    gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)
    return gathered

"""Which tensors of a trainer's module make up each tensor of the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sync.errors import SyncError
from sync.manifest import Held, TensorSpec
from sync.sources.names import without_inner_wrappers


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How a tensor of the engine is computed from a base tensor and the factors of its adapters."""

    factors: tuple[Tensor, ...]
    """The trainer's live tensors, besides the base; whole or sharded."""
    scales: tuple[float, ...]
    compute: Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]
    """(base, factors, scales), all whole, to a fresh tensor in the base's precision or a higher one; writes to none."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """One tensor of the engine. Its shape and dtype are those of the base."""

    name: str
    """As the engine calls it."""
    base: Tensor
    """The trainer's live tensor; whole or sharded."""
    merge: Merge | None = None
    """None: the base as it is."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that has to be whole before `compute`."""
        return (self.base, *(self.merge.factors if self.merge is not None else ()))

    @property
    def spec(self) -> TensorSpec:
        """Of the whole tensor, also where this rank holds a shard (DTensor, ZeRO-3)."""
        # ZeRO-3 leaves an empty tensor in place of a parameter and puts its shape beside it.
        shape: Sequence[int] = getattr(self.base, "ds_shape", self.base.shape)
        return TensorSpec(shape=tuple(shape), dtype=self.base.dtype)

    def compute(self, whole: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The engine's tensor in `dtype`, rounded once, from the whole `parts`. It may be the base itself."""
        with torch.no_grad():
            base = whole[0].detach()
            if self.merge is None:
                return base.to(dtype)
            return self.merge.compute(base, [factor.detach() for factor in whole[1:]], self.merge.scales).to(dtype)


def exports_of(
    held: Sequence[Held], names: Mapping[str, str | None], merges: Mapping[str, Merge] | None = None
) -> list[Export]:
    """What a module with the tensors `held` offers, in their order. `names` has the canonical name of each, `merges` the
    adapters by the name of the base that they change, without the wrappers in it.

    Tied tensors are offered once, unless an adapter on one of them unties them: then each under its own name. Raises
    SyncError for quantised parameters, and for an adapter whose base is not in `held`.
    """
    merges = merges or {}
    unused = set(merges)
    exports: list[Export] = []
    for group in held:
        seen: set[Any] = set()
        for name in group.names:
            canonical = names[name]
            merge = merges.get(without_inner_wrappers(name))
            unused.discard(without_inner_wrappers(name))
            key = None if merge is None else _memory_of(merge)
            if canonical is not None and key not in seen:
                seen.add(key)
                _check_not_quantised(canonical, group.tensor)
                exports.append(Export(name=canonical, base=group.tensor, merge=merge))
    if unused:
        raise SyncError(f"the adapter on {min(unused)} would be lost, since its base is not among the tensors at hand")
    return exports


def _memory_of(merge: Merge) -> tuple[Any, ...]:
    """Equal for adapters that are tied: two parameters that are views of one memory."""
    return (frozenset(_address(factor) for factor in merge.factors), merge.scales)


def _address(tensor: Tensor) -> int:
    # Shards have no memory of their own that would tell tied ones from others.
    return id(tensor) if isinstance(tensor, DTensor) else tensor.untyped_storage().data_ptr() or id(tensor)


def _check_not_quantised(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        return
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2 and not _is_of_quantiser(tensor):
        return
    raise SyncError(
        f"{name} is quantised ({type(tensor).__name__}, {tensor.dtype}); its bytes are no weights of an engine: load the "
        "trainer's model without quantization"
    )


def _is_of_quantiser(tensor: Tensor) -> bool:
    # Their tensors may claim a floating-point dtype: that of the weights before, or of the storage.
    return any(base.__module__.partition(".")[0] in {"bitsandbytes", "torchao"} for base in type(tensor).__mro__)

"""What a receiver holds, and whether what a source offers is the same."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from rollout.model.weights import by_identity
from sync.errors import ManifestError, SyncError

SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Numbers that mean nothing without a scale beside them."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One offered tensor, before a byte of it is gathered."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorSpec":
        return TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor of a receiver, under every name that aliases it: tied weights are one slot with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(held: "Held") -> "Slot":
        tensor = held.tensor
        return Slot(names=held.names, shape=tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True)
class Manifest:
    """The slots of one receiver, in the order of `held_tensors`.

    The rule: every slot is offered under at least one of its names, no other name is offered, and shapes are equal. The
    dtype may differ, since staging casts to the receiver's, but not between floating point and integers, where a cast
    would destroy the weights. Breaking it raises ManifestError with the whole difference.
    """

    slots: tuple[Slot, ...]

    @staticmethod
    def of(module: nn.Module) -> "Manifest":
        """SyncError for a quantised module: a cast is not a quantisation, and would destroy the weights."""
        _refuse_quantised(module)
        return Manifest(tuple(Slot.of(held) for held in held_tensors(module)))

    @property
    def device(self) -> torch.device:
        """Where the receiver's tensors lie: an engine is on one device."""
        return self.slots[0].device if self.slots else torch.device("cpu")

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The slot of each name."""
        return {name: index for index, slot in enumerate(self.slots) for name in slot.names}

    def check(self, offered: Mapping[str, TensorSpec]) -> None:
        """Check a whole offer."""
        diff = self._mismatches(offered)
        diff["missing"] = [_describe(slot) for slot in self.slots if not any(name in offered for name in slot.names)]
        _raise_if_any(diff)

    def check_arrival(self, name: str, spec: TensorSpec) -> int:
        """Check one tensor of an offer that is not known beforehand, and return the index of its slot."""
        _raise_if_any(self._mismatches({name: spec}))
        return self.index[name]

    def check_coverage(self, arrived: Iterable[int]) -> None:
        """Check, at the end of such an offer, that a tensor has arrived for every slot."""
        indexes = set(arrived)
        _raise_if_any({"missing": [_describe(slot) for i, slot in enumerate(self.slots) if i not in indexes]})

    def _mismatches(self, offered: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
        diff: dict[str, list[str]] = {"unexpected": [], "wrong shape": [], "wrong dtype": []}
        for name, spec in offered.items():
            if name not in self.index:
                diff["unexpected"].append(f"{name} {list(spec.shape)}")
                continue
            slot = self.slots[self.index[name]]
            if spec.shape != slot.shape:
                diff["wrong shape"].append(f"{name}: offered {list(spec.shape)}, the engine holds {list(slot.shape)}")
            if spec.dtype.is_floating_point != slot.dtype.is_floating_point:
                diff["wrong dtype"].append(f"{name}: offered {spec.dtype}, the engine holds {slot.dtype}")
        return diff


@dataclass(frozen=True)
class Held:
    """One tensor of a module, under every name that aliases it."""

    names: tuple[str, ...]
    tensor: Tensor


def held_tensors(module: nn.Module) -> list[Held]:
    """The parameters and persistent buffers of a module, the live objects, each once: names that alias one object form
    a group. Raises SyncError for state that is not a tensor (`get_extra_state`), which no copy could carry."""
    held = []
    for names, tensor in by_identity(module.state_dict(keep_vars=True)):
        if not isinstance(tensor, Tensor):
            raise SyncError(
                f"{names[0]} is a {type(tensor).__name__}, only tensors can be synced; drop it from the module"
            )
        held.append(Held(names, tensor))
    return held


def _refuse_quantised(module: nn.Module) -> None:
    reason = None
    if getattr(module, "is_quantized", False):
        reason = f"{type(module).__name__} is quantised"
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and (tensor.is_quantized or tensor.dtype in SCALED_DTYPES):
            reason = f"{name} is quantised ({tensor.dtype})"
    if reason is not None:
        raise SyncError(
            f"{reason}, and a trainer's weights cannot be cast into it; host the engine in float32, bfloat16 or float16 "
            "(for a quantised checkpoint: dequantize it when loading)"
        )


def _describe(slot: Slot) -> str:
    first, *aliases = slot.names
    tied = f" (or {', '.join(aliases)}, tied to it)" if aliases else ""
    return f"{first} {list(slot.shape)}{tied}"


def _raise_if_any(diff: Mapping[str, list[str]]) -> None:
    shown_per_kind = 10
    lines: list[str] = []
    for kind, entries in diff.items():
        lines += [f"  {kind}: {entry}" for entry in entries[:shown_per_kind]]
        if len(entries) > shown_per_kind:
            lines.append(f"  {kind}: {len(entries) - shown_per_kind} more")
    if lines:
        raise ManifestError(
            "the source does not offer what the engine holds; offer each tensor under its name in "
            "engine.model.state_dict(), a tied one under any of its names:\n" + "\n".join(lines)
        )

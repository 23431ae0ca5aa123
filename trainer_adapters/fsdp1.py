"""Whole weights out of a model under FSDP1, a unit at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from sync import TensorSpec
from sync.sources import Export, Held, adapters_in_use, canonical_names, exports_of, merges_of, tuner_modules
from trainer_adapters.errors import AdapterError
from trainer_adapters.gather import Bucket, copied

Unit = tuple[FullyShardedDataParallel | None, dict[str, nn.Module]]
"""An FSDP instance and the modules, by name, whose tensors it shards; None: those outside every instance."""
Result = TypeVar("Result")


class UnitReader:
    """FSDP1: parameters are views of one flat, sharded tensor outside `summon_full_params`. A bucket is a unit, however
    large. Shapes are learnt at construction, by gathering each unit, since a shard does not tell them."""

    def __init__(self, model: nn.Module, adapter: str | None) -> None:
        self._model = model
        self._adapter = adapter
        self._units = units_of(model)
        names = [name for held in self._in_each(_held) for group in held for name in group.names]
        self._names = canonical_names(names, adapters=adapters_in_use(model, adapter))
        self._specs = {
            name: spec
            for pairs in self._in_each(lambda unit: [(export.name, export.spec) for export in self._exports(unit)])
            for name, spec in pairs
        }

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def buckets(self, dtype: torch.dtype | None, max_bytes: int) -> Iterator[Bucket]:
        return self._in_each(lambda unit: [(export.name, copied(export, dtype)) for export in self._exports(unit)])

    def _in_each(self, read: Callable[[dict[str, nn.Module]], Result]) -> Iterator[Result]:
        """What `read` makes of each unit's modules while that unit is whole. It is sharded again before its result is
        handed out: the trainer may run, or fail, between two results."""
        for instance, modules in self._units:
            summoned: AbstractContextManager[object] = nullcontext()
            if instance is not None:
                summoned = FullyShardedDataParallel.summon_full_params(instance, recurse=False, writeback=False)
            with summoned:
                result = read(modules)
            yield result

    def _exports(self, modules: dict[str, nn.Module]) -> list[Export]:
        held = _held(modules)
        tuners = {name: tuner for name, tuner in tuner_modules(self._model).items() if name in modules}
        exports = exports_of(held, self._names, merges_of(tuners, self._adapter))
        own = {id(group.tensor) for group in held}
        for export in exports:
            if any(id(part) not in own for part in export.parts):
                raise AdapterError(
                    f"the adapter on {export.name} lies in another FSDP unit than its base, so the two are never whole "
                    "together; wrap whole transformer layers, or use FSDP2 (fully_shard)"
                )
        return exports


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model, outermost first: an inner one that is gathered first would take itself for the root."""
    units: dict[str | None, Unit] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FullyShardedDataParallel):
            units[name] = (module, {})
        else:
            owners = [unit for unit in units if unit is not None and (not unit or f"{name}.".startswith(f"{unit}."))]
            owner = max(owners, key=len, default=None)
            units.setdefault(owner, (None, {}))[1][name] = module
    return list(units.values())


def _held(modules: dict[str, nn.Module]) -> list[Held]:
    """The modules' own parameters and persistent buffers, each once under all its names. FSDP1 hooks `state_dict()`, so
    this reads the modules one by one."""
    groups: dict[int, Held] = {}
    for name, module in modules.items():
        tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for buffer_name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer_name not in module._non_persistent_buffers_set:
                tensors[buffer_name] = buffer
        for leaf, tensor in tensors.items():
            full_name = f"{name}.{leaf}" if name else leaf
            known = groups.get(id(tensor), Held((), tensor))
            groups[id(tensor)] = Held((*known.names, full_name), tensor)
    return list(groups.values())

"""Where new weights come from."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from sync.errors import SyncError
from sync.manifest import TensorSpec
from sync.sources.lora import ModuleWeights
from sync.sources.names import canonical_names


@runtime_checkable
class WeightSource(Protocol):
    """Weights that can say what they are before they are gathered, so that a mismatch costs nothing."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each tensor, by the name it has in the engine's module. Gathers nothing."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors that `specs` promised, in any order, each complete when it is handed out."""


Source = nn.Module | Mapping[str, Tensor] | WeightSource | Iterable[tuple[str, Tensor]]
"""All that `publish` takes."""


class TensorMap:
    """A WeightSource over tensors at hand."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        self._tensors = tensors

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec.of(tensor) for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


def as_source(source: Source) -> WeightSource | Iterable[tuple[str, Tensor]]:
    """The source as a WeightSource where its names are known beforehand, else the bare iterable that it is. A module
    offers each of its parameters and persistent buffers once, as the bare module names it, with adapters merged; of a dict
    the names are taken likewise, and adapters are refused, since how they scale is not in it."""
    if isinstance(source, nn.Module):
        return ModuleWeights(source)
    if isinstance(source, Mapping):
        return TensorMap(_under_bare_names(source))
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise SyncError(
            f"cannot publish a {type(source).__name__}; give a module, a dict of tensors, a WeightSource, or an "
            "iterable of (name, tensor)"
        )
    return source


def named_tensors(offer: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The pairs of an offer, each checked as it arrives. Raises SyncError for what is no (name, tensor)."""
    for item in offer:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise SyncError(f"an iterable source must give (name, tensor) pairs, got a {type(item).__name__}")
        name, tensor = item
        _check_tensor(name, tensor)
        yield name, tensor


def _under_bare_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name in tensors:
        if not isinstance(name, str):
            raise SyncError(f"a tensor's name must be a string, got {name!r}")
    offered: dict[str, Tensor] = {}
    for name, bare in canonical_names(tensors).items():
        if bare is None:
            raise SyncError(
                f"{name} belongs to an adapter, which an engine does not have; publish the model itself, or "
                "sync.MergedLora(model), so that it is merged on the way"
            )
        offered[bare] = tensors[name]
    return offered


def _check_tensor(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise SyncError(f"a tensor's name must be a string, got {name!r}")
    if not isinstance(tensor, Tensor):
        raise SyncError(f"only tensors can be published, {name} is a {type(tensor).__name__}")

"""The weights of a model in training, as a source for `WeightSync.publish`."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sync import TensorSpec
from sync.manifest import held_tensors
from trainer_adapters.errors import AdapterError


class PolicyView:
    """A WeightSource over a plain or compiled module: each parameter and persistent buffer once, under the module's own
    names, without the prefix of `torch.compile`. Reads only; the model is never altered.

    `dtype` casts floating-point tensors on the way, so that a bf16 engine's staging receives half the bytes.

    Models whose parameters are wrapped, sharded or composed elsewhere (DDP, FSDP, PEFT, DeepSpeed) are refused with
    AdapterError: their tensors are not the weights that an engine runs on.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise AdapterError(f"dtype must be a floating-point type or None, got {dtype}")
        _refuse_wrapped(model)
        self._model = model
        self._dtype = dtype

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=self._dtype_of(tensor))
            for name, tensor in self._named_tensors()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named_tensors():
            yield name, tensor.detach().to(self._dtype_of(tensor))

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # Read anew each time: a trainer may have replaced a parameter since.
        for held in held_tensors(self._model):
            yield _without_compile_prefix(held.names[0]), held.tensor

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if self._dtype is None or not tensor.is_floating_point() else self._dtype


def _without_compile_prefix(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers = (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for module in model.modules():
        # PEFT and DeepSpeed are optional, so their classes are known by the package that defines them.
        packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        if isinstance(module, wrappers) or packages & {"peft", "deepspeed"}:
            raise AdapterError(
                f"PolicyView reads plain modules only, got a {type(module).__name__}; pass the module inside it if "
                "that holds whole weights (ddp.module), or publish whole tensors under the engine's names as a dict"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise AdapterError(
                f"PolicyView reads whole tensors only, {name} is sharded (DTensor); publish an iterable of "
                "(name, parameter.full_tensor()) instead"
            )

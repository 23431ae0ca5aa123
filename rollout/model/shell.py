"""The engine's own module over somebody else's Parameters, and the watch that tells when those change.

The engine must not run the trainer's module: upstream switches its attention, puts it in eval mode and writes to its
config during every forward, which silently corrupts a forward of the trainer beside it. So the engine builds a second
module of the same class and gives it the very same Parameter objects.
"""

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout.errors import InvalidRequestError
from rollout.manager.models import is_tensor_parallel
from rollout.model.kernels import kernels
from rollout.model.linear import adopt_linear_layers
from rollout.model.norms import adopt_norms
from rollout.model.probe import Probe, start_on
from rollout.model.weights import weights_of


def build_shell(model: PreTrainedModel, *, copy_weights: bool) -> PreTrainedModel:
    """A second module in eval mode with its own config and rotary tables, over `model`'s Parameters and persistent
    buffers (`copy_weights=False`) or over clones of them. Tied weights stay tied. `model` is not altered.

    Raises InvalidRequestError for what cannot be hosted: wrapped, sharded (FSDP2), tensor-parallel or offloaded models, encoder-decoders,
    modules whose structure no longer follows from their config.
    """
    _check_hostable(model)
    with torch.device("meta"):
        shell = type(model)(deepcopy(model.config))
    state = model.state_dict(keep_vars=True)
    if copy_weights:
        clones = {id(tensor): _clone(tensor) for tensor in state.values()}
        state = {name: clones[id(tensor)] for name, tensor in state.items()}
    try:
        shell.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise InvalidRequestError(
            f"{type(model).__name__} has parameters that do not follow from its config, so no second module can be "
            f"built over them; pass the model as its class makes it (PEFT: {_PEFT_REMEDY}): {error}"
        ) from None
    _copy_transient_buffers(model, shell)
    shell.generation_config = deepcopy(model.generation_config)
    for parameter in shell.parameters():
        if parameter.device.type == "meta":
            raise InvalidRequestError("some parameters are on the meta device; load the model fully before hosting it")
    if shell.device.type == "cpu":
        adopt_linear_layers(shell, kernels())
        adopt_norms(shell, kernels())
    shell.eval()
    return shell


class WeightWatch:
    """Notices weights that change, move or are replaced.

    It sees in-place operations (by their version counters), re-pointed `.data`, replaced Parameters, and writes that move
    no counter (through `.data`, or by torch's fused optimizers) where they reach the one element per tensor that it
    remembers: an optimizer's step reaches nearly all of them. On a GPU it sees the last kind a step or two late, for no
    step waits for it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = weights_of(module)
        self._names = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
        self._forms = [(t.shape, t.dtype) for t in self._weights.values()]
        self._probe = Probe(self._weights.values(), start_on(next(module.parameters()).device))
        self.record()

    def record(self) -> None:
        """Takes the present state as the right one."""
        self._counters = [t._version for t in self._weights.values()]
        self.record_addresses()
        self._probe.record()

    def record_addresses(self) -> None:
        """Takes only the present addresses as the right ones."""
        self._addresses = [t.data_ptr() for t in self._weights.values()]

    def changed(self) -> str | None:
        """The name of a weight that is not as recorded, or None."""
        for (name, tensor), counter, address in zip(
            self._weights.items(), self._counters, self._addresses, strict=True
        ):
            if tensor._version != counter or tensor.data_ptr() != address:
                return name
        if self._probe.differs():
            return "a weight (by a fused optimizer, or through .data)"
        return None

    def replaced(self) -> str | None:
        """The name of a weight that is another object, or has another shape or dtype, or None."""
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if id(tensor) != self._names.get(name):
                return name
        for (name, tensor), form in zip(self._weights.items(), self._forms, strict=True):
            if (tensor.shape, tensor.dtype) != form:
                return name
        return None

    def moved(self) -> str | None:
        """The name of a weight that lies elsewhere, or None."""
        for (name, tensor), address in zip(self._weights.items(), self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return name
        return None


_PEFT_REMEDY = (
    "make the engine with copy_weights=True from the base model before get_peft_model, and publish "
    "PolicyView(peft_model) to it"
)


def _check_hostable(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InvalidRequestError(
            f"the model must be a transformers PreTrainedModel, got {type(model).__name__}; unwrap it first "
            f"(DDP: model.module, torch.compile: model._orig_mod, PEFT: {_PEFT_REMEDY})"
        )
    if model.config.is_encoder_decoder:
        raise InvalidRequestError(f"{type(model).__name__} is an encoder-decoder; only decoder-only models are hosted")
    if not model.can_generate():
        raise InvalidRequestError(f"{type(model).__name__} has no language-model head; use its ForCausalLM class")
    if is_tensor_parallel(model):
        raise InvalidRequestError("tensor-parallel models are not supported; load the model on one device")
    for name, parameter in model.named_parameters():
        if _is_distributed(parameter):
            raise InvalidRequestError(
                f"{name} is spread over several processes (a DTensor, as FSDP2 makes them), and an engine computes with whole "
                "ones; give it a model of its own and publish to that with sync.WeightSync"
            )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise InvalidRequestError(f"all parameters must be on one real device, got {sorted(map(str, devices))}")
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise InvalidRequestError(
                f"{name} was made under torch.inference_mode and cannot be watched or updated; load the model outside it"
            )


def _is_distributed(tensor: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # not in every build of torch

    return isinstance(tensor, DTensor)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(clone, requires_grad=False) if isinstance(tensor, nn.Parameter) else clone


def _copy_transient_buffers(model: nn.Module, shell: nn.Module) -> None:
    # Buffers outside the state dict (rotary tables) stayed on meta; sharing them would let one module's dynamic
    # rescaling change the other's positions.
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name not in persistent:
            owner, _, leaf = name.rpartition(".")
            shell.get_submodule(owner).register_buffer(leaf, buffer.detach().clone(), persistent=False)
    # RoPE modules keep a second, plain-attribute reference to their first table, to go back to it after rescaling.
    for ours, theirs in zip(shell.modules(), model.modules(), strict=True):
        for attribute, value in vars(ours).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(ours, attribute, getattr(theirs, attribute).detach().clone())

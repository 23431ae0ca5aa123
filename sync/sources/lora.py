"""Weights of a model with LoRA adapters (PEFT), merged on the way to the engine."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sync.errors import SyncError
from sync.manifest import TensorSpec, held_tensors
from sync.sources.exports import Export, Merge, exports_of
from sync.sources.names import canonical_names, without_inner_wrappers

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


class ModuleWeights:
    """A WeightSource over a whole module, bare or inside DDP or `torch.compile`: each parameter and persistent buffer once,
    under the name that the bare module gives it; adapters as in `MergedLora`.

    Raises SyncError, in `specs()` as in `tensors()`, for quantised or sharded weights (`trainer_adapters.PolicyView`
    gathers those), and for adapters that cannot be merged.
    """

    def __init__(self, module: nn.Module, adapter: str | None = None) -> None:
        self._module = module
        self._adapter = adapter

    def specs(self) -> Mapping[str, TensorSpec]:
        return {export.name: export.spec for export in self._exports()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for export in self._exports():
            yield export.name, export.compute(export.parts, export.base.dtype)

    def _exports(self) -> list[Export]:
        # Made anew each time: the trainer may have switched, scaled, merged or disabled adapters since.
        exports = merged_exports(self._module, self._adapter)
        for export in exports:
            if any(isinstance(part, DTensor) or hasattr(part, "ds_shape") for part in export.parts):
                raise SyncError(
                    f"{export.name} is sharded; publish trainer_adapters.PolicyView(model), which gathers it"
                )
        return exports


class MergedLora(ModuleWeights):
    """A WeightSource over a model with LoRA adapters, bare or inside DDP or `torch.compile`: each base tensor under the
    name that it has without the adapter, `W + scale * (B @ A)` where there is one.

        weight_sync.publish(MergedLora(peft_model))

    Computed tensor by tensor, in float32 or the base's dtype if that is wider, into fresh memory: the trainer's tensors
    are read only, since merging into them and out again would round them each time. The result has the base's dtype.

    The rule is what the trainer's forward runs: the active adapters (several are added up), each layer's own `scaling`,
    the copies under `modules_to_save`, biases trained with the adapter, DoRA on linear layers. An adapter that is merged
    already is not added again. `adapter` names one that counts instead of the active ones.

    An adapter on one of two tied tensors (`embed_tokens` but not `lm_head`) unties them in the trainer's forward, so both
    are offered, and an engine that ties them refuses: give it a model with `tie_word_embeddings=False`.

    Raises SyncError, in `specs()` as in `tensors()`: for a disabled adapter, one that is unknown or merged with others,
    quantised or sharded base weights (PolicyView gathers those), and for layers of another kind than these.
    """

    def __init__(self, module: nn.Module, adapter: str | None = None) -> None:
        super().__init__(module, adapter)
        if not tuner_modules(module):
            raise SyncError(f"{type(module).__name__} has no adapter layers; publish the module itself")
        self._exports()


def merged_exports(module: nn.Module, adapter: str | None = None) -> list[Export]:
    """Everything that `module` offers to an engine, with or without adapters in it. Raises as MergedLora does."""
    held = held_tensors(module)
    names = canonical_names((name for group in held for name in group.names), adapters=adapters_in_use(module, adapter))
    return exports_of(held, names, merges_of(tuner_modules(module), adapter))


def tuner_modules(module: nn.Module) -> Mapping[str, Any]:
    """PEFT's layers in a module, by name: those with an adapter and those that hold a trained copy."""
    if sys.modules.get("peft") is None:  # then nothing of it can be in the module, and importing it takes seconds
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return {name: sub for name, sub in module.named_modules(remove_duplicate=False) if isinstance(sub, kinds)}


def adapters_in_use(module: nn.Module, adapter: str | None = None) -> set[str] | None:
    """The names of the adapters that count; None where the module has none. Raises SyncError for `adapter` if it is
    unknown, and for adapters that are disabled."""
    tuners = tuner_modules(module)
    if not tuners:
        return None
    known = {name for tuner in tuners.values() for name in _adapters_of(tuner)}
    if adapter is not None:
        if adapter not in known:
            raise SyncError(f"there is no adapter {adapter!r}; the model has {', '.join(sorted(known))}")
        return {adapter}
    disabled = next((name for name, tuner in tuners.items() if tuner.disable_adapters), None)
    if disabled is not None:
        raise SyncError(
            f"the adapter on {disabled} is disabled, so the model runs without it; publish outside disable_adapter(), or "
            "name the adapter to merge"
        )
    return {name for tuner in tuners.values() for name in tuner.active_adapters}


def merges_of(tuners: Mapping[str, Any], adapter: str | None = None) -> Mapping[str, Merge]:
    """How each base tensor with an adapter is merged, by its name without the wrappers inside it, for some or all of
    `tuner_modules`. Raises SyncError for what cannot be merged right."""
    merges: dict[str, Merge] = {}
    for name, tuner in tuners.items():
        layer = _lora_layer(name, tuner)
        used = [] if layer is None else _to_merge(name, layer, adapter)
        if layer is not None and used:
            merges[without_inner_wrappers(f"{name}.weight")] = _merge_of_weight(name, layer, used)
            if any(layer.lora_bias[each] for each in used):
                merges[without_inner_wrappers(f"{name}.bias")] = _merge_of_bias(name, layer, used)
    return merges


def _adapters_of(tuner: Any) -> set[str]:
    from peft.utils import ModulesToSaveWrapper

    if isinstance(tuner, ModulesToSaveWrapper):
        return set(tuner.modules_to_save)
    return {name for kind in tuner.adapter_layer_names for name in getattr(tuner, kind, {})}


def _lora_layer(name: str, tuner: Any) -> "LoraLayer | None":
    """The tuner as a LoRA layer that can be merged; None for a holder of a trained copy."""
    from peft.tuners.lora import Embedding, Linear
    from peft.utils import ModulesToSaveWrapper

    # fully_shard gives a module a class of its own, derived from the one it had.
    kind = next(base for base in type(tuner).__mro__ if not issubclass(base, FSDPModule))
    if kind is ModulesToSaveWrapper:
        return None
    if kind not in {Linear, Embedding}:
        raise SyncError(
            f"{name} is a {kind.__module__}.{kind.__name__}; only LoRA on unquantised linear and embedding layers is "
            "merged: publish the merged weights as a dict, or train other layers"
        )
    layer: LoraLayer = tuner
    return layer


def _to_merge(name: str, layer: "LoraLayer", adapter: str | None) -> list[str]:
    """The adapters that are to be added to a layer's base weight, which does not hold them yet."""
    candidates = layer.active_adapters if adapter is None else [adapter]
    used = [each for each in candidates if each in _adapters_of(layer)]
    if not layer.merged_adapters:
        return used
    if set(layer.merged_adapters) == set(used):
        return []
    raise SyncError(
        f"the base weight of {name} holds the merged adapters {', '.join(layer.merged_adapters)}, but "
        f"{', '.join(used) or 'none'} should be published; call unmerge_adapter() first"
    )


def _merge_of_weight(name: str, layer: "LoraLayer", used: Sequence[str]) -> Merge:
    from peft.tuners.lora import Embedding
    from peft.tuners.lora.variants import DoraLinearVariant

    scales = tuple(layer.scaling[each] for each in used)
    kinds = {type(layer.lora_variant[each]) for each in used if each in layer.lora_variant}
    if isinstance(layer, Embedding) and not kinds:
        embedding = [(layer.lora_embedding_B[each], layer.lora_embedding_A[each]) for each in used]
        return Merge(factors=tuple(f for pair in embedding for f in pair), scales=scales, compute=_add_transposed)
    pairs = [(layer.lora_B[each].weight, layer.lora_A[each].weight) for each in used] if len(layer.lora_A) else []
    factors = tuple(factor for pair in pairs for factor in pair)
    transposed = bool(getattr(layer, "fan_in_fan_out", False))
    if not kinds:
        return Merge(factors=factors, scales=scales, compute=_add_transposed if transposed else _add)
    has_bias = any(layer.lora_bias[each] for each in used)
    if kinds != {DoraLinearVariant} or len(used) > 1 or has_bias or isinstance(layer, Embedding):
        raise SyncError(
            f"{name} has {' and '.join(sorted(kind.__name__ for kind in kinds))} in {', '.join(used)}; of the variants of "
            "LoRA only DoRA is merged, on a linear layer, without lora_bias and as the only active adapter"
        )
    magnitude = layer.lora_magnitude_vector[used[0]].weight
    compute = _add_and_scale_columns if transposed else _add_and_scale_rows
    return Merge(factors=(*factors, magnitude), scales=scales, compute=compute)


def _merge_of_bias(name: str, layer: "LoraLayer", used: Sequence[str]) -> Merge:
    if getattr(layer.get_base_layer(), "bias", None) is None:
        raise SyncError(f"{name} has lora_bias but its base layer no bias, so an engine has no place for it")
    with_bias = [each for each in used if layer.lora_bias[each]]
    return Merge(
        factors=tuple(layer.lora_B[each].bias for each in with_bias),
        scales=tuple(layer.scaling[each] for each in with_bias),
        compute=_add_biases,
    )


def _add(base: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """base [out, in] + the sum of scale * B [out, r] @ A [r, in]; factors are B, A, B, A, ... Hu et al. 2021, eq. 3."""
    result = _precise(base)
    for b, a, scale in zip(factors[::2], factors[1::2], scales, strict=True):
        result.addmm_(b.to(result.dtype), a.to(result.dtype), alpha=scale)
    return result


def _add_transposed(base: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """The same on a base [in, out]: embeddings, and GPT-2's Conv1D."""
    swapped = [factor.T for pair in zip(factors[1::2], factors[::2], strict=True) for factor in pair]
    return _add(base, swapped, scales)


def _add_and_scale_rows(base: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """magnitude [out] times each row of `_add`, normalised: DoRA, Liu et al. 2024, eq. 5. The last factor is the
    magnitude."""
    result = _add(base, factors[:-1], scales)
    return result.mul_((factors[-1].to(result.dtype) / torch.linalg.vector_norm(result, dim=1)).unsqueeze(1))


def _add_and_scale_columns(base: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """The same on a base [in, out]."""
    result = _add_transposed(base, factors[:-1], scales)
    return result.mul_(factors[-1].to(result.dtype) / torch.linalg.vector_norm(result, dim=0))


def _add_biases(base: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """base [out] + the sum of scale * bias [out]."""
    result = _precise(base)
    for bias, scale in zip(factors, scales, strict=True):
        result.add_(bias.to(result.dtype), alpha=scale)
    return result


def _precise(base: Tensor) -> Tensor:
    """A copy in float32, or in the base's dtype if that is wider."""
    return base.to(torch.promote_types(base.dtype, torch.float32), copy=True)

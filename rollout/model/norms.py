"""RMS norms of the engine's own module in one pass over the data, where torch makes six.

Every architecture in transformers brings its own class for them. One is adopted only if, on random weights and inputs, its
own forward computes the formula: nothing is concluded from its name.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from rollout.model.kernels import Kernels
from rollout.model.linear import is_plain

PROBE_ROWS = 3


def adopt_norms(module: nn.Module, kernels: Kernels | None) -> None:
    """Makes those of `module`'s own layers that are RMS norms compute through `kernels`, if there are any. They stay
    instances of their classes, with their weights."""
    if kernels is None:
        return
    forms: dict[tuple[type, torch.Size, float], float | None] = {}
    for layer in module.modules():
        epsilon = _epsilon(layer)
        if epsilon is None:
            continue
        form = (type(layer), layer.get_parameter("weight").shape, epsilon)
        if form not in forms:
            forms[form] = _offset(layer, epsilon)
        offset = forms[form]
        if offset is not None:
            layer.__class__ = _adopted(type(layer))
            layer.shell_kernels, layer.shell_offset, layer.shell_epsilon = kernels, offset, epsilon  # type: ignore[assignment]


def _adopted(kind: type) -> type:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if is_plain(hidden_states, self.weight) and hidden_states.is_contiguous():
            return self.shell_kernels.rms_norm(  # type: ignore[no-any-return]
                hidden_states, self.weight, offset=self.shell_offset, epsilon=self.shell_epsilon
            )
        return kind.forward(self, hidden_states)  # type: ignore[no-any-return, attr-defined]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


def _epsilon(layer: nn.Module) -> float | None:
    """Of a layer that could be an RMS norm: one weight vector, a small number, and nothing else."""
    named = dict(layer.named_parameters())
    if (
        list(named) != ["weight"]
        or named["weight"].ndim != 1
        or _is_there(layer.buffers())
        or _is_there(layer.children())
    ):
        return None
    numbers = [vars(layer)[name] for name in ("variance_epsilon", "eps", "epsilon") if name in vars(layer)]
    return float(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], float) else None


def _is_there(members: Iterator[object]) -> bool:
    return next(members, None) is not None


def _offset(layer: nn.Module, epsilon: float) -> float | None:
    """What the layer adds to its weight, 0 or 1 (Gemma); None if it computes something else."""
    generator = torch.Generator().manual_seed(0)
    probe = deepcopy(layer)
    dim = layer.get_parameter("weight").shape[0]
    weight = torch.randn(dim, generator=generator)
    # small enough that epsilon makes a difference
    inputs = torch.randn(PROBE_ROWS, dim, generator=generator) * epsilon**0.5
    with torch.no_grad():
        probe.weight = nn.Parameter(weight, requires_grad=False)
        result = probe(inputs)
        for offset in (0.0, 1.0):
            mean = inputs.double().pow(2).mean(-1, keepdim=True)
            expected = inputs.double() * torch.rsqrt(mean + epsilon) * (offset + weight.double())
            if isinstance(result, torch.Tensor) and torch.allclose(result.double(), expected, rtol=1e-4, atol=1e-5):
                return offset
    return None

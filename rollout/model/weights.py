"""The weights of a module, each once: tied ones have several names and are one object."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")


def by_identity(state: Mapping[str, T]) -> list[tuple[tuple[str, ...], T]]:
    """The objects of a state dict (`module.state_dict(keep_vars=True)`), each with all of its names, in the order of their
    first ones."""
    groups: dict[int, tuple[tuple[str, ...], T]] = {}
    for name, held in state.items():
        names, _ = groups.get(id(held), ((), held))
        groups[id(held)] = ((*names, name), held)
    return list(groups.values())


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each distinct Parameter and persistent buffer once, under its first name."""
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return {names[0]: tensor for names, tensor in by_identity(state)}

"""Linear layers of the engine's own module, at the speed that the number of rows in a decode step allows.

Torch hands them to a matrix library that first packs the weights, whose cost only many rows pay back. The weights
themselves stay what and where they are: the trainer's Parameters, re-pointed or written in place by an update.
"""

import torch
from torch import nn
from torch.nn import functional as F

from rollout.model.kernels import Kernels

KERNEL_ROWS = 6
"""From this many rows on the compiled kernel is ahead of torch."""
TURNED_ROWS = range(6, 129)
"""Rows for which, without a kernel, weight @ inputs.T is faster than inputs @ weight.T."""


class ShellLinear(nn.Linear):
    """An `nn.Linear` whose forward goes the fastest way where no gradient is asked for."""

    kernels: Kernels | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if not is_plain(input, weight, bias):
            return F.linear(input, weight, bias)
        num_rows = input.numel() // weight.shape[1]
        if self.kernels is not None and num_rows >= KERNEL_ROWS:
            return self.kernels.linear(input, weight, bias)
        if self.kernels is None and num_rows in TURNED_ROWS:
            turned = torch.mm(weight, input.reshape(num_rows, -1).t())
            if bias is not None:
                turned += bias.unsqueeze(1)
            # dense again: what follows reads rows, and the sampler reads them whole
            return turned.t().contiguous().view(*input.shape[:-1], -1)
        return F.linear(input, weight, bias)


def adopt_linear_layers(module: nn.Module, kernels: Kernels | None) -> None:
    """Makes `module`'s own linear layers ShellLinear. Subclasses of nn.Linear, which compute something else, stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = ShellLinear
            layer.kernels = kernels  # type: ignore[assignment]


def is_plain(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    tensors = [input, weight] if bias is None else [input, weight, bias]
    return (
        all(type(t) in (torch.Tensor, nn.Parameter) for t in tensors)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and all(t.is_contiguous() for t in tensors[1:])
        and input.numel() > 0
        and input.shape[-1] == weight.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )

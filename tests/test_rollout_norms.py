"""Norms of the engine's module are adopted by what they compute, and compute the same afterwards."""

import pytest
import torch
from fakes import ARCHITECTURES
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rollout.model.kernels import Kernels, kernels
from rollout.model.norms import adopt_norms
from rollout.model.shell import build_shell


@pytest.fixture
def compiled() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


class Centered(LlamaRMSNorm):
    """Looks like an RMS norm and is none."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dim", [1, 8, 16, 33, 576])
def test_an_rms_norm_computes_the_same_with_any_weight(kind: type, dim: int, compiled: Kernels) -> None:
    theirs, holder = kind(dim, 1e-5), nn.Sequential(kind(dim, 1e-5))
    adopt_norms(holder, compiled)
    assert isinstance(holder[0], kind)
    assert type(holder[0]) is not kind
    x, weight = torch.randn(2, 3, dim), torch.randn(dim)
    theirs.weight.data, holder[0].weight.data = weight, weight
    with torch.no_grad():
        torch.testing.assert_close(holder[0](x), theirs(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(holder[0](x.transpose(0, 1)), theirs(x.transpose(0, 1)), atol=1e-5, rtol=1e-5)
        assert holder[0](x.bfloat16()).dtype == theirs(x.bfloat16()).dtype
    holder[0](x).sum().backward()
    assert holder[0].weight.grad is not None


@pytest.mark.parametrize("layer", [Centered(8), nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.Linear(8, 8)], ids=str)
def test_what_only_looks_like_one_stays(layer: nn.Module, compiled: Kernels) -> None:
    kind = type(layer)
    adopt_norms(nn.Sequential(layer), compiled)
    assert type(layer) is kind


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_norm_of_a_model_is_adopted_and_only_in_the_shell(architecture: str, compiled: Kernels) -> None:
    model = ARCHITECTURES[architecture]()
    shell = build_shell(model, copy_weights=False)
    for (name, ours), theirs in zip(shell.named_modules(), model.modules(), strict=True):
        assert isinstance(ours, type(theirs))
        if "norm" in name:
            assert type(ours) is not type(theirs)
            assert type(theirs).__module__.startswith("transformers.")

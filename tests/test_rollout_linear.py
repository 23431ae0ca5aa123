"""The engine's linear layers compute what torch's do, over the trainer's own weights."""

from collections.abc import Iterator

import pytest
import torch
from fakes import mark, marker_llama, random_prompts, tiny_llama, tiny_qwen2
from torch import nn
from torch.nn import functional as F

from rollout import GenerationEngine, SamplingParams
from rollout.model.kernels import Kernels, kernels
from rollout.model.linear import ShellLinear, adopt_linear_layers
from rollout.model.shell import build_shell


@pytest.fixture(params=["kernel", "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[Kernels | None]:
    found = kernels() if request.param == "kernel" else None
    if request.param == "kernel" and found is None:
        pytest.skip("there is no C compiler")
    with torch.no_grad():
        yield found


def layer(num_inputs: int, num_outputs: int, library: Kernels | None, *, bias: bool = True) -> nn.Linear:
    holder = nn.Sequential(nn.Linear(num_inputs, num_outputs, bias=bias))
    adopt_linear_layers(holder, library)
    assert type(holder[0]) is ShellLinear
    return holder[0]


def check(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = linear(x)
    bias = None if linear.bias is None else linear.bias.double()
    torch.testing.assert_close(y.double(), F.linear(x.double(), linear.weight.double(), bias), atol=1e-5, rtol=1e-5)
    assert y.is_contiguous()
    assert y.dtype == x.dtype
    return y


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64, 128, 129, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows(library: Kernels | None, rows: int, bias: bool) -> None:
    check(layer(40, 50, library, bias=bias), torch.randn(rows, 40))


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (64, 12), (65, 11), (63, 25), (200, 1), (1, 200)], ids=str)
def test_any_shape_of_weight(library: Kernels | None, shape: tuple[int, int]) -> None:
    check(layer(*shape, library), torch.randn(20, shape[0]))


def test_batches_strides_and_views(library: Kernels | None) -> None:
    linear = layer(12, 24, library)
    assert check(linear, torch.randn(2, 3, 8, 12)).shape == (2, 3, 8, 24)
    check(linear, torch.randn(12, 20).t())
    check(linear, torch.randn(20, 24)[:, ::2])
    assert check(linear, torch.randn(1, 20, 12)).view(1, 20, 3, 8).shape == (1, 20, 3, 8)
    assert linear(torch.randn(0, 12)).shape == (0, 24)
    with pytest.raises(RuntimeError):
        linear(torch.randn(20, 11))


def test_a_row_is_the_same_in_every_batch() -> None:
    library = kernels()
    if library is None:
        pytest.skip("there is no C compiler")
    linear, x = layer(100, 70, library), torch.randn(300, 100)
    with torch.no_grad():
        together = linear(x)
        for start, stop in [(0, 6), (0, 64), (1, 34), (200, 300)]:
            assert torch.equal(linear(x[start:stop]), together[start:stop])


def test_what_is_not_plain_goes_to_torch(library: Kernels | None) -> None:
    linear = layer(12, 24, library)
    x = torch.randn(20, 12)
    with torch.enable_grad():
        linear(x).sum().backward()
    assert linear.weight.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    linear.to(torch.bfloat16)
    assert torch.equal(linear(x.bfloat16()), F.linear(x.bfloat16(), linear.weight, linear.bias))
    turned = layer(12, 24, library)
    turned.weight.data = torch.randn(12, 24).t()
    torch.testing.assert_close(turned(x), F.linear(x, turned.weight, turned.bias))


def test_new_values_and_new_places_of_a_weight_are_seen(library: Kernels | None) -> None:
    linear, x = layer(12, 24, library), torch.randn(20, 12)
    before = check(linear, x)
    linear.weight.mul_(2.0)
    assert not torch.equal(check(linear, x), before)
    linear.weight.data = torch.randn(24, 12)
    check(linear, x)
    linear.bias.data = torch.randn(24)
    check(linear, x)


def test_only_plain_linear_layers_are_adopted(library: Kernels | None) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    holder = nn.Sequential(Scaled(3, 4), nn.Linear(4, 5))
    adopt_linear_layers(holder, library)
    assert [type(module) for module in holder] == [Scaled, ShellLinear]
    assert isinstance(holder[1], nn.Linear)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2], ids=["untied", "tied"])
def test_the_shell_adopts_its_own_layers_and_keeps_weights_and_names(make: type) -> None:
    model = make()
    shell = build_shell(model, copy_weights=False)
    assert any(isinstance(module, ShellLinear) for module in shell.modules())
    assert not any(isinstance(module, ShellLinear) for module in model.modules())
    theirs, ours = model.state_dict(keep_vars=True), shell.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in theirs)
    shell.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in theirs.items()})
    assert all(not tensor.any() for tensor in model.state_dict().values())


@pytest.mark.parametrize("without", ["0", "1"], ids=["kernel", "torch"])
def test_an_update_reaches_the_next_step(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSYNC_NO_KERNEL", without)
    model = marker_llama()
    params = SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=())
    prompts = random_prompts([4] * 12)
    with GenerationEngine(model) as engine:
        for version in (3, 9):
            with engine.update():
                mark(model, version)
            assert all(r.token_ids == [version] * 3 for r in engine.generate(prompts, params))

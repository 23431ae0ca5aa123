"""The loss against hand computation, and its gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_adapters import AdapterError, grpo_loss, ppo_loss, token_logprobs


def loss_of(logprob: float, old: float, advantage: float, **options: Any) -> tuple[float, float, Any]:
    """Loss, gradient with respect to the log-prob, and metrics of one token."""
    logprobs = torch.tensor([[logprob]], requires_grad=True)
    if "proximal" in options:
        options["proximal_logprobs"] = torch.tensor([[options.pop("proximal")]])
    loss, metrics = grpo_loss(
        logprobs, torch.tensor([[old]]), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), **options
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item(), metrics


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_those_of_the_scaled_softmax(temperature: float) -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.randint(0, 5, (2, 3))
    expected = (logits / temperature).log_softmax(-1)
    for row in range(2):
        for column in range(3):
            assert token_logprobs(logits, targets, temperature)[row, column].item() == pytest.approx(
                expected[row, column, targets[row, column]].item(), abs=1e-6
            )


def test_token_logprobs_of_bf16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(1, 4, 50).bfloat16()
    got = token_logprobs(logits, torch.zeros(1, 4, dtype=torch.int64))
    assert got.dtype == torch.float32
    assert torch.allclose(got, logits.float().log_softmax(-1)[..., 0], atol=1e-6)


def test_temperature_zero_is_refused_with_the_remedy() -> None:
    with pytest.raises(AdapterError, match="greedy"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64), 0.0)


def test_token_logprobs_gradient() -> None:
    logits = torch.randn(1, 2, 4, dtype=torch.float32, requires_grad=True)
    targets = torch.tensor([[1, 3]])
    token_logprobs(logits, targets, 2.0).sum().backward()
    onehot = torch.nn.functional.one_hot(targets, 4)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, (onehot - (logits / 2).softmax(-1)) / 2, atol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_on_policy_gradient_is_the_policy_gradient(advantage: float) -> None:
    loss, gradient, metrics = loss_of(-1.0, -1.0, advantage)
    assert (loss, gradient) == pytest.approx((-advantage, -advantage))
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.clip_share, metrics.truncated_share) == (1, 1, 0, 0)


# ratio, advantage, loss, whether a gradient is left; clip range [0.8, 1.3], max_importance 2
CLIP_CASES = [
    (1.1, 1.0, -1.1, True),
    (1.5, 1.0, -1.3, False),  # gained enough already
    (0.5, 1.0, -0.5, True),
    (0.5, -1.0, 0.8, False),  # lost enough already
    (1.5, -1.0, 1.5, True),
    (0.9, -1.0, 0.9, True),
    (5.0, -1.0, 2.0, False),  # truncated
    (5.0, 1.0, -1.3, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "expected", "has_gradient"), CLIP_CASES)
def test_surrogate_is_clipped_on_the_side_that_would_move_further(
    ratio: float, advantage: float, expected: float, has_gradient: bool
) -> None:
    loss, gradient, metrics = loss_of(-1.0, -1.0 - math.log(ratio), advantage, clip_high=0.3, max_importance=2.0)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx(-ratio * advantage if has_gradient else 0.0, abs=1e-6)
    is_truncated = ratio > 2 and advantage < 0
    assert metrics.truncated_share == float(is_truncated)
    assert metrics.clip_share == float(not has_gradient and not is_truncated)
    assert metrics.ratio_max == pytest.approx(ratio, rel=1e-5)


def test_stale_token_is_weighted_by_proximal_over_behaviour_and_clipped_around_the_proximal_policy() -> None:
    # pi_prox / mu = 1.5 is outside the clip range, pi / pi_prox = 1.1 is inside: the gradient stays.
    behaviour, proximal = -2.0, -2.0 + math.log(1.5)
    loss, gradient, metrics = loss_of(proximal + math.log(1.1), behaviour, 1.0, proximal=proximal)
    assert (loss, gradient) == pytest.approx((-1.5 * 1.1, -1.5 * 1.1), abs=1e-5)
    assert (metrics.clip_share, metrics.truncated_share) == (0, 0)
    assert metrics.ratio_mean == pytest.approx(1.65, abs=1e-5)
    # Without it, the token counts as having moved too far.
    assert loss_of(proximal + math.log(1.1), behaviour, 1.0)[1] == 0.0


def test_importance_weight_is_truncated() -> None:
    loss, gradient, metrics = loss_of(-1.0, -1.0 - math.log(50), 1.0, proximal=-1.0, max_importance=3.0)
    assert (loss, gradient) == pytest.approx((-3.0, -3.0), abs=1e-5)
    assert metrics.truncated_share == 1.0


def test_importance_weight_has_no_gradient() -> None:
    # One step per batch, the proximal policy is the current one: r = 1 has the gradient, w = 2 (truncated) has none.
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(50)]])
    loss, _ = grpo_loss(logprobs, old, torch.ones(1), torch.ones(1, 1), proximal_logprobs=logprobs)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.0, abs=1e-5)


def test_loss_is_the_mean_over_unmasked_tokens_of_the_batch() -> None:
    logprobs = torch.zeros(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    loss, metrics = grpo_loss(logprobs, logprobs, torch.tensor([1.0, -5.0]), mask)
    assert loss.item() == pytest.approx(-(3 * 1.0 - 5.0) / 4)
    assert metrics.num_tokens == 4


def test_advantages_may_differ_by_token() -> None:
    logprobs = torch.zeros(1, 2)
    loss, _ = grpo_loss(logprobs, logprobs, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    assert loss.item() == pytest.approx(-1.5)


def test_fully_masked_batch_gives_zero_loss_and_zero_gradient() -> None:
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss, metrics = grpo_loss(logprobs, torch.randn(2, 3), torch.randn(2), torch.zeros(2, 3))
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == 0.0
    assert logprobs.grad.tolist() == [[0.0] * 3] * 2
    assert (metrics.num_tokens, metrics.ratio_mean, metrics.ratio_max, metrics.clip_share) == (0, 0, 0, 0)


def test_a_batch_without_rows_has_no_loss() -> None:
    nothing = torch.zeros(0, 3, requires_grad=True)
    loss, metrics = grpo_loss(nothing, nothing, torch.zeros(0), nothing)
    loss.backward()
    assert (loss.item(), metrics.num_tokens, metrics.ratio_max) == (0.0, 0, 0.0)


def test_masked_positions_may_hold_anything() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -math.inf, math.nan, math.inf]])
    loss, metrics = grpo_loss(logprobs, old, torch.ones(1), torch.tensor([[1, 0, 0, 0]]))
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0, 0.0]]
    assert metrics.ratio_max == 1.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_absurd_ratio_gives_a_finite_loss_and_gradient(advantage: float, gap: float) -> None:
    loss, gradient, _ = loss_of(-1.0, -1.0 - gap, advantage)
    assert math.isfinite(loss)
    assert math.isfinite(gradient)


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4)

    def draw() -> Tensor:
        return -2 * torch.rand(shape, generator=generator, dtype=torch.float64)

    logprobs = draw().requires_grad_()
    old, proximal = draw(), draw()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) > 0.3
    assert torch.autograd.gradcheck(
        lambda x: grpo_loss(x, old, advantages, mask, proximal_logprobs=proximal)[0], (logprobs,)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logprobs": torch.zeros(2, 1)}, r"old_logprobs must be \[2, 3\]"),
        ({"mask": torch.ones(3)}, r"mask must be \[2, 3\]"),
        ({"advantages": torch.zeros(3)}, r"advantages must be \[2\] or \[2, 3\], got \[3\]"),
        ({"proximal_logprobs": torch.zeros(1, 3)}, r"proximal_logprobs must be \[2, 3\]"),
        ({"logprobs": torch.zeros(3)}, r"logprobs must be \[B, T\]"),
        ({"clip_low": -0.1}, "clip_low must be in"),
        ({"max_importance": 1.1}, "max_importance must be at least"),
        ({"max_importance": math.inf}, "finite"),
    ],
)
def test_what_broadcasting_would_accept_in_silence_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3),
    }
    with pytest.raises(AdapterError, match=message):
        grpo_loss(**{**given, **changes})


def test_long_batch_in_half_precision_has_the_loss_of_float32() -> None:
    zeros, counted = torch.zeros(1, 70_000).half(), torch.ones(1, 70_000, dtype=torch.bool)
    logprobs = zeros.clone().requires_grad_()
    loss, _ = grpo_loss(logprobs, zeros, torch.tensor([1.5]).half(), counted)
    loss.backward()
    assert loss.item() == -1.5
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    critic = {"values": zeros + 3, "old_values": zeros + 3, "returns": zeros}
    _, metrics = ppo_loss(zeros, zeros, zeros + 1, counted, **critic)
    assert (metrics.policy_loss, metrics.value_loss) == (-1.0, 4.5)

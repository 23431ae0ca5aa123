"""PPO's advantages and losses against hand computation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_adapters import AdapterError, grpo_loss
from trainer_adapters.advantages import gae, normalised, token_rewards
from trainer_adapters.ppo import ValueHead, ppo_loss

NAN = math.nan


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


def mask(*bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.bool)


# ------------------------------------------------------------------------------------------------------------- rewards


def test_reward_is_at_the_last_sampled_token_and_the_penalty_at_each() -> None:
    rewards = token_rewards(
        torch.tensor([1.0, -2.0, 5.0]),
        torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]),
        kl=torch.tensor([[NAN, 0.5, 1.0, NAN], [2.0, NAN, 1.0, NAN], [NAN] * 4]),
        kl_coef=0.1,
    )
    assert torch.allclose(rewards, torch.tensor([[0, -0.05, 0.9, 0], [-0.2, 0, -2.1, 0], [0, 0, 0, 0]]))


def test_penalty_is_a_constant() -> None:
    kl = torch.ones(1, 2, requires_grad=True)
    assert not token_rewards(torch.ones(1), mask(1, 1), kl=kl, kl_coef=0.1).requires_grad


# ----------------------------------------------------------------------------------------------------------------- GAE


def test_advantages_of_three_tokens() -> None:
    gamma, lam = 0.9, 0.8
    deltas = [0.0 + gamma * 2.0 - 1.0, 0.0 + gamma * 3.0 - 2.0, 1.0 - 3.0]
    third = deltas[2]
    second = deltas[1] + gamma * lam * third
    first = deltas[0] + gamma * lam * second
    advantages, returns = gae(row(0, 0, 1), row(1, 2, 3), mask(1, 1, 1), gamma=gamma, lam=lam)
    assert advantages.tolist() == [pytest.approx([first, second, third])]
    assert returns.tolist() == [pytest.approx([first + 1, second + 2, third + 3])]


def test_lambda_1_is_the_return_less_the_value_and_lambda_0_the_one_step_error() -> None:
    rewards, values, every = row(0.5, 0, 1), row(1, 2, 3), mask(1, 1, 1)
    assert torch.allclose(gae(rewards, values, every, lam=1.0)[0], row(0.5, -1, -2))
    assert torch.allclose(gae(rewards, values, every, lam=1.0)[1], row(1.5, 1, 1))
    assert torch.allclose(gae(rewards, values, every, lam=0.0)[0], row(1.5, 1, -2))


def test_masked_tokens_neither_end_nor_lengthen_an_episode() -> None:
    dense_advantages, dense_returns = gae(row(0.5, 0, 1), row(1, 2, 3), mask(1, 1, 1), gamma=0.9, lam=0.8)
    advantages, returns = gae(
        row(NAN, 0.5, 0, NAN, 1, NAN), row(NAN, 1, 2, NAN, 3, NAN), mask(0, 1, 1, 0, 1, 0), gamma=0.9, lam=0.8
    )
    at = [1, 2, 4]
    assert torch.equal(advantages[:, at], dense_advantages)
    assert torch.equal(returns[:, at], dense_returns)
    assert advantages[0, [0, 3, 5]].tolist() == returns[0, [0, 3, 5]].tolist() == [0, 0, 0]


def test_rows_do_not_mix() -> None:
    rewards, values = torch.randn(2, 4), torch.randn(2, 4)
    masks = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    together = gae(rewards, values, masks)
    for at in range(2):
        alone = gae(rewards[at : at + 1], values[at : at + 1], masks[at : at + 1])
        assert all(torch.equal(a[at : at + 1], b) for a, b in zip(together, alone, strict=True))


def test_rollout_that_was_cut_off_goes_on_with_the_critics_value() -> None:
    rewards, values = torch.zeros(2, 2), torch.ones(2, 2)
    masks = torch.tensor([[1, 0], [1, 0]])
    advantages, _ = gae(rewards, values, masks, gamma=0.5, last_values=torch.tensor([4.0, 0.0]))
    assert advantages.tolist() == [[0.5 * 4 - 1, 0], [-1, 0]]


def test_advantages_and_returns_are_float32_constants() -> None:
    values = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    for result in gae(row(0, 1), values, mask(1, 1)):
        assert not result.requires_grad
        assert result.dtype == torch.float32


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_mask() -> None:
    result = normalised(row(1, 3, NAN, 5), mask(1, 1, 0, 1))
    assert result.tolist() == [pytest.approx([-math.sqrt(1.5), 0, 0, math.sqrt(1.5)], abs=1e-6)]
    assert normalised(row(3, 7), mask(1, 0)).tolist() == normalised(row(3, 7), mask(0, 0)).tolist() == [[0, 0]]


@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (1.1, 100), (-3.3, 11), (1000.1, 1000), (3e30, 5)])
def test_equal_advantages_are_normalised_to_0(value: float, count: int) -> None:
    assert not normalised(torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool)).any()


MISTAKES: dict[str, tuple[Any, ...]] = {
    "rewards must be .B, T., got .1.": (torch.ones(1), row(1), mask(1)),
    "values must be .1, 2., got .1, 1.": (row(1, 2), row(1), mask(1, 1)),
    "mask must be .1, 2., got .2.": (row(1, 2), row(1, 2), mask(1, 1)[0]),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_shapes_that_would_broadcast_are_refused(message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        gae(*MISTAKES[message])


def test_other_shapes_and_factors_are_refused() -> None:
    with pytest.raises(AdapterError, match=r"last_values must be \[1\], got \[1, 1\]"):
        gae(row(1, 2), row(1, 2), mask(1, 1), last_values=row(1))
    with pytest.raises(AdapterError, match=r"gamma and lam .* 1.1 and 0.95"):
        gae(row(1, 2), row(1, 2), mask(1, 1), gamma=1.1)
    with pytest.raises(AdapterError, match=r"rewards must be \[2\], got \[1\]"):
        token_rewards(torch.ones(1), torch.ones(2, 3))
    with pytest.raises(AdapterError, match=r"kl must be \[1, 3\], got \[1, 1\]"):
        token_rewards(torch.ones(1), torch.ones(1, 3), kl=row(1))
    with pytest.raises(AdapterError, match=r"mask must be \[1, 2\]"):
        normalised(row(1, 2), mask(1))


# ---------------------------------------------------------------------------------------------------------------- loss


def ppo(values: Tensor, returns: Tensor, counted: Tensor, **options: Any) -> Any:
    zeros = torch.zeros_like(returns)
    fixed = {"old_values": zeros, "value_clip": math.inf, **options}
    return ppo_loss(zeros - 1, zeros - 1, zeros, counted, values=values, returns=returns, **fixed)


def test_policy_part_is_grpo_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, proximal, advantages = torch.randn(4, 2, 6, generator=generator)
    counted = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    options = {"proximal_logprobs": proximal, "clip_low": 0.1, "clip_high": 1.5, "max_importance": 3.0}
    weights = torch.full((2, 6), 0.5)
    for extra in ({}, {"importance_weights": weights}):
        expected, metrics = grpo_loss(logprobs, old, advantages, counted, **options, **extra)
        zeros = torch.zeros(2, 6)
        critic = {"values": zeros, "old_values": zeros, "returns": zeros}
        loss, ppo_metrics = ppo_loss(logprobs, old, advantages, counted, **options, **extra, **critic)
        assert loss.item() == pytest.approx(expected.item())
        assert ppo_metrics.policy == metrics
        assert ppo_metrics.policy_loss == pytest.approx(expected.item())


def test_critics_loss_is_half_the_squared_error_over_the_mask() -> None:
    values = row(1.0, NAN, 3.0).requires_grad_()
    loss, metrics = ppo(values, row(2.0, NAN, 7.0), mask(1, 0, 1), old_values=row(0, NAN, 0), value_coef=0.1)
    loss.backward()
    assert metrics.value_loss == pytest.approx((1 + 16) / 2 / 2)
    assert loss.item() == pytest.approx(0.1 * (1 + 16) / 2 / 2)
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([0.1 * -1 / 2, 0.0, 0.1 * -4 / 2])]


# value now, value before, return, half squared error, whether a gradient is left; the clip is 0.2
VALUE_CASES = [
    (1.1, 1.0, 2.0, 0.9**2 / 2, True),
    (1.5, 1.0, 2.0, 0.8**2 / 2, False),  # moved far enough towards the return
    (0.5, 1.0, 0.0, 0.8**2 / 2, False),
    (0.5, 1.0, 2.0, 1.5**2 / 2, True),  # moved away from it
    (1.5, 1.0, 0.0, 1.5**2 / 2, True),
]


@pytest.mark.parametrize(("now", "before", "target", "expected", "has_gradient"), VALUE_CASES)
def test_value_is_clipped_where_it_would_move_further(
    now: float, before: float, target: float, expected: float, has_gradient: bool
) -> None:
    values = row(now).requires_grad_()
    loss, metrics = ppo(values, row(target), mask(1), old_values=row(before), value_clip=0.2, value_coef=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert values.grad is not None
    assert (values.grad.item() != 0) == has_gradient
    assert metrics.value_clip_share == (not has_gradient)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_the_mean() -> None:
    returns, counted = row(1.0, 2.0, 3.0, NAN), mask(1, 1, 1, 0)
    for old, expected in ((returns, 1.0), (row(2, 2, 2, 2), 0.0), (row(3, 2, 1, 0), -3.0)):
        assert ppo(returns, returns, counted, old_values=old)[1].explained_variance == pytest.approx(expected)
    assert ppo(row(1, 2), row(5, 5), mask(1, 1))[1].explained_variance == 0


def test_without_tokens_the_loss_is_0_with_zero_gradients() -> None:
    values = row(NAN, 1.0).requires_grad_()
    loss, metrics = ppo(values, row(NAN, 1.0), mask(0, 0))
    loss.backward()
    assert loss.item() == metrics.value_loss == metrics.explained_variance == 0
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("name", ["advantages", "values", "old_values", "returns"])
def test_loss_inputs_that_would_broadcast_are_refused(name: str) -> None:
    shaped = {each: torch.zeros(1, 2) for each in ("advantages", "values", "old_values", "returns")}
    shaped[name] = torch.zeros(1)
    with pytest.raises(AdapterError, match=rf"{name} must be \[1, 2\] like logprobs, got \[1\]"):
        ppo_loss(torch.zeros(1, 2), torch.zeros(1, 2), shaped.pop("advantages"), mask(1, 1), **shaped)


@pytest.mark.parametrize("value_clip", [0.0, -1.0, NAN])
def test_value_clip_must_leave_room(value_clip: float) -> None:
    with pytest.raises(AdapterError, match="value_clip must be above 0"):
        ppo(row(1), row(1), mask(1), value_clip=value_clip)


def test_value_head_computes_in_float32_under_autocast_too() -> None:
    head = ValueHead(64)
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    assert torch.equal(values, head(hidden))


def test_value_head_begins_at_0_in_float32_and_learns() -> None:
    head = ValueHead(8)
    hidden = torch.randn(2, 3, 8).bfloat16()
    values = head(hidden)
    assert (values.shape, values.dtype) == ((2, 3), torch.float32)
    assert not values.any()
    values.sum().backward()
    assert head.linear.weight.grad is not None
    assert head.linear.weight.grad.any()

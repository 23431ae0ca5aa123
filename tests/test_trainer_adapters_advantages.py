"""Group-relative advantages against hand computation, and what rewards may be."""

import math
import statistics

import pytest
import torch

from trainer_adapters import AdapterError, group_advantages, token_rewards


def test_advantages_are_relative_to_the_rows_own_group() -> None:
    rewards = torch.tensor([1.0, 10.0, 0.0, 30.0, 0.5])
    groups = torch.tensor([4, 7, 4, 7, 4])
    advantages = group_advantages(rewards, groups, eps=1e-4)
    expected = []
    for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
        members = rewards[groups == group].tolist()
        expected.append((reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-4))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("reward", "size"), [(0.5, 2), (0.1, 3), (100.1, 8), (1000.1, 3), (-12345.67, 7), (3e30, 5)])
def test_equal_rewards_and_a_group_of_one_get_no_advantage(reward: float, size: int) -> None:
    rewards = torch.tensor([reward] * size + [3.0])
    assert not group_advantages(rewards, torch.tensor([0] * size + [1])).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_advantages_of_rewards_of_any_type_are_those_of_float32(dtype: torch.dtype) -> None:
    few = torch.tensor([1.0, 900.0, 0.0, 600.0]).to(dtype)
    many = torch.tensor([1.0] * 300 + [0.0] * 100).to(dtype)
    for rewards in (few, many):
        groups = torch.zeros(len(rewards), dtype=torch.int64)
        advantages = group_advantages(rewards, groups)
        assert advantages.dtype is torch.float32
        assert torch.equal(advantages, group_advantages(rewards.float(), groups))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_no_finite_number_is_refused_by_its_row(bad: float) -> None:
    rewards = torch.tensor([0.5, bad, 1.0])
    with pytest.raises(AdapterError, match=f"must be finite, got {bad} in row 1"):
        group_advantages(rewards, torch.tensor([0, 0, 0]))
    with pytest.raises(AdapterError, match=f"must be finite, got {bad} in row 1"):
        token_rewards(rewards, torch.ones(3, 2, dtype=torch.bool))


def test_reward_of_a_row_without_unmasked_tokens_may_be_anything() -> None:
    rewards = token_rewards(torch.tensor([math.nan, 2.0]), torch.tensor([[0, 0], [1, 0]]))
    assert rewards.tolist() == [[0, 0], [2, 0]]


def test_rewards_and_groups_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AdapterError, match=r"rewards must be \[B\], got \[1, 2\]"):
        group_advantages(torch.ones(1, 2), torch.zeros(1, 2))
    with pytest.raises(AdapterError, match=r"group_index must be \[3\], got \[1\]"):
        group_advantages(torch.ones(3), torch.zeros(1))

"""From one reward per rollout to advantages: of its group's other rollouts, or of each token with a critic."""

import math

import torch
from torch import Tensor

from trainer_adapters.errors import AdapterError
from trainer_adapters.losses import at_least_float32


def group_advantages(rewards: Tensor, group_index: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Group-relative advantages [B] of rewards [B]: (r - mean) / (std + eps) within each group of equal `group_index` [B].

    Source: GRPO, DeepSeekMath (Shao et al. 2024), section 4.1.2. `std` is the sample's (divided by n - 1), as in other
    trainers; a group of one, or of equal rewards, gets 0 and teaches nothing. Groups may differ in size, after failed
    rollouts left. Computed in float32, or float64 if that comes in: half precision neither counts a large group nor squares
    a reward of 300. Raises AdapterError for shapes that differ, and for a reward that is no finite number: it would make
    its whole group's advantages NaN.
    """
    if rewards.dim() != 1:
        raise AdapterError(f"rewards must be [B], got {list(rewards.shape)}")
    _check("group_index", group_index, rewards.shape)
    _check_finite(rewards)
    rewards = at_least_float32(rewards)
    groups, group_of_row = torch.unique(group_index, return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=rewards.dtype, device=rewards.device)
    size = zeros.index_add(0, group_of_row, torch.ones_like(rewards))
    # The mean of equal rewards may be off by a rounding error; from the least one on they are exactly 0.
    least = torch.full_like(zeros, math.inf).scatter_reduce(0, group_of_row, rewards, "amin")
    shifted = rewards - least[group_of_row]
    centred = shifted - (zeros.index_add(0, group_of_row, shifted) / size)[group_of_row]
    variance = zeros.index_add(0, group_of_row, centred.square()) / (size - 1).clamp(min=1)
    return centred / (variance.sqrt()[group_of_row] + eps)


def token_rewards(rewards: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Rewards [B, T] of single tokens: -kl_coef * kl at each unmasked token, and the rollout's own reward at its last.

    `rewards` [B]; `mask` [B, T], true on the tokens that the policy sampled; `kl` [B, T] the signed log-ratio of policy and
    reference (`reference_log_ratio`; `reference_kl` belongs in the loss). A row without unmasked tokens gets none, whatever
    its reward. Source: Ziegler et al. 2019, eq. 2. Raises AdapterError for shapes that differ, and for a reward of another
    row that is no finite number.
    """
    if mask.dim() != 2:
        raise AdapterError(f"mask must be [B, T], got {list(mask.shape)}")
    _check("rewards", rewards, mask.shape[:1])
    counted = mask.bool()
    result = torch.zeros(mask.shape, dtype=torch.float32, device=rewards.device)
    if kl is not None:
        _check("kl", kl, mask.shape)
        result -= kl_coef * torch.where(counted, kl.detach().float(), 0.0)
    is_last = counted & (counted.flip(1).cumsum(1).flip(1) == 1)
    reward = torch.where(is_last.any(1), rewards.float(), 0.0)
    _check_finite(reward)
    return result + is_last * reward.unsqueeze(1)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, T] float32, constants, 0 where masked:

        delta_t = r_t + gamma * V_(t+1) - V_t
        A_t     = delta_t + gamma * lam * A_(t+1)
        R_t     = A_t + V_t

    where t+1 is the next *unmasked* token, so that what a tool wrote between two of them neither ends nor lengthens an
    episode. `rewards` [B, T] (`token_rewards`); `values` [B, T], the critic's, at the state in which each token is chosen:
    column t of a `RolloutBatch` is about target t, so this is the head's output at input column t; `mask` [B, T].

    After the last token V is 0: the episode is over. For a rollout that was cut off (`RolloutBatch.truncated`) it is not;
    give the critic's value of the state after its last token in `last_values` [B], and 0 for the others.

    Source: Schulman et al. 2016, eq. 16. Raises AdapterError for shapes that differ or factors outside [0, 1].
    """
    if rewards.dim() != 2:
        raise AdapterError(f"rewards must be [B, T], got {list(rewards.shape)}; token_rewards makes them from [B]")
    _check("values", values, rewards.shape)
    _check("mask", mask, rewards.shape)
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise AdapterError(f"gamma and lam must be in [0, 1], got {gamma} and {lam}")
    counted = mask.bool()
    zeros = torch.zeros(rewards.shape[0], dtype=torch.float32, device=rewards.device)
    if last_values is not None:
        _check("last_values", last_values, rewards.shape[:1])
    next_value = zeros if last_values is None else last_values.detach().float()
    next_advantage = zeros
    # A masked position may hold any value, NaN too.
    reward = torch.where(counted, rewards.detach().float(), 0.0)
    value = torch.where(counted, values.detach().float(), 0.0)
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(counted[:, t], advantage, next_advantage)
        next_value = torch.where(counted[:, t], value[:, t], next_value)
        columns.append(torch.where(counted[:, t], advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(reward)
    return advantages, advantages + value


def normalised(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Advantages [B, T] float32 with mean 0 and standard deviation 1 over the unmasked tokens of the call; 0 where masked.

    The deviation is divided by n. One token, or equal ones, give 0. Source: PPO's reference code (Schulman et al. 2017).
    """
    _check("mask", mask, advantages.shape)
    counted, advantages = mask.bool(), advantages.float()
    if not advantages.numel():
        return advantages
    count = counted.sum().clamp(min=1)
    # The mean of large equal values is off by a rounding error, of which the deviation would make 1. From the least one
    # on, equal values are exactly 0.
    shifted = torch.where(counted, advantages - torch.where(counted, advantages, math.inf).amin(), 0.0)
    centred = torch.where(counted, shifted - shifted.sum() / count, 0.0)
    return centred / ((centred.square().sum() / count).sqrt() + eps)


def _check_finite(rewards: Tensor) -> None:
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise AdapterError(
            f"rewards must be finite, got {rewards[bad[0]].item()} in row {bad[0]}; leave that rollout out of the batch"
        )


def _check(name: str, tensor: Tensor, shape: torch.Size) -> None:
    # Broadcasting would accept most mistakes in silence.
    if tensor.shape != shape:
        raise AdapterError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")

"""PPO: the clipped policy loss of `grpo_loss`, and a critic's loss beside it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer_adapters.errors import AdapterError
from trainer_adapters.losses import LossMetrics, at_least_float32, grpo_loss


class ValueHead(nn.Module):
    """The critic: from hidden states [B, T, hidden_size] of the policy's last layer to values [B, T] float32.

    A linear layer in float32, under autocast too, that begins at 0, so that untrained values are those of a run without a
    critic. Columns [:, :-1] of the values line up with a `RolloutBatch`'s targets. It is no part of the policy and is not
    published: keep it outside the model that the engine knows.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            values: Tensor = self.linear(hidden_states.float()).squeeze(-1)
        return values


@dataclass(frozen=True, kw_only=True)
class PpoMetrics:
    """Of one loss, over its unmasked tokens; all 0 when there are none."""

    policy: LossMetrics
    policy_loss: float
    value_loss: float
    value_clip_share: float
    """Share of tokens whose value the clip takes out of the gradient."""
    explained_variance: float
    """1 - Var(returns - old_values) / Var(returns): 1 for a perfect critic, 0 for one that knows only the mean."""


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    proximal_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_importance: float = 2.0,
    value_clip: float = 0.2,
    value_coef: float = 0.5,
) -> tuple[Tensor, PpoMetrics]:
    """`grpo_loss` of the first four arguments, whose advantages are [B, T] here (`gae`), plus value_coef times

        mean over unmasked tokens of  1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    `values` [B, T], with gradient, the critic's now; `old_values` [B, T] the critic's before the batch's first step;
    `returns` [B, T] (`gae`). Stale tokens weigh as much as others in the critic's loss: their returns are as true.

    To accumulate over micro-batches, scale each loss by its share of the tokens. There is no KL term (`reference_kl`) and
    no entropy bonus. Source: Schulman et al. 2017, eq. 9; the clip of the values is that of its reference code.

    Raises AdapterError for shapes that differ or bounds that contradict.
    """
    shape = logprobs.shape
    for name, tensor in {
        "advantages": advantages,
        "values": values,
        "old_values": old_values,
        "returns": returns,
    }.items():
        if tensor.shape != shape:
            raise AdapterError(f"{name} must be {list(shape)} like logprobs, got {list(tensor.shape)}")
    if not value_clip > 0:
        raise AdapterError(f"value_clip must be above 0, got {value_clip}; float('inf') turns it off")
    policy_loss, policy = grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        proximal_logprobs=proximal_logprobs,
        importance_weights=importance_weights,
        clip_low=clip_low,
        clip_high=clip_high,
        max_importance=max_importance,
    )
    counted = mask.bool()
    num_tokens = counted.sum().clamp(min=1)
    # Masked first: a masked position may hold any value, and the gradient of 0 * NaN is NaN.
    critics = (values, old_values.detach(), returns.detach())
    now, before, target = (torch.where(counted, at_least_float32(x), 0.0) for x in critics)
    clipped = torch.minimum(torch.maximum(now, before - value_clip), before + value_clip)
    unclipped_error, clipped_error = (now - target).square(), (clipped - target).square()
    value_loss = torch.maximum(unclipped_error, clipped_error).sum() / num_tokens / 2
    with torch.no_grad():
        is_clipped = counted & (clipped_error > unclipped_error)
        numbers = [policy_loss, value_loss, is_clipped.sum() / num_tokens, _explained(target, before, counted)]
        policy_number, value_number, clip_share, explained = torch.stack([n.double() for n in numbers]).tolist()
    return policy_loss + value_coef * value_loss, PpoMetrics(
        policy=policy,
        policy_loss=policy_number,
        value_loss=value_number,
        value_clip_share=clip_share,
        explained_variance=explained,
    )


def _explained(returns: Tensor, values: Tensor, counted: Tensor) -> Tensor:
    """0 where the returns are all equal, which no critic can explain."""
    variance = _variance(returns, counted)
    rest = _variance(returns - values, counted)
    return torch.where(variance > 0, 1 - rest / variance, 0.0)


def _variance(x: Tensor, counted: Tensor) -> Tensor:
    count = counted.sum().clamp(min=1)
    mean = torch.where(counted, x, 0.0).sum() / count
    return torch.where(counted, x - mean, 0.0).square().sum() / count

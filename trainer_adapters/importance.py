"""What a token of an older policy weighs."""

import math

import torch
from torch import Tensor

from trainer_adapters.errors import AdapterError
from trainer_adapters.losses import checked_log_ratio


def truncated_importance(logprobs: Tensor, old_logprobs: Tensor, *, high: float = 2.0) -> Tensor:
    """Weights [B, T], constants: min(pi / mu, high).

    `logprobs` [B, T] are those of the weights that the batch trains from (pi, before its first step), `old_logprobs`
    [B, T] those that the engine recorded (mu). The estimate is unbiased but for the tokens above `high`, which keep that
    much of their weight. This is what `grpo_loss` does by itself. Computed in float32, or float64 if that comes in.
    Source: Ionides 2008. Raises AdapterError.
    """
    log_ratio = checked_log_ratio(logprobs.detach(), old_logprobs.detach(), "old_logprobs")
    if not 1 <= high < math.inf:
        raise AdapterError(f"high must be at least 1 and finite, got {high}")
    return log_ratio.clamp(max=math.log(high)).exp()


def masked_importance(logprobs: Tensor, old_logprobs: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """Weights [B, T], constants: pi / mu where that lies in [low, high], else 0.

    Arguments as in `truncated_importance`. A token on which the two policies disagree by more says little about the
    present one, and where the trainer's and the engine's numerics differ its ratio is an artefact: it leaves the gradient
    instead of entering it with a bounded weight. It still counts in the loss's mean. Source: IcePop (Ling team 2025).
    Raises AdapterError.
    """
    log_ratio = checked_log_ratio(logprobs.detach(), old_logprobs.detach(), "old_logprobs")
    if not 0 <= low <= 1 <= high < math.inf:
        raise AdapterError(f"low must be in [0, 1] and high at least 1 and finite, got {low} and {high}")
    log_low = math.log(low) if low > 0 else -math.inf
    inside = (log_ratio >= log_low) & (log_ratio <= math.log(high))
    # Bounded before the exp, since inf would survive as inf * 0 = NaN in whatever multiplies it.
    return torch.where(inside, log_ratio.clamp(max=math.log(high)).exp(), 0.0)

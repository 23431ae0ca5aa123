"""Policy-gradient losses over tokens that an older policy may have sampled."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_adapters.errors import AdapterError

ROUNDING = 0.01
"""By so much, as a logarithm, a weight may be off its ratio without having been cut: bf16 rounds by 0.004."""


@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """Of one loss, over its unmasked tokens; all 0 when there are none."""

    num_tokens: int
    ratio_mean: float
    """Mean of exp(logprobs - old_logprobs), current policy over the one that sampled. 1 on-policy."""
    ratio_max: float
    """Its maximum. Far above 1 on fresh tokens: trainer and engine disagree about the log-probs."""
    clip_share: float
    """Share of tokens that the clip takes out of the gradient."""
    truncated_share: float
    """Share of tokens that weigh less than their ratio: cut by `max_importance`, by `truncated_importance`, or to 0 by
    `masked_importance`."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability [B, T] float32 of each target [B, T] under softmax(logits / temperature), logits [B, T, V].

    With the temperature that the rollouts were sampled at, this is what their `logprobs` hold; use 1 for greedy ones.
    Not comparable with rollouts sampled with top-k or top-p, whose log-probs are renormalised over the kept tokens.
    Computed in float32: in bf16 the ratio of equal policies would be off by several percent.
    """
    if not temperature > 0:
        raise AdapterError(f"temperature must be above 0, got {temperature}; leave it at 1 for greedy rollouts")
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_importance: float = 2.0,
) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate loss (a scalar), with truncated importance weights for tokens of older policies.

    `logprobs` [B, T] are those of the policy in training, with gradient; `old_logprobs` [B, T] those that the engine
    recorded when it sampled (the *behaviour* policy, mu); `proximal_logprobs` [B, T] those of the weights before this
    batch's first step; `advantages` [B], or [B, T]; `mask` [B, T], true where a token counts. Per token

        r = pi / pi_prox                                  importance ratio, what the clip keeps near 1
        w = min(pi_prox / mu, C)                          truncated importance weight, a constant, C = max_importance
        loss = -w * min(min(r, C) * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    and the result is the mean over all unmasked tokens of the call. To accumulate over micro-batches, scale each by its
    share of the tokens. No unmasked token: 0, with zero gradients. Tokens of a group of equal rewards, whose advantages
    are 0, count in the mean too: leave such groups out, of the batch or of the shares, and the gradient does not depend
    on how many there were.

    That is DAPO's mean. GRPO as published takes the mean of each sequence first, in which a token of a short response
    weighs more, adds a KL term (`reference_kl`), and has neither w nor the bound on r.

    Which `proximal_logprobs`: the clip limits how far one batch moves the policy, so its centre belongs where the batch
    started. None takes the behaviour policy for that (w = 1), as PPO and GRPO do, which is right while rollouts are of
    the weights that train on them. For stale rollouts it is not: tokens that other batches already moved by more than
    the clip range lose their gradient. Then pass the log-probs computed before the first step, or `logprobs.detach()` if
    there is one step per batch. Staleness needs no version here: each token's own log-prob is of the version that
    sampled it.

    `importance_weights` [B, T], constants, take the place of w: those of `masked_importance`, say. They weigh pi_prox
    against mu, so `proximal_logprobs` must come with them. A token of weight 0 counts in the mean and has no gradient.

    Sources: clip, PPO (Schulman et al. 2017), eq. 7; group-relative advantages, GRPO (Shao et al. 2024); two clip
    bounds and the mean over tokens, DAPO (Yu et al. 2025); pi_prox apart from mu, decoupled PPO (Hilton et al. 2022);
    truncated importance sampling (Ionides 2008); min(r, C), which binds only where A < 0 and the clip does not,
    dual-clip PPO (Ye et al. 2020).

    Computed in float32, or float64 if that comes in. Raises AdapterError for shapes that differ, bounds that contradict,
    and weights without `proximal_logprobs`.
    """
    _check_shapes(logprobs, old_logprobs, mask, advantages, proximal_logprobs, importance_weights)
    if importance_weights is not None and proximal_logprobs is None:
        raise AdapterError(
            "importance_weights need proximal_logprobs beside them: without those the ratio is pi / mu already, and each "
            "token would be weighed twice; pass logprobs.detach() if there is one step per batch"
        )
    _check_bounds(clip_low, clip_high, max_importance)
    counted = mask.bool()
    # fp16 has no room for the sum over a long batch
    logprobs, behaviour, advantages = map(at_least_float32, (logprobs, old_logprobs.detach(), advantages))
    proximal = behaviour if proximal_logprobs is None else at_least_float32(proximal_logprobs.detach())
    # Bounded as logarithms: exp of a large one is inf, and its gradient 0 * inf = NaN. Masked first, for the same reason:
    # a masked position may hold any value.
    log_max = math.log(max_importance)
    log_ratio = torch.where(counted, logprobs - proximal, 0.0)
    log_weight = proximal - behaviour
    ratio = log_ratio.clamp(max=log_max).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = log_weight.clamp(max=log_max).exp() if importance_weights is None else importance_weights.detach()
    advantage = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    num_tokens = counted.sum()
    loss = -torch.where(counted, weight * surrogate, 0.0).sum() / num_tokens.clamp(min=1)
    with torch.no_grad():
        total = torch.where(counted, logprobs - behaviour, -math.inf).exp()
        is_clipped = clipped * advantage < ratio * advantage
        is_cut = log_weight > (log_max if importance_weights is None else weight.log() + ROUNDING)
        is_truncated = is_cut | ((log_ratio > log_max) & (advantage < 0))
        highest = total.max() if total.numel() else total.sum()
        numbers = [num_tokens, total.sum(), highest, (is_clipped & counted).sum(), (is_truncated & counted).sum()]
        count, ratio_sum, ratio_max, num_clipped, num_truncated = torch.stack([n.double() for n in numbers]).tolist()
    share = 1 / max(count, 1)
    return loss, LossMetrics(
        num_tokens=int(count),
        ratio_mean=ratio_sum * share,
        ratio_max=ratio_max,
        clip_share=num_clipped * share,
        truncated_share=num_truncated * share,
    )


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself, or in float32 what is in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def checked_log_ratio(logprobs: Tensor, other: Tensor, name: str) -> Tensor:
    """log(pi / other) [B, T], in float32, or float64 if that comes in. AdapterError, with the `name` of the other, for shapes
    that differ."""
    if logprobs.shape != other.shape:
        raise AdapterError(f"{name} must be {list(logprobs.shape)} like logprobs, got {list(other.shape)}")
    return at_least_float32(logprobs) - at_least_float32(other)


def _check_shapes(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    proximal_logprobs: Tensor | None,
    importance_weights: Tensor | None,
) -> None:
    # Broadcasting would accept most mistakes, such as a [T] or [B, 1] mask, in silence.
    shape = tuple(logprobs.shape)
    if len(shape) != 2:
        raise AdapterError(f"logprobs must be [B, T], got {list(shape)}")
    named = {"old_logprobs": old_logprobs, "mask": mask}
    if proximal_logprobs is not None:
        named["proximal_logprobs"] = proximal_logprobs
    if importance_weights is not None:
        named["importance_weights"] = importance_weights
    for name, tensor in named.items():
        if tuple(tensor.shape) != shape:
            raise AdapterError(f"{name} must be {list(shape)} like logprobs, got {list(tensor.shape)}")
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise AdapterError(f"advantages must be {list(shape[:1])} or {list(shape)}, got {list(advantages.shape)}")


def _check_bounds(clip_low: float, clip_high: float, max_importance: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise AdapterError(f"clip_low must be in [0, 1] and clip_high at least 0, got {clip_low} and {clip_high}")
    if not (1 + clip_high <= max_importance < math.inf):
        raise AdapterError(
            f"max_importance must be at least 1 + clip_high = {1 + clip_high} and finite, got {max_importance}; "
            "below that it would undo the clip"
        )

"""How far the policy is from a reference policy."""

from torch import Tensor

from trainer_adapters.errors import AdapterError

LARGEST_LOG_RATIO = 20.0
"""Beyond it the exponential would drown every other token of a batch, and then overflow."""


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate [B, T], never negative, of KL(pi || ref) at each token, from the sampled token alone:

        k3 = ref / pi - log(ref / pi) - 1

    `logprobs` [B, T] are those of the policy in training, `reference_logprobs` [B, T] those of the frozen model, both of
    the sampled tokens and at one temperature. As a loss (its mean over the mask, times a coefficient, added to
    `grpo_loss`) its gradient is that of KL(ref || pi); as a penalty inside the reward (`token_rewards`) detach it.
    log(ref / pi) is capped at 20. Padding may hold any values; mask the result.

    Sources: Schulman 2020, "Approximating KL divergence"; as a loss, GRPO (Shao et al. 2024), eq. 4. Raises AdapterError.
    """
    if logprobs.shape != reference_logprobs.shape:
        raise AdapterError(
            f"reference_logprobs must be {list(logprobs.shape)} like logprobs, got {list(reference_logprobs.shape)}"
        )
    log_ratio = (reference_logprobs.detach() - logprobs).clamp(max=LARGEST_LOG_RATIO)
    # exp(x) - x - 1 would be below 0 for small x, where the 1 rounds away what is left
    return log_ratio.expm1() - log_ratio

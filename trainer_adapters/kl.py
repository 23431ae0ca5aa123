"""How far the policy is from a reference policy: as a loss, or as a penalty in the reward."""

from torch import Tensor

from trainer_adapters.losses import checked_log_ratio

LARGEST_LOG_RATIO = 20.0
"""Beyond it the exponential would drown every other token of a batch, and then overflow."""


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """For a loss: an estimate [B, T], never negative, of KL(pi || ref) at each token, from the sampled token alone:

        k3 = ref / pi - log(ref / pi) - 1

    `logprobs` [B, T] are those of the policy in training, with gradient; `reference_logprobs` [B, T] those of the frozen
    model; both of the sampled tokens and at one temperature. Its mean over the mask, times a coefficient, is added to
    `grpo_loss`. Over tokens that pi itself sampled, its expectation is KL(pi || ref), and its expected gradient that of
    KL(ref || pi). Tokens that an older policy sampled need the weights of `truncated_importance` on top, or both are
    expectations under that policy. For a penalty in the reward it is wrong: see `reference_log_ratio`.

    log(ref / pi) is capped at 20. Padding may hold any values; mask the result. Computed in float32, or float64 if that
    comes in. Sources: Schulman 2020, "Approximating KL divergence"; GRPO (Shao et al. 2024), eq. 4. Raises AdapterError.
    """
    log_ratio = -checked_log_ratio(logprobs, reference_logprobs.detach(), "reference_logprobs")
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    # exp(x) - x - 1 would be below 0 for small x, where the 1 rounds away what is left
    return log_ratio.expm1() - log_ratio


def reference_log_ratio(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """For the reward (`token_rewards`): log(pi / ref) [B, T] of each token, a constant, negative where the reference likes
    the token better:

        k1 = log pi - log ref

    Arguments as in `reference_kl`. Over tokens that pi itself sampled, its expectation is KL(pi || ref), and the policy
    gradient of a reward of -k1 is that of -KL(pi || ref). With k3 in its place it would not be: a token that the policy
    has come to like less than the reference would be penalised, and pushed further away.

    Padding may hold any values; `token_rewards` masks it. Computed in float32, or float64 if that comes in. As a loss it
    would teach nothing: its expected gradient is 0. Sources: Ziegler et al. 2019, eq. 2; InstructGPT (Ouyang et al.
    2022), eq. 2. Raises AdapterError.
    """
    return checked_log_ratio(logprobs.detach(), reference_logprobs.detach(), "reference_logprobs")

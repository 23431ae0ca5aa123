"""The distance to a reference policy, against hand computation and the exact divergence."""

import itertools
import math

import pytest
import torch

from trainer_adapters import AdapterError, gae, token_rewards
from trainer_adapters.kl import reference_kl, reference_log_ratio


def test_estimate_of_single_tokens() -> None:
    logprobs, reference = torch.tensor([[-1.0, -1.0, -2.0]]), torch.tensor([[-1.0, -2.0, -1.0]])
    expected = [0.0, math.exp(-1) + 1 - 1, math.e - 1 - 1]
    assert reference_kl(logprobs, reference).tolist() == [pytest.approx(expected)]


def test_estimate_is_never_negative_however_near_the_policies_are() -> None:
    logprobs = -torch.rand(1, 10_000, generator=torch.Generator().manual_seed(0))
    for distance in (1e-3, 1e-5, 1e-7):
        reference = logprobs + distance * torch.randn(1, 10_000, generator=torch.Generator().manual_seed(1))
        estimate = reference_kl(logprobs, reference)
        assert (estimate >= 0).all()
        half_square = (reference - logprobs).square() / 2
        assert torch.allclose(estimate, half_square, rtol=1e-2, atol=1e-9), "what is left is rounding error"


def test_mean_over_the_policys_own_tokens_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 5, generator=generator).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * reference_kl(policy[None], reference[None])[0]).sum().item() == pytest.approx(exact.item())


def test_gradient_as_a_loss_is_that_of_the_divergence_from_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference_logits = torch.randn(2, 5, generator=generator)
    reference = reference_logits.log_softmax(-1)

    def gradient(of_loss: bool) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        policy = leaf.log_softmax(-1)
        sampled = (policy.exp().detach() * reference_kl(policy[None], reference[None])[0]).sum()
        (sampled if of_loss else (reference.exp() * (reference - policy)).sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.allclose(gradient(True), gradient(False), atol=1e-6)


def test_gradient_as_a_penalty_in_the_reward_is_that_of_the_divergence_from_the_policy() -> None:
    """Exactly: over all sequences of two tokens out of three, the second of which depends on the first."""
    size = 3
    sequences = torch.tensor(list(itertools.product(range(size), repeat=2)))
    generator = torch.Generator().manual_seed(0)
    # row 0 is about the first token, row 1 + i about the one after token i
    table, reference_table = torch.randn(2, 1 + size, size, generator=generator)
    rows = torch.stack([torch.zeros_like(sequences[:, 0]), 1 + sequences[:, 0]], dim=1)

    def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[rows, sequences]

    leaf, reference = table.clone().requires_grad_(), logprobs_of(reference_table)
    logprobs = logprobs_of(leaf)
    probability = logprobs.sum(1).exp()
    divergence = (probability * (logprobs - reference).sum(1)).sum()
    (exact,) = torch.autograd.grad(divergence, leaf, retain_graph=True)

    every = torch.ones_like(sequences, dtype=torch.bool)
    penalty = reference_log_ratio(logprobs, reference)
    rewards = token_rewards(torch.zeros(len(sequences)), every, kl=penalty, kl_coef=1.0)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), every, gamma=1.0, lam=1.0)
    expected_reward = (probability.detach()[:, None] * advantages * logprobs).sum()
    (gradient,) = torch.autograd.grad(expected_reward, leaf)
    assert exact.abs().max() > 0.1
    assert torch.allclose(gradient, -exact, atol=1e-6)


def test_log_ratio_is_signed_and_a_constant() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -2.0]], requires_grad=True)
    ratio = reference_log_ratio(logprobs, torch.tensor([[-1.0, -2.0, -1.0]]))
    assert ratio.tolist() == [[0.0, 1.0, -1.0]]
    assert not ratio.requires_grad


def test_half_precision_log_probs_are_compared_in_float32() -> None:
    logprobs, reference = torch.tensor([[-1.0, -8.0]]).bfloat16(), torch.tensor([[-1.0078125, -8.0625]]).bfloat16()
    for estimate in (reference_kl, reference_log_ratio):
        assert torch.equal(estimate(logprobs, reference), estimate(logprobs.float(), reference.float()))
        assert estimate(logprobs.double(), reference.double()).dtype == torch.float64


def test_token_that_the_policy_all_but_excludes_stays_finite() -> None:
    logprobs = torch.tensor([[-500.0]], requires_grad=True)
    estimate = reference_kl(logprobs, torch.tensor([[-1.0]]))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(math.exp(20) - 21)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_reference_gets_no_gradient_and_must_have_the_same_shape() -> None:
    reference = torch.zeros(1, 2, requires_grad=True)
    reference_kl(torch.ones(1, 2, requires_grad=True), reference).sum().backward()
    assert reference.grad is None
    for estimate in (reference_kl, reference_log_ratio):
        with pytest.raises(AdapterError, match=r"reference_logprobs must be \[1, 2\]"):
            estimate(torch.zeros(1, 2), torch.zeros(2))

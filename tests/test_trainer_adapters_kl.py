"""The distance to a reference policy, against hand computation and the exact divergence."""

import math

import pytest
import torch

from trainer_adapters import AdapterError
from trainer_adapters.kl import reference_kl


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
    with pytest.raises(AdapterError, match=r"reference_logprobs must be \[1, 2\]"):
        reference_kl(torch.zeros(1, 2), torch.zeros(2))

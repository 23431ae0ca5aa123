"""What tokens of older policies weigh, against hand computation."""

import math

import pytest
import torch

from trainer_adapters import AdapterError, grpo_loss
from trainer_adapters.importance import masked_importance, truncated_importance

RATIOS = [0.1, 0.5, 0.9, 1.0, 1.9, 3.0, math.inf]
OLD = torch.full((1, len(RATIOS)), -1.0)
NEW = OLD + torch.tensor([RATIOS]).log()


def test_truncated_weights_are_the_ratios_up_to_the_bound() -> None:
    assert truncated_importance(NEW, OLD, high=2.0).tolist() == [pytest.approx([0.1, 0.5, 0.9, 1.0, 1.9, 2.0, 2.0])]


def test_masked_weights_are_the_ratios_inside_the_bounds_and_0_outside() -> None:
    weights = masked_importance(NEW, OLD, low=0.4, high=2.0)
    assert weights.tolist() == [pytest.approx([0.0, 0.5, 0.9, 1.0, 1.9, 0.0, 0.0])]
    assert masked_importance(NEW, OLD, low=0.0, high=2.0)[0, 0].item() == pytest.approx(0.1)


def test_weights_are_constants() -> None:
    new = NEW.clone().requires_grad_()
    assert not truncated_importance(new, OLD).requires_grad
    assert not masked_importance(new, OLD).requires_grad


def test_weights_of_bf16_log_probs_are_float32() -> None:
    new, old = torch.tensor([[-8.0, -1.0078125]]).bfloat16(), torch.tensor([[-8.125, -8.125]]).bfloat16()
    for weigh in (truncated_importance, masked_importance):
        weights = weigh(new, old, high=2000.0)
        assert weights.dtype == torch.float32
        assert torch.equal(weights, weigh(new.float(), old.float(), high=2000.0)), "the ratio was rounded to bf16"
        assert weigh(new.double(), old.double()).dtype == torch.float64


def test_truncated_weights_are_what_grpo_loss_takes_by_itself() -> None:
    logprobs = (NEW[:, :-1] + 0.05).requires_grad_()
    arguments = (logprobs, OLD[:, :-1], torch.tensor([2.0]), torch.ones(1, 6, dtype=torch.bool))
    by_itself, its_metrics = grpo_loss(*arguments, proximal_logprobs=NEW[:, :-1])
    weights = truncated_importance(NEW[:, :-1], OLD[:, :-1])
    given, metrics = grpo_loss(*arguments, proximal_logprobs=NEW[:, :-1], importance_weights=weights)
    assert torch.equal(by_itself, given)
    assert metrics == its_metrics
    assert metrics.truncated_share == pytest.approx(1 / 6), "one ratio is above the bound"


def test_token_of_weight_0_has_no_gradient_and_counts_in_the_mean() -> None:
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    loss, metrics = grpo_loss(
        logprobs,
        torch.tensor([[-1.0, -1.0 + math.log(2)]]),
        torch.tensor([3.0]),
        torch.ones(1, 2, dtype=torch.bool),
        proximal_logprobs=torch.full((1, 2), -1.0),
        importance_weights=torch.tensor([[0.0, 0.5]]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * 3.0 / 2)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([0.0, -0.75])]
    assert (metrics.num_tokens, metrics.truncated_share) == (2, 0.5)


def test_weights_without_the_log_probs_that_they_weigh_are_refused() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(AdapterError, match="need proximal_logprobs beside them"):
        grpo_loss(zeros, zeros, torch.zeros(1), zeros.bool(), importance_weights=torch.ones(1, 2))


def test_weights_of_another_shape_are_refused() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(AdapterError, match=r"importance_weights must be \[1, 2\]"):
        grpo_loss(zeros, zeros, torch.zeros(1), zeros.bool(), importance_weights=torch.ones(1, 1))
    for weigh in (truncated_importance, masked_importance):
        with pytest.raises(AdapterError, match=r"old_logprobs must be \[1, 2\]"):
            weigh(torch.zeros(1, 2), torch.zeros(1, 1))


@pytest.mark.parametrize("high", [0.9, math.inf, math.nan])
def test_bounds_that_would_bias_every_token_are_refused(high: float) -> None:
    for weigh in (truncated_importance, masked_importance):
        with pytest.raises(AdapterError, match=f"high.* {high}"):
            weigh(NEW, OLD, high=high)
    with pytest.raises(AdapterError, match=r"low must be in \[0, 1\]"):
        masked_importance(NEW, OLD, low=1.1)

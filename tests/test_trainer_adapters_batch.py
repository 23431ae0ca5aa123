"""Rollouts as padded tensors."""

import dataclasses
from typing import Any

import pytest
import torch

from rollout import FinishReason, Rollout, VersionSpan
from trainer_adapters import AdapterError, pad_rollouts

EOS = 9


def rollout(name: str, prompt: list[int], tokens: list[int], **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "rollout_id": name,
        "prompt_ids": prompt,
        "token_ids": tokens,
        "logprobs": [-0.5 * (i + 1) for i in range(len(tokens))],
        "loss_mask": [1] * len(tokens),
        "version_spans": [VersionSpan(0, 3)] if tokens else [],
        "prefill_version": 3,
        "finish_reason": FinishReason.STOP,
        "reward": 1.0,
    }
    return Rollout(**{**fields, **changes})


def test_rows_are_prompt_then_response_then_padding() -> None:
    batch = pad_rollouts([[rollout("a", [1, 2], [5, 6, EOS])], [rollout("b", [3], [7])]], pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, EOS], [3, 7, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 5, 6, EOS], [7, 0, 0, 0]]
    assert batch.rollout_ids == ("a", "b")


def test_logprobs_masks_and_versions_line_up_with_the_targets_they_are_about() -> None:
    spans = [VersionSpan(0, 3), VersionSpan(2, 5)]
    given = rollout("a", [1, 2], [5, 6, EOS], version_spans=spans, loss_mask=[1, 0, 1])
    batch = pad_rollouts([[given], [rollout("b", [3], [7])]], pad_id=0)
    assert batch.old_logprobs.tolist() == [[0.0, -0.5, -1.0, -1.5], [-0.5, 0.0, 0.0, 0.0]]
    assert batch.response_mask.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch.loss_mask.tolist() == [[False, True, False, True], [True, False, False, False]]
    assert batch.versions.tolist() == [[-1, 3, 3, 5], [3, -1, -1, -1]]


def test_masks_do_not_depend_on_the_pad_id() -> None:
    groups = [[rollout("a", [EOS, 2], [5, EOS]), rollout("b", [3], [EOS])]]
    as_eos, as_zero = pad_rollouts(groups, pad_id=EOS), pad_rollouts(groups, pad_id=0)
    for name in ("attention_mask", "response_mask", "loss_mask", "old_logprobs"):
        assert torch.equal(getattr(as_eos, name), getattr(as_zero, name)), name
    assert as_eos.loss_mask.tolist() == [[False, True, True], [True, False, False]]


def test_failed_and_empty_rollouts_stay_out_and_are_named() -> None:
    failed = rollout("failed", [1], [5], finish_reason=FinishReason.ERROR, error="the loop died", reward=None)
    empty = rollout("empty", [1], [], finish_reason=FinishReason.ABORT, reward=None)
    batch = pad_rollouts([[failed, rollout("a", [1], [2])], [empty, rollout("b", [1], [2])]], pad_id=0)
    assert batch.rollout_ids == ("a", "b")
    assert batch.dropped_ids == ("failed", "empty")
    assert batch.group_index.tolist() == [0, 1]
    assert batch.input_ids.shape == (2, 2)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.TIMEOUT])
def test_partial_rollouts_are_in_and_marked_truncated(reason: FinishReason) -> None:
    batch = pad_rollouts([[rollout("a", [1], [2]), rollout("b", [1], [2, 3], finish_reason=reason)]], pad_id=0)
    assert batch.truncated.tolist() == [False, True]


def test_shapes_and_dtypes_are_the_documented_ones() -> None:
    batch = pad_rollouts([[rollout("a", [1, 2], [5, 6]), rollout("b", [1], [7])]], pad_id=0)
    wide = {"input_ids": torch.int64, "attention_mask": torch.int64}
    aligned = {
        "response_mask": torch.bool,
        "loss_mask": torch.bool,
        "old_logprobs": torch.float32,
        "versions": torch.int64,
    }
    rows = {"rewards": torch.float32, "group_index": torch.int64, "truncated": torch.bool}
    for names, shape in ((wide, (2, 4)), (aligned, (2, 3)), (rows, (2,))):
        for name, dtype in names.items():
            assert (tuple(getattr(batch, name).shape), getattr(batch, name).dtype) == (shape, dtype), name


def test_to_moves_every_tensor_and_keeps_the_ids() -> None:
    batch = pad_rollouts([[rollout("a", [1], [2])]], pad_id=0)
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.rollout_ids == ("a",)


def test_rows_of_a_batch_keep_their_tensors_and_their_ids() -> None:
    batch = pad_rollouts([[rollout("a", [1], [2]), rollout("b", [1], [3, 4]), rollout("c", [1], [5])]], pad_id=0)
    part = batch.rows(torch.tensor([2, 0]))
    assert part.rollout_ids == ("c", "a")
    for name, tensor in vars(part).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(batch, name)[[2, 0]])
    assert torch.equal(part.targets, batch.targets[[2, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": None}, "rollout a has no reward"),
        ({"reward": float("nan")}, "rollout a has the reward nan"),
        ({"reward": float("-inf")}, "rollout a has the reward -inf"),
        ({"finish_reason": None}, "rollout a is still in flight"),
        ({"prompt_ids": []}, "rollout a has no prompt"),
    ],
)
def test_rollout_that_cannot_be_trained_on_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        pad_rollouts([[dataclasses.replace(rollout("a", [1], [2]), **changes)]], pad_id=0)


@pytest.mark.parametrize("pad_id", [None, -1])
def test_pad_id_must_be_a_token_id(pad_id: int | None) -> None:
    with pytest.raises(AdapterError, match="use its EOS id"):
        pad_rollouts([[rollout("a", [1], [2])]], pad_id=pad_id)


def test_batch_without_tokens_is_refused() -> None:
    with pytest.raises(AdapterError, match="none of the 1 rollouts"):
        pad_rollouts([[rollout("a", [1], [], finish_reason=FinishReason.ABORT)]], pad_id=0)

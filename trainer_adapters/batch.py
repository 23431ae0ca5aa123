"""Rollouts as the tensors of a training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollout import FinishReason, Rollout
from trainer_adapters.errors import AdapterError


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """B rollouts in rows of T = the longest prompt + response, padded on the right.

    The fields of width T-1 are aligned with `targets`: column t is about the token at input column t+1, which
    `logits[:, t]` predicts. So `token_logprobs(logits[:, :-1], batch.targets)` lines up with `old_logprobs`.
    """

    input_ids: Tensor
    """[B, T] int64: prompt, response, then `pad_id`."""
    attention_mask: Tensor
    """[B, T] int64: 1 on prompt and response, 0 on padding. Made of lengths, so `pad_id` may be the EOS id."""
    response_mask: Tensor
    """[B, T-1] bool: the target was sampled by the policy."""
    loss_mask: Tensor
    """[B, T-1] bool: the target counts in the loss (`response_mask` and the rollout's own `loss_mask`)."""
    old_logprobs: Tensor
    """[B, T-1] float32: log-prob of the target under the policy that sampled it; 0 outside the response."""
    versions: Tensor
    """[B, T-1] int64: the policy version that sampled the target. Outside the response it is -1, which is no version, so mask
    first: `batch.versions[batch.response_mask].min()`."""
    rewards: Tensor
    """[B] float32."""
    group_index: Tensor
    """[B] int64: the position, in the given groups, of the group that the row belongs to."""
    truncated: Tensor
    """[B] bool: ended by anything but a stop token, so the response may lack its end."""
    rollout_ids: tuple[str, ...]
    """B ids, in row order."""
    dropped_ids: tuple[str, ...]
    """Rollouts of the given groups that are in no row: failed ones and those without tokens."""

    @property
    def targets(self) -> Tensor:
        """[B, T-1] int64: the token that each position predicts."""
        return self.input_ids[:, 1:]

    def rows(self, index: Tensor) -> "RolloutBatch":
        """The rows at `index` [n] int64, in that order and as wide as they are here, as for a minibatch; `dropped_ids` are
        still those of the given groups."""
        tensors: dict[str, Any] = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, rollout_ids=tuple(self.rollout_ids[i] for i in index.tolist()), **tensors)

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """The same batch on another device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def pad_rollouts(groups: Sequence[Sequence[Rollout]], pad_id: int | None) -> RolloutBatch:
    """Rows in the order given, group by group. Failed rollouts (ERROR) and those without tokens stay out and are named
    in `dropped_ids`; partial ones (LENGTH, ABORT, TIMEOUT) are in, marked `truncated`.

    `pad_id` fills the rows; any valid id will do, the EOS id too. Raises AdapterError if it is none, if a kept rollout
    has no finite reward, no prompt or is still in flight, or if none is kept.
    """
    if pad_id is None or pad_id < 0:
        raise AdapterError(f"pad_id must be a token id, got {pad_id}; a tokenizer without one can use its EOS id")
    every = [(index, rollout) for index, group in enumerate(groups) for rollout in group]
    kept = [(index, rollout) for index, rollout in every if _is_trainable(rollout)]
    if not kept:
        raise AdapterError(f"none of the {len(every)} rollouts has tokens to train on")
    rewards = [_reward_of(rollout) for _, rollout in kept]
    shape = (len(kept), max(len(rollout.prompt_ids) + len(rollout.token_ids) for _, rollout in kept))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    # These four are made as wide as the ids, and lose their first column, which no position predicts, at the end.
    response_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    old_logprobs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.full(shape, -1, dtype=torch.int64)
    for row, (_, rollout) in enumerate(kept):
        start = len(rollout.prompt_ids)
        end = start + len(rollout.token_ids)
        input_ids[row, :start] = torch.tensor(rollout.prompt_ids)
        input_ids[row, start:end] = torch.tensor(rollout.token_ids)
        attention_mask[row, :end] = 1
        response_mask[row, start:end] = True
        loss_mask[row, start:end] = torch.tensor(rollout.loss_mask, dtype=torch.bool)
        old_logprobs[row, start:end] = torch.tensor(rollout.logprobs, dtype=torch.float32)
        versions[row, start:end] = torch.tensor(rollout.versions)
    return RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask[:, 1:],
        loss_mask=loss_mask[:, 1:],
        old_logprobs=old_logprobs[:, 1:],
        versions=versions[:, 1:],
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_index=torch.tensor([index for index, _ in kept]),
        truncated=torch.tensor([rollout.finish_reason is not FinishReason.STOP for _, rollout in kept]),
        rollout_ids=tuple(rollout.rollout_id for _, rollout in kept),
        dropped_ids=tuple(rollout.rollout_id for _, rollout in every if not _is_trainable(rollout)),
    )


def _is_trainable(rollout: Rollout) -> bool:
    return bool(rollout.token_ids) and rollout.finish_reason is not FinishReason.ERROR


def _reward_of(rollout: Rollout) -> float:
    if rollout.finish_reason is None:
        raise AdapterError(f"rollout {rollout.rollout_id} is still in flight; train on what its future resolves to")
    if not rollout.prompt_ids:
        raise AdapterError(f"rollout {rollout.rollout_id} has no prompt, so nothing predicts its first token")
    if rollout.reward is None:
        raise AdapterError(
            f"rollout {rollout.rollout_id} has no reward; give it one with dataclasses.replace(rollout, reward=...)"
        )
    if not math.isfinite(rollout.reward):
        raise AdapterError(
            f"rollout {rollout.rollout_id} has the reward {rollout.reward}, which would make its whole group's advantages NaN; "
            "give it a finite one, or leave it out"
        )
    return rollout.reward

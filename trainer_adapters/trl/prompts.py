"""TRL's rows and reward functions, as a RolloutController takes prompts and rewards."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trl.data_utils import is_conversational
from trl.trainer.utils import get_callable_name

from rollout import InvalidRequestError, RewardResult, Rollout, Rows
from rollout.batches import tokenized
from trainer_adapters.errors import AdapterError

PROMPT = "trl_prompt"
"""The column that keeps a row's prompt as it was written."""
UNSCORABLE = "trl_unscorable"
REWARDS = "trl_rewards"

RewardFunc = Callable[..., Any]
"""TRL's: (prompts, completions, completion_ids, and the row's columns) -> a number, None or NaN for each; or a coroutine."""


def prompt_ids_of(prompts: Sequence[Any], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The ids of TRL's prompts, text or chat messages, as TRL itself would make them."""
    if is_conversational({"prompt": prompts[0]}):
        encoded = tokenizer.apply_chat_template(
            conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
        )
    else:
        encoded = tokenizer(text=prompts)
    return [list(ids) for ids in encoded["input_ids"]]


class PromptRows(Sequence[Mapping[str, Any]]):
    """A dataset's rows with "prompt" encoded as TRL would, and kept as it was in the column `PROMPT`."""

    def __init__(self, rows: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        """AdapterError for rows that cannot be read by position."""
        if not isinstance(rows, Rows):
            raise AdapterError(
                f"prompts must be a dataset or a list, got {type(rows).__name__}, which has no length; make a list of it"
            )
        self._rows = rows
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: Any) -> Any:
        row = self._rows[position]
        if "prompt" not in row:
            raise InvalidRequestError(f'row {position} has no "prompt", only {sorted(row)}')
        what = "text" if isinstance(row["prompt"], str) else "chat messages"
        ids = tokenized(what, partial(self._encode, row["prompt"]))
        return {**row, PROMPT: row["prompt"], "prompt": ids}

    def _encode(self, prompt: Any) -> list[int]:
        (ids,) = prompt_ids_of([prompt], self._tokenizer, self._template_kwargs)
        return ids


def completion_of(rollout: Rollout, tokenizer: Any) -> Any:
    """What a reward function is shown: text, or the assistant's message where the prompt is a chat."""
    text = rollout.text(tokenizer)
    is_chat = is_conversational({"prompt": rollout.metadata.get(PROMPT)})
    return [{"role": "assistant", "content": text}] if is_chat else text


def group_reward_of(
    functions: Sequence[RewardFunc], weights: Sequence[float], tokenizer: Any
) -> Callable[[list[Rollout]], list[RewardResult]]:
    """The weighted sum of TRL's reward functions, over a group. A rollout for which every function returned None or NaN is
    unscorable and says so in its metadata; its reward here is the mean of the others, which leaves the controller's own
    means as they are, or 0 if there are none."""
    names = [get_callable_name(function) for function in functions]

    def rewards(rollouts: list[Rollout]) -> list[RewardResult]:
        columns: dict[str, list[Any]] = {
            name: [rollout.metadata[name] for rollout in rollouts] for name in rollouts[0].metadata if name != PROMPT
        }
        given = {
            **columns,
            "prompts": [rollout.metadata[PROMPT] for rollout in rollouts],
            "completions": [completion_of(rollout, tokenizer) for rollout in rollouts],
            "completion_ids": [list(rollout.token_ids) for rollout in rollouts],
            "policy_version": [rollout.max_version for rollout in rollouts],
            "min_policy_version": [rollout.min_version for rollout in rollouts],
            "finish_reason": [str(rollout.finish_reason) for rollout in rollouts],
        }
        by_function = [_called(function, given, len(rollouts)) for function in functions]
        rows = list(zip(*by_function, strict=True))
        sums = [_summed(row, weights) for row in rows]
        scored = [total for total in sums if total is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        return [
            RewardResult(
                reward=mean if total is None else total,
                metrics={f"{name}/mean": value for name, value in zip(names, row, strict=True) if value is not None},
                metadata={
                    REWARDS: {n: math.nan if v is None else v for n, v in zip(names, row, strict=True)},
                    UNSCORABLE: total is None,
                },
            )
            for row, total in zip(rows, sums, strict=True)
        ]

    return rewards


def _called(function: RewardFunc, given: Mapping[str, Any], count: int) -> list[float | None]:
    values = function(**given)
    if inspect.iscoroutine(values):
        values = asyncio.run(values)
    if len(values) != count:
        raise ValueError(f"the reward function returned {len(values)} rewards for {count} completions")
    return [None if value is None or math.isnan(value) else float(value) for value in values]


def _summed(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value * weight for value, weight in zip(row, weights, strict=True) if value is not None]
    return sum(known) if known else None

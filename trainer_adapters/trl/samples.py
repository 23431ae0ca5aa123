"""From TRL's AsyncGRPO settings to a controller's, and from a controller's groups to what TRL trains on."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollout import Rollout, RolloutConfig, RolloutGroup, SamplingParams
from trainer_adapters.errors import AdapterError
from trainer_adapters.trl.prompts import PROMPT, REWARDS, UNSCORABLE, completion_of
from trainer_adapters.trl.settings import check_sampling


def rollout_config_of(args: AsyncGRPOConfig) -> RolloutConfig:
    """TRL's settings as a controller's: a batch is what the trainer uses up between two weight syncs. The controller may
    run one version less ahead than TRL allows, for the time that samples spend in TRL's queue."""
    check_sampling(args)
    if args.max_staleness < 1:
        raise AdapterError(f"max_staleness must be at least 1, got {args.max_staleness}: samples cross TRL's queue")
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.weight_sync_steps
    return RolloutConfig(
        group_size=args.num_generations,
        prompts_per_step=math.ceil(samples / args.num_generations),
        max_staleness=args.max_staleness - 1,
        sampling=SamplingParams(
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
        ),
        seed=args.seed,
        num_epochs=None,
        on_failed_sample="refill",
    )


def samples_of(
    group: RolloutGroup, number: int, tokenizer: Any, trl_version: Callable[[int], int]
) -> list[RolloutSample]:
    """A group as TRL trains on it. `number` names the group; `trl_version` maps an engine's version to TRL's."""
    rewards = np.array([_reward_of(rollout) for rollout in group], dtype=float)
    scored = ~np.isnan(rewards)
    mean, std = (rewards[scored].mean(), rewards[scored].std()) if scored.any() else (math.nan, math.nan)
    advantages = np.where(scored, (rewards - mean) / (std + 1e-8), 0.0)
    return [
        RolloutSample(
            prompt=_messages(rollout.metadata.get(PROMPT, ""), "user"),
            completion=_messages("" if tokenizer is None else completion_of(rollout, tokenizer), "assistant"),
            input_ids=np.array(rollout.prompt_ids + rollout.token_ids, dtype=np.int64),
            completion_mask=np.array([0] * len(rollout.prompt_ids) + rollout.loss_mask, dtype=np.int64),
            old_log_probs=np.array([0.0] * len(rollout.prompt_ids) + rollout.logprobs, dtype=np.float32),
            advantage=float(advantage),
            model_version=trl_version(_oldest_of(rollout)),
            group_id=number,
            metrics={
                "reward": float(reward),
                "reward_std": float(std),
                **{f"rewards/{name}": value for name, value in rollout.metadata.get(REWARDS, {}).items()},
            },
        )
        for rollout, reward, advantage in zip(group, rewards, advantages, strict=True)
    ]


def _oldest_of(rollout: Rollout) -> int:
    version = rollout.min_version
    assert version is not None, f"rollout {rollout.rollout_id} has no token, and was handed out"
    return version


def _reward_of(rollout: Rollout) -> float:
    if rollout.metadata.get(UNSCORABLE):
        return math.nan
    if rollout.reward is None:
        raise AdapterError(f"rollout {rollout.rollout_id} has no reward; give the controller a reward function")
    return rollout.reward


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}] if isinstance(content, str) else list(content)

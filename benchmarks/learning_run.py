"""One run of benchmarks/learning.py: a policy learns from what an engine samples with it. A part of that script."""

import copy
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean

import torch
from learning_task import (
    ANSWER_TOKENS,
    END,
    TRAINING,
    held_out_reward,
    position_rewards,
    prompt_ids,
    reward,
    small_model,
)
from torch import Tensor
from transformers import PreTrainedModel

from rollout import (
    EngineConfig,
    FinishReason,
    GenerationEngine,
    Rollout,
    RolloutConfig,
    RolloutController,
    RolloutError,
    RunLog,
    SamplingParams,
    UpdateRecord,
)
from sync import WeightSync
from trainer_adapters import (
    RolloutBatch,
    ValueHead,
    gae,
    group_advantages,
    grpo_loss,
    normalised,
    pad_rollouts,
    ppo_loss,
    token_logprobs,
    truncated_importance,
)

LIMIT_S = 120.0
MAX_GRAD_NORM = 1.0

Weights = dict[str, Tensor]


class Behaviour(StrEnum):
    """What a token is taken to have been sampled with, from which its importance weight follows."""

    RECORDED = "recorded"
    """Its own log-prob, from the engine."""
    CURRENT = "current"
    """The weights that train on it: no correction."""
    LABELLED = "labelled"
    """The weights of its version label, from which its log-prob is computed again."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a run goes."""

    algorithm: str
    """grpo or ppo."""
    max_staleness: int
    """Versions that generation may be behind; 0: generation and training take turns."""
    drains: bool = False
    """Whether all that is generated is waited for before new weights are published; else these meet it in flight."""
    lag: int = 0
    """Batches that are generated after one, and before it is trained on: so many versions old it then is, to the token."""
    prompts_per_batch: int = 64
    group_size: int = 8
    num_minibatches: int = 4
    learning_rate: float = 1e-3
    """At the start; it falls to a tenth of that, linearly."""
    behaviour: Behaviour = Behaviour.RECORDED
    label_error: int = 0
    """Versions by which the labels are too high, up to the version that trains."""
    failing: float = 0.0
    """Share of the samples that break off and come back as failed."""
    trains_failed: bool = False
    """Trains on what those have, with a reward of 0; else they stay out."""
    max_requests: int = 128
    """That an engine generates at once."""
    stale_prefixes: bool = False
    """An update leaves the prefix cache as it is, as upstream's pause does."""

    @property
    def batch_size(self) -> int:
        return self.prompts_per_batch * self.group_size


@dataclass(kw_only=True)
class Curve:
    """What a run has shown."""

    seed: int
    batch_size: int
    held_out: list[float] = field(default_factory=list)  # [num_versions], from version 0
    """Greedy reward on the held-out prompts."""
    seconds: list[float] = field(default_factory=lambda: [0.0])  # [num_versions]
    """From the start until an engine runs on the version. The held-out rewards are measured after the run."""
    trained: list[float] = field(default_factory=list)  # [num_versions - 1], as those below
    """Mean reward of the batch that made the next version."""
    spanning: list[float] = field(default_factory=list)
    """Share of its rollouts that an update met in flight."""
    staleness: list[float] = field(default_factory=list)
    """Versions from a rollout's oldest token to the weights that trained on it, mean."""
    logprob_gap: list[float] = field(default_factory=list)
    """Mean of |trainer's log-prob - engine's| of its tokens, nats."""
    versions: list[int] = field(default_factory=list)
    """The engine's, after each publish."""

    @property
    def samples(self) -> list[int]:
        """How many each version has trained on."""
        return [version * self.batch_size for version in range(len(self.held_out))]

    def version_at(self, goal: float) -> int | None:
        """The first version whose held-out reward reaches the goal."""
        return next((version for version, value in enumerate(self.held_out) if value >= goal), None)


def learn(setting: Setting, seed: int, num_batches: int, folder: Path, *, num_workers: int = 1) -> Curve:
    """Trains on `num_batches` batches, each of which makes a version. `folder`: a new one for the run. `num_workers`: the
    engines, each a Ray worker; 0: one engine in this process."""
    learner, curve = Learner(setting, seed, num_batches), Curve(seed=seed, batch_size=setting.batch_size)
    weights, log = [learner.copy()], RunLog(folder)
    with (
        controller_for(learner.model, setting, seed, num_workers, folder) as controller,
        WeightSync(controller) as sync,
    ):
        if setting.stale_prefixes:
            for worker in controller.workers():
                worker.call(keep_stale_prefixes).result(LIMIT_S)
        batches: deque[list[Rollout]] = deque()
        started_at = time.monotonic()
        for step in range(1, num_batches + 1):
            while len(batches) <= setting.lag:
                with controller.next_batch(LIMIT_S) as lease:
                    batches.append(lease.rollouts)
            rollouts = [fallible(rollout, setting) for rollout in batches.popleft()]
            gap = learner.train(rollouts, weights)
            if setting.drains:
                controller.drain(LIMIT_S)
            report = sync.publish(learner.model, timeout_s=LIMIT_S)
            if report.failures:
                raise RolloutError(f"version {report.version} was not taken: {report.failures}")
            if setting.drains:
                controller.resume()
            weights.append(learner.copy())

            curve.seconds.append(time.monotonic() - started_at)
            curve.versions.append(report.version)
            curve.trained.append(fmean(rollout.reward or 0.0 for rollout in rollouts))
            curve.spanning.append(fmean(rollout.spans_update for rollout in rollouts))
            curve.staleness.append(fmean(step - 1 - (rollout.min_version or 0) for rollout in rollouts))
            curve.logprob_gap.append(gap)
            # one of each group: all of them make no page worth reading, and their writing would take time
            log.write_rollouts(rollouts[:: setting.group_size], step=step, trained_version=step - 1)
            log.write_update(
                UpdateRecord(
                    version=report.version,
                    wait_s=report.pause_wait_s,
                    held_s=report.commit_s,
                    straddlers=report.straddlers,
                ),
                worker_id=rollouts[0].worker_id,
            )
    for state in weights:
        learner.model.load_state_dict(state)
        curve.held_out.append(held_out_reward(learner.model))
    for step, (samples, seconds, held_out) in enumerate(zip(curve.samples, curve.seconds, curve.held_out, strict=True)):
        log.write_metrics({"step": step, "samples": samples, "seconds": seconds, "held_out_reward": held_out})
    return curve


def controller_for(
    model: PreTrainedModel, setting: Setting, seed: int, num_workers: int, folder: Path
) -> RolloutController:
    """A fleet that begins with this model's weights."""
    if num_workers:
        model.save_pretrained(folder / "initial")
    return RolloutController(
        str(folder / "initial") if num_workers else copy.deepcopy(model),
        [{"prompt": prompt_ids(digits), "digits": str(digits)} for digits in TRAINING],
        group_reward_fn=rewards,
        engine=EngineConfig(num_threads=1, page_size=4, num_blocks=4096, max_requests=setting.max_requests),
        config=RolloutConfig(
            num_workers=num_workers,
            prompts_per_step=setting.prompts_per_batch,
            group_size=setting.group_size,
            max_staleness=setting.max_staleness,
            sampling=SamplingParams(max_new_tokens=ANSWER_TOKENS),
            seed=seed,
            num_epochs=None,
            shuffle=True,
        ),
    )


def rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """Of a group."""
    return [reward(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]


def keep_stale_prefixes(engine: GenerationEngine) -> None:
    """From now on an update leaves what the prefix cache has of older versions where new requests find it."""
    engine.manager.isolate_prefixes = lambda: None  # type: ignore[method-assign]


def fallible(rollout: Rollout, setting: Setting) -> Rollout:
    """The rollout, or for a `failing` share of them what a failure after the first token would have left of it. Where
    failed samples are trained on, it comes as a loop takes it that does not ask how it ended."""
    if random.Random(rollout.rollout_id).random() >= setting.failing:
        return rollout
    return replace(
        rollout,
        token_ids=rollout.token_ids[:1],
        logprobs=rollout.logprobs[:1],
        loss_mask=rollout.loss_mask[:1],
        version_spans=rollout.version_spans[:1],
        finish_reason=FinishReason.LENGTH if setting.trains_failed else FinishReason.ERROR,
        error="broken off by the benchmark",
        reward=0.0,
    )


class Learner:
    """The policy, its critic (PPO) and its optimizer."""

    def __init__(self, setting: Setting, seed: int, num_batches: int) -> None:
        torch.manual_seed(seed)
        self.setting = setting
        self.model = small_model()
        self.critic = ValueHead(self.model.config.hidden_size)
        self._parameters = [*self.model.parameters(), *self.critic.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=setting.learning_rate, weight_decay=0.0, fused=True)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.1, total_iters=num_batches)

    def copy(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self, rollouts: Sequence[Rollout], weights: Sequence[Weights]) -> float:
        """One pass over a batch, in minibatches. PPO's critic gets each position's reward at its token, GRPO their sum.
        `weights`: those of each version so far. Returns the mean of |trainer's log-prob - engine's|, in nats."""
        size, is_ppo = self.setting.group_size, self.setting.algorithm == "ppo"
        batch = pad_rollouts([rollouts[i : i + size] for i in range(0, len(rollouts), size)], pad_id=END)
        mask = batch.loss_mask
        with torch.no_grad():
            proximal, old_values = self.forward(batch)
            behaviour = self.behaviour_logprobs(batch, proximal, weights)
        importance = truncated_importance(proximal, behaviour)
        if is_ppo:
            advantages, returns = gae(position_rewards(batch.input_ids, mask), old_values, mask)
            advantages = normalised(advantages, mask)
        else:
            advantages = group_advantages(batch.rewards, batch.group_index)
        for rows in torch.randperm(len(mask)).chunk(self.setting.num_minibatches):
            logprobs, values = self.forward(batch, rows)
            same = (logprobs, behaviour[rows], advantages[rows], mask[rows])
            corrected = {"proximal_logprobs": proximal[rows], "importance_weights": importance[rows]}
            if is_ppo:
                loss, _ = ppo_loss(
                    *same, values=values, old_values=old_values[rows], returns=returns[rows], **corrected
                )
            else:
                loss, _ = grpo_loss(*same, **corrected)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
            self._optimizer.step()
        self._schedule.step()
        return (proximal - batch.old_logprobs)[mask].abs().mean().item()

    def forward(
        self, batch: RolloutBatch, rows: Tensor | slice = slice(None), weights: Weights | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and values, [rows, T-1], under the present weights unless others are given."""
        inputs = {"attention_mask": batch.attention_mask[rows], "use_cache": False, "output_hidden_states": True}
        state = self.model.state_dict(keep_vars=True) if weights is None else weights
        out = torch.func.functional_call(self.model, state, (batch.input_ids[rows],), inputs)
        values = self.critic(out.hidden_states[-1][:, :-1])
        return token_logprobs(out.logits[:, :-1], batch.targets[rows]), values

    def behaviour_logprobs(self, batch: RolloutBatch, proximal: Tensor, weights: Sequence[Weights]) -> Tensor:
        """[B, T-1] log-probs under what the tokens are taken to have been sampled with."""
        match self.setting.behaviour:
            case Behaviour.RECORDED:
                return batch.old_logprobs
            case Behaviour.CURRENT:
                return proximal
            case Behaviour.LABELLED:
                labels = (batch.versions + self.setting.label_error).clamp(min=0, max=len(weights) - 1)
        behaviour = proximal
        for version in labels[batch.loss_mask].unique().tolist():
            again, _ = self.forward(batch, weights=weights[version])
            behaviour = torch.where(labels == version, again, behaviour)
        return behaviour

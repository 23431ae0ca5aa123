"""What stands in the place of TRL's vLLM backend: an engine or a fleet, for all ranks of a trainer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from accelerate.utils import gather_object
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from rollout import GenerationEngine, Rollout, RolloutController, SamplingParams
from sync import SyncConfig
from trainer_adapters.errors import AdapterError
from trainer_adapters.generation import Generator, generator_of, is_usable, seed_of
from trainer_adapters.publishing import PolicyPublisher
from trainer_adapters.rank_group import RankGroup
from trainer_adapters.trl.settings import check_sampling

WAIT_GRACE_S = 60.0
"""How much longer than its samples may take one generation, or the draining before the first, may last."""
CONTROLLER_WAITS = 3
"""In the first generation of a controller: its draining, the groups of full size, and a smaller last one."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What TRL gets for the prompts of one rank, a row each."""

    completion_ids: list[list[int]]
    logprobs: list[list[float | None]]  # None: unknown, which TRL leaves uncorrected
    columns: dict[str, list[Any]]
    """For the reward functions: `policy_version` and `min_policy_version` (of the newest and the oldest token),
    `finish_reason`, `rollout_failed`."""

    @property
    def failed(self) -> list[bool]:
        return list(self.columns["rollout_failed"])

    def split(self, sizes: Sequence[int]) -> "list[Rows]":
        """So many rows each, in order."""
        ends = list(accumulate(sizes))
        return [
            Rows(
                completion_ids=self.completion_ids[end - size : end],
                logprobs=self.logprobs[end - size : end],
                columns={name: values[end - size : end] for name, values in self.columns.items()},
            )
            for size, end in zip(sizes, ends, strict=True)
        ]


class EngineBackend:
    """What TRL calls `vllm_generation`: generates for all ranks where the engine is, and publishes the policy.

    In a run of several ranks each has one, and all call each method; only the first needs the engine or controller. A
    failure on the first raises on all of them.
    """

    def __init__(
        self,
        source: GenerationEngine | RolloutController | None,
        trainer: Any,
        *,
        timeout_s: float,
        max_retries: int,
        sync_config: SyncConfig | None,
    ) -> None:
        check_settings(trainer.args, trainer.processing_class)
        self.trainer = trainer
        self._accelerator = trainer.accelerator
        self.publisher = PolicyPublisher(source, trainer.accelerator, config=sync_config, timeout_s=timeout_s)
        self._generator: Generator | None = None
        if source is not None:
            self._generator = generator_of(source, timeout_s=timeout_s, max_retries=max_retries)
        # in a group of its own: what waits for a generation neither holds a GPU nor meets the limit of the trainer's group
        self._ranks = RankGroup(timeout_s=longest_generation_s(timeout_s, max_retries))
        self._num_generations: dict[str, tuple[int, int]] = {}  # by what for: (TRL's step, how often in it)
        self._synced: tuple[Any, int] | None = None  # (TRL's state, which each training has anew, its step)
        # TRL logs training and evaluation each by itself
        self._seen: dict[bool, defaultdict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
        self.last_rows: Rows | None = None
        """Of this rank, of the last call."""
        trainer.add_callback(ClosesWhenIdle(self))

    def sync_weights(self) -> None:
        """Publishes the policy as it is. TRL calls it before the first generation of each step."""
        self._note(self.publisher.publish(self.trainer.model_wrapped))
        self._synced = (self.trainer.state, self.trainer.state.global_step)

    def sync_weights_once(self) -> None:
        """Unless this step's have been published."""
        state = self.trainer.state
        if self._synced is None or self._synced[0] is not state or self._synced[1] != state.global_step:
            self.sync_weights()

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], None]:
        """TRL's call. Equal prompts come next to each other, already repeated."""
        if images is not None:
            raise AdapterError("an engine generates from text only, and the prompts have images; leave them out")
        rows = self.rows(prompts, num_generations)
        return prompts, rows.completion_ids, [[[value] for value in row] for row in rows.logprobs], None

    def rows(self, prompts: list[list[int]], num_generations: int) -> Rows:
        """One row for each prompt of this rank."""
        parts: list[list[list[int]]] = gather_object([prompts])

        def make() -> list[Rows]:
            return self._rows([ids for part in parts for ids in part], num_generations).split([len(p) for p in parts])

        self.last_rows = self._ranks.deal(make)
        return self.last_rows

    def take_metrics(self) -> dict[str, float]:
        """Means since the last call, by name: of training while the model trains, else of evaluation."""
        seen = self._seen[self.trainer.model.training]
        means = {name: sum(values) / len(values) for name, values in seen.items()}
        seen.clear()
        return means

    def close(self) -> None:
        """Frees what publishing keeps. A later publish makes it anew."""
        self.publisher.close()

    def _rows(self, prompts: list[list[int]], num_generations: int) -> Rows:
        assert self._generator is not None
        eos_id = self.trainer.eos_token_ids[0]
        params = replace(sampling_of(self.trainer), seed=self._next_seed())
        rollouts = self._generator.generate(prompts, params, num_generations)
        self._note(generation_metrics(rollouts))
        good = [is_usable(rollout) for rollout in rollouts]
        pairs = list(zip(rollouts, good, strict=True))
        return Rows(
            completion_ids=[list(r.token_ids) if is_good else [eos_id] for r, is_good in pairs],
            logprobs=[list(r.logprobs) if is_good else [None] for r, is_good in pairs],
            columns={
                "policy_version": [r.max_version for r in rollouts],
                "min_policy_version": [r.min_version for r in rollouts],
                "finish_reason": [str(r.finish_reason) for r in rollouts],
                "rollout_failed": [not is_good for is_good in good],
            },
        )

    def _next_seed(self) -> int:
        # By step, not by how often this process has generated: a training that goes on from a checkpoint would draw the
        # noise of its first steps again, and each evaluation would shift that of all later steps.
        what, now = "train" if self.trainer.model.training else "eval", self.trainer.state.global_step
        step, number = self._num_generations.get(what, (now, 0))
        number = number if step == now else 0
        self._num_generations[what] = (now, number + 1)
        return seed_of(self.trainer.args.seed, f"{what}/{now}/{number}")

    def _note(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._seen[self.trainer.model.training][name].append(value)


class ClosesWhenIdle(TrainerCallback):  # type: ignore[misc]
    """Frees what publishing keeps when a training ends, and after an evaluation that is part of none."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._backend.close()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._backend.trainer.is_in_train:
            self._backend.close()


def longest_generation_s(timeout_s: float, max_retries: int) -> float:
    """How long the other ranks wait for the first one: longer than any generator may take. An engine takes one wait and one
    a retry; a controller has a setting of its own for retries."""
    return max(1 + max_retries, CONTROLLER_WAITS) * (timeout_s + WAIT_GRACE_S)


def sampling_of(trainer: Any) -> SamplingParams:
    """How TRL's settings say to sample."""
    return SamplingParams(
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k or 0,
        stop_token_ids=trainer.eos_token_ids,
    )


def generation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of one batch, by name."""
    good = [rollout for rollout in rollouts if is_usable(rollout)]
    versions = [v for rollout in good if (v := rollout.min_version) is not None]
    ended = [r.timings for r in good if r.timings is not None and r.timings.finished_at is not None]
    metrics = {
        "engine/version": float(max(r.max_version or 0 for r in good)),
        "rollout/min_policy_version": float(min(versions)),
        "rollout/failed_samples": float(len(rollouts) - len(good)),
        "rollout/reprefills": float(sum(rollout.num_reprefills for rollout in rollouts)),
    }
    if ended:
        seconds = max(t.finished_at or 0.0 for t in ended) - min(t.submitted_at for t in ended)
        metrics["rollout/generation_s"] = seconds
        metrics["rollout/tokens_per_s"] = sum(len(r.token_ids) for r in good) / max(seconds, 1e-9)
    return metrics


def check_settings(args: Any, tokenizer: Any) -> None:
    """AdapterError for settings of TRL's that an engine cannot keep."""
    if args.use_vllm or args.use_transformers_continuous_batching:
        raise AdapterError(
            "use_vllm and use_transformers_continuous_batching must stay False: the engine takes their place"
        )
    check_sampling(args)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise AdapterError(f"an engine generates from text only, got the processor {type(tokenizer).__name__}")

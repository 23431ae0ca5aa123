"""TRL's GRPO and RLOO with rollouts from an engine or a fleet.

    with GenerationEngine(model) as engine:
        EngineGRPOTrainer(model, reward_funcs, args=GRPOConfig(...), train_dataset=dataset, engine=engine).train()

TRL has a place for a generation backend, which it calls `vllm_generation`; these trainers put the engine there, after
TRL's own construction and without vLLM. Token ids go in and token ids come out, with the log-probs that the engine sampled
them with, so TRL's importance-sampling correction works, and its `sampling/...` metrics show how well both sides agree.

*One sample that fails* (its prompt was refused, its time ran out, its engine died twice) cannot leave the batch: TRL's shapes
are fixed at `num_generations` a prompt. In its place TRL gets a single EOS token that counts nowhere: its reward is NaN, which
TRL leaves out of the group's mean and gives the advantage 0, and under GRPO its token is masked out of the loss. Its
siblings train as they are. The reward functions see `rollout_failed`. If a whole batch fails, the trainer raises.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather, gather_object
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rollout import GenerationEngine, Rollout, RolloutController, SamplingParams
from sync import SyncConfig
from trainer_adapters.errors import AdapterError
from trainer_adapters.generation import Generator, generator_of, is_usable, warn_if_renormalising
from trainer_adapters.publishing import PolicyPublisher
from trainer_adapters.trl_prompts import prompt_ids_of
from trainer_adapters.trl_seams import check_seams, seams_of

__all__ = ["EngineBackend", "EngineGRPOTrainer", "EngineRLOOTrainer", "EngineRolloutFunc"]


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
        self._trainer = trainer
        self._accelerator = trainer.accelerator
        self._publisher = PolicyPublisher(source, trainer.accelerator, config=sync_config, timeout_s=timeout_s)
        self._generator: Generator | None = None
        if source is not None:
            self._generator = generator_of(source, timeout_s=timeout_s, max_retries=max_retries)
        self._synced_step: int | None = None
        self._seen: defaultdict[str, list[float]] = defaultdict(list)
        self.last_rows: Rows | None = None
        """Of this rank, of the last call."""

    def sync_weights(self) -> None:
        """Publishes the policy as it is. TRL calls it before the first generation of each step."""
        self._note(self._publisher.publish(self._trainer.model_wrapped))
        self._synced_step = self._trainer.state.global_step

    def sync_weights_once(self) -> None:
        """Unless this step's have been published."""
        if self._synced_step != self._trainer.state.global_step:
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
        every: list[list[int]] = gather_object(prompts)
        made: Any = None
        if self._accelerator.is_main_process:
            try:
                made = self._rows(every, num_generations)
            except Exception as error:
                if self._accelerator.num_processes == 1:
                    raise
                made = error  # the others wait for the rows, and would do so for ever
        made = broadcast_object_list([made])[0]
        if isinstance(made, Exception):
            raise made
        start = self._accelerator.process_index * len(prompts)
        here = slice(start, start + len(prompts))
        self.last_rows = Rows(
            completion_ids=made.completion_ids[here],
            logprobs=made.logprobs[here],
            columns={name: values[here] for name, values in made.columns.items()},
        )
        return self.last_rows

    def take_metrics(self) -> dict[str, float]:
        """Means since the last call, by name."""
        means = {name: sum(values) / len(values) for name, values in self._seen.items()}
        self._seen.clear()
        return means

    def close(self) -> None:
        """Frees what publishing keeps."""
        self._publisher.close()

    def _rows(self, prompts: list[list[int]], num_generations: int) -> Rows:
        assert self._generator is not None
        eos_id = self._trainer.eos_token_ids[0]
        rollouts = self._generator.generate(prompts, sampling_of(self._trainer), num_generations)
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

    def _note(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._seen[name].append(value)


class EngineRolloutFunc:
    """A `rollout_func` for TRL's own `GRPOTrainer`, where `EngineGRPOTrainer` cannot be used.

        GRPOTrainer(..., rollout_func=EngineRolloutFunc(engine))

    It publishes the policy itself, once a step. Alone it cannot turn on TRL's importance-sampling correction, nor its
    metrics, and a failed sample's reward is what the reward functions make of it: let them return None where
    `rollout_failed` is set. Its token is masked out of the loss either way.
    """

    def __init__(
        self,
        engine: GenerationEngine | RolloutController | None,
        *,
        timeout_s: float = 1800.0,
        max_retries: int = 1,
        sync_config: SyncConfig | None = None,
    ) -> None:
        """`timeout_s` bounds each sample, and each publish. `max_retries`: of a sample that the engine lost."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._sync_config = sync_config
        self._backend: EngineBackend | None = None

    def backend_for(self, trainer: Any) -> EngineBackend:
        """The one behind it, made for this trainer."""
        if self._backend is None:
            self._backend = EngineBackend(
                self._engine,
                trainer,
                timeout_s=self._timeout_s,
                max_retries=self._max_retries,
                sync_config=self._sync_config,
            )
        return self._backend

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One row for each of the prompts, which come already repeated."""
        backend = self.backend_for(trainer)
        backend.sync_weights_once()
        prompt_ids = prompt_ids_of(prompts, trainer.processing_class, trainer.chat_template_kwargs)
        num_generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        rows = backend.rows(prompt_ids, num_generations)
        output = {"prompt_ids": prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
        if any(gather_object(rows.failed)):  # on every rank or on none: TRL gathers what it makes of the mask
            masks = zip(rows.completion_ids, rows.failed, strict=True)
            output["env_mask"] = [[0 if is_failed else 1] * len(ids) for ids, is_failed in masks]
        return output | rows.columns


class _EngineTrainer:
    """What both trainers add to TRL's."""

    _backend: EngineBackend

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._backend.close()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = "" if self.model.training else "eval_"  # type: ignore[attr-defined]
        logs.update({prefix + name: value for name, value in self._backend.take_metrics().items()})
        super().log(logs, start_time)  # type: ignore[misc]

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """[all ranks' rows, functions]; NaN in the rows of failed samples."""
        rows = self._backend.last_rows
        assert rows is not None
        assert len(rows.failed) == len(inputs), "rewards are asked for other rows than were generated"
        for i, row in enumerate(inputs):
            row.update({name: values[i] for name, values in rows.columns.items()})
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        failed: torch.Tensor = gather(torch.tensor(rows.failed, device=rewards.device))
        return rewards.masked_fill(failed.unsqueeze(1), math.nan)

    def _install(self, backend: EngineBackend) -> None:
        # TRL reads these four: with them it publishes when its step has moved, generates through the backend and, in GRPO,
        # corrects by the sampling log-probs. "colocate" would reach into vLLM's own objects.
        self._backend = self.vllm_generation = backend
        self._last_loaded_step = -1
        self.use_vllm = True
        self.vllm_mode = "server"


class EngineGRPOTrainer(_EngineTrainer, GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` that generates with an engine or a controller. Its arguments are TRL's and, by keyword, those of
    `EngineRolloutFunc`. `use_vllm` stays off; `vllm_importance_sampling_...` say how to correct, as with vLLM."""

    def __init__(
        self,
        *args: Any,
        engine: GenerationEngine | RolloutController | None,
        timeout_s: float = 1800.0,
        max_retries: int = 1,
        sync_config: SyncConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """`engine`: over `model` itself, which nothing has to be copied for, or with weights of its own (another model,
        `copy_weights=True`); a controller's own prompts rest while TRL's are generated. Raises AdapterError for settings
        that an engine cannot keep, and for a TRL whose seams have changed."""
        check_seams(seams_of(GRPOTrainer, GRPOConfig))
        for name in ("rollout_func", "tools", "environment_factory"):
            if kwargs.get(name) is not None:
                raise AdapterError(f"{name} is not supported together with an engine; leave it out")
        rollout_func = EngineRolloutFunc(engine, timeout_s=timeout_s, max_retries=max_retries, sync_config=sync_config)
        super().__init__(*args, **kwargs)
        self._install(rollout_func.backend_for(self))
        self.rollout_func = rollout_func
        _check_correction(self)


class EngineRLOOTrainer(_EngineTrainer, RLOOTrainer):  # type: ignore[misc]
    """`trl.RLOOTrainer` that generates with an engine or a controller; see `EngineGRPOTrainer`. TRL's RLOO computes its
    own log-probs, so nothing is corrected: what is sampled is what the policy is at that step."""

    def __init__(
        self,
        *args: Any,
        engine: GenerationEngine | RolloutController | None,
        timeout_s: float = 1800.0,
        max_retries: int = 1,
        sync_config: SyncConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_seams(seams_of(RLOOTrainer, RLOOConfig))
        super().__init__(*args, **kwargs)
        self._install(
            EngineBackend(engine, self, timeout_s=timeout_s, max_retries=max_retries, sync_config=sync_config)
        )


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
    for name, off in (("min_p", (None, 0.0)), ("repetition_penalty", (None, 1.0)), ("generation_kwargs", (None, {}))):
        value = getattr(args, name)
        if value not in off:
            raise AdapterError(f"{name}={value!r} is not among what an engine samples with; leave it at {off[-1]!r}")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise AdapterError(f"an engine generates from text only, got the processor {type(tokenizer).__name__}")


def _check_correction(trainer: Any) -> None:
    args = trainer.args
    if not args.vllm_importance_sampling_correction:
        return
    if trainer.loss_type == "vespo" and not args.vllm_importance_sampling_mode.startswith("token_"):
        raise AdapterError(
            f"the vespo loss needs vllm_importance_sampling_mode token_truncate or token_mask, got "
            f"{args.vllm_importance_sampling_mode!r}"
        )
    warn_if_renormalising(sampling_of(trainer))

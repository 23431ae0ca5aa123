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
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rollout import GenerationEngine, RolloutController
from sync import SyncConfig
from trainer_adapters.errors import AdapterError
from trainer_adapters.generation import warn_if_renormalising
from trainer_adapters.trl.backend import EngineBackend, sampling_of
from trainer_adapters.trl.prompts import prompt_ids_of
from trainer_adapters.trl.seams import check_seams, seams_of


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
        if self._backend is None or self._backend.trainer is not trainer:
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
    _last_loaded_step: int

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # Steps count from 0 again, and the step that was published last may have that number.
        self._last_loaded_step = -1
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
    `EngineRolloutFunc`. `use_vllm` stays off; `vllm_importance_sampling_...` say how to correct, as with vLLM; `seed` fixes
    what an engine samples too."""

    def __init__(
        self,
        *args: Any,
        engine: GenerationEngine | RolloutController | None,
        timeout_s: float = 1800.0,
        max_retries: int = 1,
        sync_config: SyncConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """`engine`: over `model` itself, for which nothing is copied (put the model on its device first), or with weights of
        its own (`copy_weights=True`). A controller's own prompts rest: it is drained before the first generation.

        Raises AdapterError for settings that an engine cannot keep, and for a TRL whose seams have changed."""
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

"""The places where TRL lets a generation backend in, and whether this TRL still has them.

Most are experimental. Each is named here once, with what the adapters rely on, and checked when an adapter is made, so that
another release of TRL fails with its name and the tested versions, and not in the middle of a run.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trl
from trl import GRPOTrainer

from trainer_adapters.errors import AdapterError

TESTED_VERSIONS = "1.16"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """A callable of TRL's."""

    of: Callable[..., Any]
    takes: tuple[str, ...] = ()
    """Names that it has as parameters (of a dataclass: as fields)."""
    reads: tuple[str, ...] = ()
    """Names that its code uses."""

    def missing(self) -> list[str]:
        """What it lacks of that."""
        function = inspect.unwrap(self.of)
        parameters = inspect.signature(function).parameters
        gone = [f"{self.name} has no parameter {name!r}" for name in self.takes if name not in parameters]
        used = function.__code__.co_names if self.reads else ()
        return gone + [f"{self.name} does not use {name!r}" for name in self.reads if name not in used]

    @property
    def name(self) -> str:
        return getattr(self.of, "__qualname__", repr(self.of))


BACKEND = ("use_vllm", "vllm_generation", "sync_weights", "_last_loaded_step", "global_step")
CONFIG = (
    *("use_vllm", "use_transformers_continuous_batching", "max_completion_length", "num_generations", "temperature"),
    *("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
)
ASYNC_CONFIG = (
    *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "token_budget"),
)
SAMPLE = (
    *("prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version"),
    *("group_id", "metrics", "enqueued_at"),
)


def seams_of(trainer: type[Any], config: type[Any]) -> list[Seam]:
    """Those of `GRPOTrainer` or `RLOOTrainer`, with its config."""
    is_grpo = issubclass(trainer, GRPOTrainer)
    correction = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    seams = [
        Seam(of=trainer._generate_single_turn, reads=(*BACKEND, "generate")),
        Seam(of=trainer._calculate_rewards, takes=("inputs", "prompts", "completions", "completion_ids_list")),
        Seam(of=trainer.log, takes=("logs", "start_time")),
        Seam(of=config, takes=(*CONFIG, *(correction if is_grpo else ()))),
    ]
    if is_grpo:
        seams.append(Seam(of=trainer._generate, reads=(*BACKEND, "rollout_func")))
        seams.append(Seam(of=trainer._generate_and_score_completions, reads=correction))
    return seams


def async_seams() -> list[Seam]:
    """Those of AsyncGRPO: its two plug-in protocols, and what crosses the queue between worker and trainer."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    trainer = AsyncGRPOTrainer
    worker, transfer = async_grpo_trainer.RolloutWorkerProtocol, async_grpo_trainer.WeightTransferProtocol
    return [
        Seam(of=trainer.__init__, takes=("rollout_worker", "weight_transfer")),
        Seam(of=trainer._sync_weight_merged, reads=("pause", "send_weights", "resume", "update_model_version")),
        Seam(of=trainer._inner_training_loop, reads=("stop", "destroy")),
        Seam(of=trainer.log, reads=("metrics_queue",)),
        Seam(of=worker.update_model_version, takes=("model_version",)),
        Seam(of=worker.check_health, takes=("stale_after_s",)),
        Seam(of=transfer.send_weights, takes=("iterator",)),
        Seam(of=AsyncGRPOConfig, takes=("max_staleness", "weight_sync_steps", "chat_template_kwargs", *ASYNC_CONFIG)),
        Seam(of=RolloutSample, takes=SAMPLE),
    ]


def check_seams(seams: list[Seam]) -> None:
    """Raises AdapterError if one has changed."""
    gone = [line for seam in seams for line in seam.missing()]
    if gone:
        raise AdapterError(
            f"trl {trl.__version__} is not what these adapters were tested with ({TESTED_VERSIONS}): {'; '.join(gone)}. "
            f"Install a tested one: pip install 'trl=={TESTED_VERSIONS}.*'"
        )

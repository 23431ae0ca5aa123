"""What a training loop needs to train on rollouts and to publish its weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_adapters.advantages import gae, group_advantages, normalised, token_rewards
from trainer_adapters.batch import RolloutBatch, pad_rollouts
from trainer_adapters.errors import AdapterError
from trainer_adapters.hf import WeightSyncCallback
from trainer_adapters.importance import masked_importance, truncated_importance
from trainer_adapters.kl import reference_kl, reference_log_ratio
from trainer_adapters.losses import LossMetrics, grpo_loss, token_logprobs
from trainer_adapters.policy import PolicyView
from trainer_adapters.ppo import PpoMetrics, ValueHead, ppo_loss
from trainer_adapters.torch_loop import SyncOnStep

if TYPE_CHECKING:
    from trainer_adapters.ray_train import RankFleet, engine_train_loop
    from trainer_adapters.trl import EngineGRPOTrainer, EngineRLOOTrainer, EngineRolloutFunc
    from trainer_adapters.trl.async_grpo import EngineRolloutWorker, EngineWeightTransfer

__all__ = [
    "AdapterError",
    "EngineGRPOTrainer",
    "EngineRLOOTrainer",
    "EngineRolloutFunc",
    "EngineRolloutWorker",
    "EngineWeightTransfer",
    "LossMetrics",
    "PolicyView",
    "PpoMetrics",
    "RankFleet",
    "RolloutBatch",
    "SyncOnStep",
    "ValueHead",
    "WeightSyncCallback",
    "engine_train_loop",
    "gae",
    "group_advantages",
    "grpo_loss",
    "masked_importance",
    "normalised",
    "pad_rollouts",
    "ppo_loss",
    "reference_kl",
    "reference_log_ratio",
    "token_logprobs",
    "token_rewards",
    "truncated_importance",
]

_IMPORTED_WHEN_USED = {
    "EngineGRPOTrainer": "trainer_adapters.trl",
    "EngineRLOOTrainer": "trainer_adapters.trl",
    "EngineRolloutFunc": "trainer_adapters.trl",
    "EngineRolloutWorker": "trainer_adapters.trl.async_grpo",
    "EngineWeightTransfer": "trainer_adapters.trl.async_grpo",
    "RankFleet": "trainer_adapters.ray_train",
    "engine_train_loop": "trainer_adapters.ray_train",
}
"""TRL and Ray may not be installed, and take seconds to import."""


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_WHEN_USED:
        return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

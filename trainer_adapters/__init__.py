"""What a training loop needs to train on rollouts and to publish its weights."""

from trainer_adapters.advantages import gae, normalised, token_rewards
from trainer_adapters.batch import RolloutBatch, group_advantages, pad_rollouts
from trainer_adapters.errors import AdapterError
from trainer_adapters.hf import WeightSyncCallback
from trainer_adapters.importance import masked_importance, truncated_importance
from trainer_adapters.kl import reference_kl
from trainer_adapters.losses import LossMetrics, grpo_loss, token_logprobs
from trainer_adapters.policy import PolicyView
from trainer_adapters.ppo import PpoMetrics, ValueHead, ppo_loss
from trainer_adapters.torch_loop import SyncOnStep

__all__ = [
    "AdapterError",
    "LossMetrics",
    "PolicyView",
    "PpoMetrics",
    "RolloutBatch",
    "SyncOnStep",
    "ValueHead",
    "WeightSyncCallback",
    "gae",
    "group_advantages",
    "grpo_loss",
    "masked_importance",
    "normalised",
    "pad_rollouts",
    "ppo_loss",
    "reference_kl",
    "token_logprobs",
    "token_rewards",
    "truncated_importance",
]

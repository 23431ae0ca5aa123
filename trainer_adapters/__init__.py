"""What a training loop needs to train on rollouts and to publish its weights."""

from trainer_adapters.batch import RolloutBatch, group_advantages, pad_rollouts
from trainer_adapters.errors import AdapterError
from trainer_adapters.hf import WeightSyncCallback
from trainer_adapters.losses import LossMetrics, grpo_loss, token_logprobs
from trainer_adapters.policy import PolicyView
from trainer_adapters.torch_loop import SyncOnStep

__all__ = [
    "AdapterError",
    "LossMetrics",
    "PolicyView",
    "RolloutBatch",
    "SyncOnStep",
    "WeightSyncCallback",
    "group_advantages",
    "grpo_loss",
    "pad_rollouts",
    "token_logprobs",
]

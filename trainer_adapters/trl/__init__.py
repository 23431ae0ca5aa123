"""TRL's trainers over an engine or a fleet: GRPO and RLOO here, AsyncGRPO in `trainer_adapters.trl.async_grpo`."""

from trainer_adapters.trl.trainers import EngineGRPOTrainer, EngineRLOOTrainer, EngineRolloutFunc

__all__ = ["EngineGRPOTrainer", "EngineRLOOTrainer", "EngineRolloutFunc"]

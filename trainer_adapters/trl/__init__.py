"""TRL's trainers over an engine or a fleet: GRPO and RLOO here, AsyncGRPO in `trainer_adapters.trl.async_grpo`."""

from importlib.util import find_spec

from rollout import MissingDependencyError

if find_spec("trl") is None:
    raise MissingDependencyError('TRL\'s trainers need TRL, which is not installed here: pip install "rollsync[trl]"')

from trainer_adapters.trl.trainers import EngineGRPOTrainer, EngineRLOOTrainer, EngineRolloutFunc

__all__ = ["EngineGRPOTrainer", "EngineRLOOTrainer", "EngineRolloutFunc"]

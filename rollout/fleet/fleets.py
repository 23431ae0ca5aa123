"""Which fleet a controller gets: one engine in this process, or Ray workers."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from rollout.config import EngineConfig
from rollout.engine import GenerationEngine
from rollout.errors import InvalidRequestError
from rollout.fleet.local_fleet import LocalFleet
from rollout.fleet.protocols import Fleet
from rollout.rollout_config import RolloutConfig

if TYPE_CHECKING:
    from rollout.worker_config import WorkerConfig


def fleet_for(
    model: PreTrainedModel | str | Callable[[], PreTrainedModel],
    engine: EngineConfig,
    config: RolloutConfig,
    workers: "WorkerConfig | None",
    tokenizer: Any,
) -> Fleet:
    """The fleet that a RolloutController's arguments ask for. InvalidRequestError for those that do not go together."""
    if config.num_workers == 0:
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(
                f"with num_workers=0 the engine lives here and needs a model, got {type(model).__name__}; load it first"
            )
        if workers is not None:
            raise InvalidRequestError("workers=... is for Ray workers; set RolloutConfig.num_workers, or leave it out")
        return LocalFleet(GenerationEngine(model, engine, tokenizer=tokenizer))
    if isinstance(model, nn.Module):
        raise InvalidRequestError(
            f"with num_workers={config.num_workers} each worker loads its own model: pass a path, a hub name or an importable "
            "factory, and publish the weights with sync.WeightSync"
        )
    from rollout.fleet.pool import RayFleet
    from rollout.worker_config import WorkerConfig

    placed = (
        replace(workers, model=model, engine=engine)
        if workers is not None
        else WorkerConfig(model=model, engine=engine)
    )
    if placed.max_outstanding < config.group_size:
        raise InvalidRequestError(
            f"WorkerConfig.max_outstanding={placed.max_outstanding} has no room for a group of {config.group_size}, which "
            "stays on one worker"
        )
    return RayFleet(placed, config.num_workers, placement=config.placement)

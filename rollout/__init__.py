"""Rollouts from a model whose weights change while it generates.

See `GenerationEngine` for one engine, and `RolloutController` for batches of complete, rewarded groups.
"""

from rollout.batches.groups import RolloutGroup
from rollout.batches.lease import Lease
from rollout.batches.prompts import Rows
from rollout.batches.rewards import RewardError, RewardResult
from rollout.config import EngineConfig
from rollout.controller import RolloutController
from rollout.engine import GenerationEngine
from rollout.errors import (
    EngineDeadError,
    EngineFencedError,
    EngineStaleError,
    EngineStateError,
    InvalidRequestError,
    MissingDependencyError,
    PauseTimeoutError,
    PromptsExhaustedError,
    RolloutError,
    RolloutStalledError,
    StaleRolloutsError,
    WorkerBusyError,
    WorkerDiedError,
    WorkerError,
    WorkerIrreplaceableError,
    WorkerStaleError,
    WorkerUnreachableError,
)
from rollout.fleet.local_fleet import RunningEngine
from rollout.meters import PauseWaits, StepTimes
from rollout.rollout_config import RolloutConfig
from rollout.run_log import RunLog
from rollout.status import EngineState, EngineStats, Fence, UpdateRecord
from rollout.types import FinishReason, Rollout, SamplingParams, Timings, VersionSpan

__all__ = [
    "EngineConfig",
    "EngineDeadError",
    "EngineFencedError",
    "EngineStaleError",
    "EngineState",
    "EngineStateError",
    "EngineStats",
    "Fence",
    "FinishReason",
    "GenerationEngine",
    "InvalidRequestError",
    "Lease",
    "MissingDependencyError",
    "PauseTimeoutError",
    "PauseWaits",
    "PromptsExhaustedError",
    "RewardError",
    "RewardResult",
    "Rollout",
    "RolloutConfig",
    "RolloutController",
    "RolloutError",
    "RolloutGroup",
    "RolloutStalledError",
    "Rows",
    "RunLog",
    "RunningEngine",
    "SamplingParams",
    "StaleRolloutsError",
    "StepTimes",
    "Timings",
    "UpdateRecord",
    "VersionSpan",
    "WorkerBusyError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerIrreplaceableError",
    "WorkerStaleError",
    "WorkerUnreachableError",
]

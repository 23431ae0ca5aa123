"""Rollouts from a model whose weights change while it generates. See `GenerationEngine`."""

from rollout.config import EngineConfig
from rollout.engine import GenerationEngine
from rollout.errors import (
    EngineDeadError,
    EngineFencedError,
    EngineStateError,
    InvalidRequestError,
    PauseTimeoutError,
    RolloutError,
    RolloutStalledError,
    WorkerBusyError,
    WorkerDiedError,
    WorkerError,
    WorkerStaleError,
    WorkerUnreachableError,
)
from rollout.meters import PauseWaits, StepTimes
from rollout.status import EngineState, EngineStats, UpdateRecord
from rollout.types import FinishReason, Rollout, SamplingParams, Timings, VersionSpan

__all__ = [
    "EngineConfig",
    "EngineDeadError",
    "EngineFencedError",
    "EngineState",
    "EngineStateError",
    "EngineStats",
    "FinishReason",
    "GenerationEngine",
    "InvalidRequestError",
    "PauseTimeoutError",
    "PauseWaits",
    "Rollout",
    "RolloutError",
    "RolloutStalledError",
    "SamplingParams",
    "StepTimes",
    "Timings",
    "UpdateRecord",
    "VersionSpan",
    "WorkerBusyError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStaleError",
    "WorkerUnreachableError",
]

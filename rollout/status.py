"""What an engine says about itself."""

import enum
import time
from dataclasses import dataclass, field

from rollout.meters import PauseWaits, StepTimes


class EngineState(enum.StrEnum):
    """Where an engine is in its life."""

    CREATED = "created"
    RUNNING = "running"
    FENCED = "fenced"
    """It holds weights that nothing vouches for, and serves nothing until an update succeeds."""
    DEAD = "dead"
    """Its generation loop died."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """How one live update went."""

    version: int
    wait_s: float
    """From asking for the pause to being in it: what was left of the step in progress, and other writers."""
    held_s: float
    """Inside the pause: how long generation stood still."""
    straddlers: int
    """Requests that had tokens of the old version and go on under the new one."""
    finished_at: float = field(default_factory=time.time)
    """When the pause was about to be left, in seconds since the epoch: now, for a record made there."""


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Why an engine is FENCED."""

    reason: str
    """With the remedy."""
    is_outside_change: bool
    """Weights that it shares were changed outside `update()`; else an update failed."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A moment of one engine; cheap enough to read each second."""

    state: EngineState
    version: int
    active: int
    """Requests being prefilled or decoded."""
    waiting: int
    """Requests that wait for their turn."""
    finished: int
    """Requests that have ended, for whatever reason."""
    generated_tokens: int
    """Since the engine was made."""
    tokens_per_s: float
    """Over the last ten seconds."""
    kv_used: float
    """Share of the KV cache in use, shareable blocks of ended requests included; in [0, 1]."""
    preemptions: int
    """How often a request lost its KV cache for want of room."""
    prefix_hits: int
    """How often a request found the beginning of its prompt in the KV cache (forks of a group not counted)."""
    prefix_hit_tokens: int
    """The tokens that these did not have to prefill."""
    step_times: StepTimes
    """Where the time of a step goes."""
    pause_waits: PauseWaits
    """How long pauses were waited for."""
    updates: int
    """Live updates that succeeded."""
    last_update: UpdateRecord | None
    fence: Fence | None

"""What an engine measures of itself as it runs: where a step's time goes, how long pauses are waited for, prefix hits."""

import statistics
import threading
from collections import deque
from dataclasses import dataclass

STEPS = 256
PAUSES = 64


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Means over the last steps, in seconds. Waiting for work, in a pause and on hold is no part of a step."""

    num_steps: int
    """How many steps the means are over: the last 256, or what there has been."""
    prepare_s: float
    """Scheduling, KV blocks, and the tensors of the step."""
    forward_s: float
    """The model's forward. On a GPU: its launch and the wait for it; under asynchronous batching the launch alone."""
    sample_s: float
    """From logits to tokens. On a GPU: its launch; in a captured graph it is part of the forward."""
    deliver_s: float
    """Booking the tokens, forks, results. Under asynchronous batching: the wait for the step before, too."""

    @property
    def total_s(self) -> float:
        """The four together."""
        return self.prepare_s + self.forward_s + self.sample_s + self.deliver_s


@dataclass(frozen=True, kw_only=True)
class PauseWaits:
    """How long pauses were waited for, in seconds: what was left of the step in progress. Updates, snapshots and upstream's
    own `pause()` count."""

    num_pauses: int
    """Since the engine was made."""
    last_s: float | None
    """None before the first."""
    mean_s: float | None
    """Over the last 64."""
    max_s: float | None
    """Over the last 64."""


class Meters:
    """One engine's; outlives its managers. Written on the loop's thread and by whoever pauses, read anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=STEPS)
        self._waits: deque[float] = deque(maxlen=PAUSES)
        self._num_pauses = 0
        self.prefix_hits = 0
        self.prefix_hit_tokens = 0

    def step(self, *, prepare_s: float, forward_s: float, sample_s: float, deliver_s: float) -> None:
        """A step has been run."""
        with self._lock:
            self._steps.append((prepare_s, forward_s, sample_s, deliver_s))

    def pause(self, wait_s: float) -> None:
        """A pause has been entered, `wait_s` after it was asked for."""
        with self._lock:
            self._num_pauses += 1
            self._waits.append(wait_s)

    def prefix_hit(self, num_tokens: int) -> None:
        """A request found the first `num_tokens` of its prompt in the cache."""
        with self._lock:
            self.prefix_hits += 1
            self.prefix_hit_tokens += num_tokens

    def step_times(self) -> StepTimes:
        """The means as of now; zeros before the first step."""
        with self._lock:
            steps = list(self._steps) or [(0.0,) * 4]
            num_steps = len(self._steps)
        prepare, forward, sample, deliver = (statistics.fmean(part) for part in zip(*steps, strict=True))
        return StepTimes(num_steps=num_steps, prepare_s=prepare, forward_s=forward, sample_s=sample, deliver_s=deliver)

    def pause_waits(self) -> PauseWaits:
        """The waits as of now."""
        with self._lock:
            waits, num_pauses = list(self._waits), self._num_pauses
        return PauseWaits(
            num_pauses=num_pauses,
            last_s=waits[-1] if waits else None,
            mean_s=statistics.fmean(waits) if waits else None,
            max_s=max(waits, default=None),
        )

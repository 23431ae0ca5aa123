"""Rewards: computed beside generation, by a bounded number of callers at once, each within a time limit."""

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from rollout.errors import InvalidRequestError, RolloutError
from rollout.requests.delivery import Alarms
from rollout.types import Rollout

CANCEL_S = 5.0
"""How long coroutines have to end when the pool does."""

REMEDIES = {
    "raised": "correct the function, or return a number for what it cannot judge",
    "timeout": "raise reward_timeout_s, or make the function quicker",
    "invalid": "return a finite number for each rollout, 0.0 for one that it cannot judge",
}
"""By the kind of a RewardError."""
REWARD_ERRORS = tuple(REMEDIES)
RESERVED_METRICS = frozenset(
    ("mean", "solve_none", "solve_all", "solve_partial", *(f"errors_{kind}" for kind in REWARD_ERRORS))
)
"""What `reward/<name>` means already."""


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A reward with what else its function has to say. InvalidRequestError for a reward or a metric that is not finite, or
    for a metric whose name is taken."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be averaged in `controller.metrics()`, under `reward/<name>`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Joined to the rollout's metadata."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _finite(self.reward, "a reward"))
        for name in ("metrics", "metadata"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
                raise InvalidRequestError(f"RewardResult.{name} must be a dict with names as keys, got {_shown(given)}")
        metrics = {name: _finite(value, f"RewardResult.metrics[{name!r}]") for name, value in self.metrics.items()}
        taken = sorted(name for name in metrics if name in RESERVED_METRICS)
        if taken:
            raise InvalidRequestError(
                f"RewardResult.metrics must not be named {taken}: `reward/{taken[0]}` is another's"
            )
        object.__setattr__(self, "metrics", metrics)


class RewardError(RolloutError):
    """A reward could not be computed: its function raised, took too long, or returned what is no reward. Never taken
    for a reward of zero. `kind`, one of REWARD_ERRORS, says which."""

    def __init__(self, message: str, kind: str) -> None:
        if kind not in REWARD_ERRORS:  # raised in the user's function, it counts as what that raised
            raise InvalidRequestError(f"the kind of a RewardError must be one of {REWARD_ERRORS}, got {kind!r}")
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


RewardFn = Callable[[Rollout, str], Any]
"""(rollout, its text) -> float or RewardResult, or a coroutine of one. Without a tokenizer the text is empty.

Where it raises, takes too long or returns what is no finite number, there is no reward, and never one of zero: the sample
is drawn again (`RolloutConfig.max_data_retries`) and then left out of its group. The batches then hold more of what the
function can judge than the policy makes, so return a number for every answer, also for one that cannot be parsed."""
GroupRewardFn = Callable[[list[Rollout]], Any]
"""A group's rollouts by sample index -> one float or RewardResult for each, or a coroutine of them. Where it fails, the
group is scored again (`RolloutConfig.max_data_retries`) and then dropped."""


def as_result(value: Any) -> RewardResult:
    """What a reward function returned. RewardError for what is no reward."""
    if isinstance(value, RewardResult):
        return value
    try:
        return RewardResult(reward=value)
    except InvalidRequestError as error:
        raise RewardError(str(error), "invalid") from None


def as_results(values: Any, count: int) -> list[RewardResult]:
    """What a group's reward function returned. RewardError unless it is one for each of `count` rollouts."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != count:
        shown = f"{len(values)} of them" if isinstance(values, (list, tuple)) else f"{type(values).__name__}"
        raise RewardError(f"a group's reward function must return a list of {count} rewards, got {shown}", "invalid")
    return [as_result(value) for value in values]


def as_error(error: BaseException) -> RewardError:
    """What a reward function raised, as the cause of a RewardError."""
    if isinstance(error, RewardError):
        return error
    try:
        said = str(error)
    except Exception as other:  # an exception of the user's, whose __str__ is broken
        said = f"(its text cannot be had: {type(other).__name__})"
    failure = RewardError(f"the reward function raised {type(error).__name__}: {said}", "raised")
    failure.__cause__ = error
    return failure


class RewardRunner(Protocol):
    """Runs reward functions for a controller."""

    def submit(self, call: Callable[[], Any], done: Callable[[Any, RewardError | None], None]) -> None:
        """Runs `call` at some time, then `done(value, None)` or `done(None, error)`, once, on any thread."""

    def stop(self, timeout_s: float) -> None:
        """Ends; calls that have not ended are forgotten."""


class RewardPool:
    """Threads for functions, an event loop for coroutines, at most `size` at once, in the order of submission.

    A function that overruns `timeout_s` is reported and cannot be ended: its thread is left to it, and another takes its
    place, up to `size` times; then rewards wait, and the controller's watchdog names it. A coroutine is cancelled.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_stuck = 0
        self._alarms = Alarms()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: set[Future[Any]] = set()
        self._stopping = False

    @property
    def num_stuck(self) -> int:
        """Threads whose function has overrun its limit and not returned."""
        return self._num_stuck

    def submit(self, call: Callable[[], Any], done: Callable[[Any, RewardError | None], None]) -> None:
        with self._lock:
            if self._num_threads == 0 and not self._stopping:  # a pool that is never used has no threads to end
                self._alarms.start()
                for _ in range(self._size):
                    self._add_thread()
        self._calls.put(_Call(call, done))

    def stop(self, timeout_s: float) -> None:
        """Ends the threads that are not stuck in a function."""
        with self._lock:
            self._stopping = True
            loop, self._loop = self._loop, None
            awaited = list(self._awaited)
        for future in awaited:
            future.cancel()
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._alarms.stop(timeout_s)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _add_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._run, name="rollsync-reward", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._stopping:
                continue
            cancel_alarm = self._alarms.after(self._timeout_s, lambda call=call: self._overrun(call))  # type: ignore[misc]
            try:
                value = call.function()
                if inspect.isawaitable(value):
                    value = self._await(value)
            except BaseException as error:  # SystemExit and CancelledError too: the thread is the pool's, not theirs
                self._end(call, None, as_error(error))
            else:
                self._end(call, value, None)
            cancel_alarm()
            with self._lock:
                if call.is_stuck:  # another thread has taken its place
                    self._num_stuck -= 1
                    self._num_threads -= 1
                    return

    def _await(self, awaitable: Any) -> Any:
        async def guarded() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # it would end the event loop, and every other coroutine
                raise as_error(error) from error

        async def within_limit() -> Any:
            waiter = asyncio.ensure_future(guarded())
            done, _ = await asyncio.wait([waiter], timeout=self._timeout_s)
            if not done:
                waiter.cancel()
                raise _too_long(self._timeout_s)
            return waiter.result()

        with self._lock:
            if self._stopping:
                return None
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                name = "rollsync-reward-loop"
                threading.Thread(target=_run_loop, args=(self._loop,), name=name, daemon=True).start()
            future: Future[Any] = asyncio.run_coroutine_threadsafe(within_limit(), self._loop)
            self._awaited.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._awaited.discard(future)

    def _overrun(self, call: "_Call") -> None:
        if not self._end(call, None, _too_long(self._timeout_s)):
            return
        with self._lock:
            if self._num_stuck < self._size and not self._stopping:
                call.is_stuck = True
                self._num_stuck += 1
                self._add_thread()

    def _end(self, call: "_Call", value: Any, error: RewardError | None) -> bool:
        with self._lock:
            if call.has_ended or self._stopping:
                return False
            call.has_ended = True
        call.done(value, error)
        return True


class _Call:
    def __init__(self, function: Callable[[], Any], done: Callable[[Any, RewardError | None], None]) -> None:
        self.function = function
        self.done = done
        self.has_ended = False
        self.is_stuck = False


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))
    loop.close()


def _too_long(timeout_s: float) -> RewardError:
    return RewardError(f"the reward function took longer than reward_timeout_s={timeout_s:g}", "timeout")


def _finite(value: Any, what: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value  # the usual case, and abstract classes are slow to ask
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except Exception:  # an int beyond all floats, or a user's class
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequestError(f"{what} must be a finite number, got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:  # an int of too many digits, or a user's class
        return f"an unprintable {type(value).__name__}"

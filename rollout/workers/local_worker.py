"""The worker of a fleet of one: an engine in this process, behind the methods that a worker elsewhere has."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rollout.engine import GenerationEngine
from rollout.errors import EngineStateError, RolloutError, WorkerDiedError, WorkerIrreplaceableError, WorkerStaleError
from rollout.status import EngineState, EngineStats
from rollout.types import Rollout
from rollout.workers.revival import EngineRevival
from rollout.workers.start_item import start_item
from rollout.workers.wire import Finished, Refusal, WorkerState, WorkItem

T = TypeVar("T")

STATES = {
    EngineState.RUNNING: WorkerState.HEALTHY,
    EngineState.FENCED: WorkerState.STALE,
    EngineState.DEAD: WorkerState.RESTARTING,
}


@dataclass(frozen=True, kw_only=True)
class LocalHealth:
    """How the engine stands."""

    state: WorkerState
    incarnation: int
    version: int
    engine: EngineStats
    reason: str | None


class LocalWorker:
    """An engine that its owner has started, and stops. A loop that dies is restarted in place, and what was in flight
    comes back as it was (ERROR, with what it had)."""

    def __init__(self, engine: GenerationEngine, *, worker_id: str = "local", max_engine_restarts: int = 3) -> None:
        """`max_engine_restarts`: see `WorkerConfig`."""
        self.engine = engine
        self._worker_id = worker_id
        self._revival = EngineRevival(engine, max_engine_restarts, name=worker_id)
        self._serve_from = 0
        self._condition = threading.Condition()
        self._results: deque[Finished] = deque()
        self._stopped = False

    @property
    def worker_id(self) -> str:
        return self._worker_id

    def require_version(self, version: int) -> None:
        """It takes no item below this version."""
        self._serve_from = max(self._serve_from, version)

    def submit(self, items: Sequence[WorkItem]) -> list[Refusal]:
        """Items are refused one by one, with the engine's own errors. Raises WorkerDiedError when the engine is stopped, or
        has died too often."""
        self._revive()
        refusals: list[Refusal] = []
        for position, item in enumerate(items):
            try:
                self._submit(item)
            except RolloutError as error:
                refusals.append(Refusal(position=position, request_id=item.request_id, error=error))
        return refusals

    def poll(self, max_items: int, timeout_s: float) -> list[Finished]:
        """The oldest results; waits up to `timeout_s` for the first."""
        self._revive()
        with self._condition:
            self._condition.wait_for(lambda: self._results or self._stopped, timeout_s)
            if self._stopped and not self._results:
                raise WorkerDiedError(f"worker {self.worker_id} was stopped")
            return [self._results.popleft() for _ in range(min(max_items, len(self._results)))]

    def cancel(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests; returns the ids of which nothing was in flight."""
        missed: list[str] = []
        for request_id in request_ids:
            try:
                self.engine.cancel(request_id)
            except RolloutError:
                missed.append(request_id)
        return missed

    def call(self, fn: Callable[..., T], *args: Any) -> "Future[T]":
        """`fn(engine, *args)` on the engine's control thread. EngineStateError on that thread itself, where whoever waits for
        the future, as a publish does, would wait for ever."""
        if self.engine.is_control_thread:
            raise EngineStateError(
                f"a call or publish to worker {self.worker_id} on its engine's control thread would wait for itself; make it "
                "on another thread"
            )
        return self.engine.call(fn, *args)

    def snapshot(self) -> list[Rollout]:
        """The partial rollouts in flight."""
        return self.engine.snapshot()

    def health(self) -> LocalHealth:
        """Asks nobody and never waits."""
        stats = self.engine.stats()
        state = STATES.get(stats.state, WorkerState.DEAD)
        if state is WorkerState.HEALTHY and stats.version < self._serve_from:
            state = WorkerState.STALE
        if self._revival.is_over:
            state = WorkerState.DEAD
        return LocalHealth(state=state, incarnation=0, version=stats.version, engine=stats, reason=None)

    def on_join(self, callback: Callable[["LocalWorker"], None]) -> None:
        """There is never another incarnation: an engine's restart keeps its weights."""

    def restart(self, *, serve_from_version: int | None = None) -> None:
        """WorkerIrreplaceableError: another engine needs another model."""
        raise WorkerIrreplaceableError(f"worker {self.worker_id} is this process's own engine and cannot be replaced")

    def stop(self, timeout_s: float) -> list[Finished]:
        """Ends its polls. The engine is its owner's."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
            return list(self._results)

    def _submit(self, item: WorkItem) -> None:
        if self.engine.version < self._serve_from:
            raise WorkerStaleError(
                f"worker {self.worker_id} is at version {self.engine.version} and may serve from {self._serve_from} on; "
                "publish to it"
            )
        for future in start_item(self.engine, item):
            future.add_done_callback(lambda future: self._finish(item, future.result()))

    def _finish(self, item: WorkItem, rollout: Rollout) -> None:
        self._revival.saw(rollout)
        rollout = replace(rollout, attempt=item.attempt, worker_id=self.worker_id)
        with self._condition:
            self._results.append(Finished(rollout=rollout, attempt=item.attempt, incarnation=0))
            self._condition.notify_all()

    def _revive(self) -> None:
        if self.engine.state is EngineState.STOPPED:
            raise WorkerDiedError(f"worker {self.worker_id}: its engine was stopped")
        self._revival.revive()
        if self._revival.is_over:
            raise WorkerDiedError(
                f"worker {self.worker_id}: its engine died {self._revival.num_deaths + 1} times in a row"
            )

"""Workers without engines for a controller in real time: they answer at once, and die as a test says."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rollout import Rollout, VersionSpan, WorkerDiedError
from rollout.fleet.protocols import Health
from rollout.simulate.worker import SimulatedHealth
from rollout.types import FinishReason
from rollout.workers.wire import Finished, Refusal, WorkerState, WorkItem

LIMIT_S = 30.0


class ThreadedWorker:
    """Each sample is one token. At a restart the poll that is in progress raises, as that of a real one does."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.HEALTHY
        self.answers = True
        self.num_restarts = 0
        self.restarted = threading.Event()
        self._changed = threading.Condition()
        self._results: deque[Finished] = deque()
        self._incarnation = 0
        self._num_polls = 0
        self._is_stopped = False

    def submit(self, items: Sequence[WorkItem]) -> list[Refusal]:
        with self._changed:
            for item in items if self.answers else ():
                self._results += [self._finished(item, number) for number in range(item.size)]
            self._changed.notify_all()
        return []

    def poll(self, max_items: int, timeout_s: float) -> list[Finished]:
        with self._changed:
            mine = self._incarnation
            self._num_polls += 1
            self._changed.wait_for(lambda: self._results or self._is_stopped or self._incarnation != mine, timeout_s)
            self._num_polls -= 1
            self._changed.notify_all()
            if self._is_stopped or self._incarnation != mine:
                raise WorkerDiedError(f"worker {self.worker_id} was restarted")
            return [self._results.popleft() for _ in range(min(max_items, len(self._results)))]

    def cancel(self, request_ids: Sequence[str]) -> list[str]:
        return []

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(self, *args))
        return future

    def snapshot(self) -> list[Rollout]:
        return []

    def health(self) -> Health:
        return SimulatedHealth(state=self.state, incarnation=self._incarnation, version=0)

    def on_join(self, callback: Callable[[Any], None]) -> None:
        pass

    def require_version(self, version: int) -> None:
        pass

    def restart(self, *, serve_from_version: int | None = None) -> None:
        with self._changed:
            self._incarnation += 1
            self.num_restarts += 1
            self.state, self.answers = WorkerState.HEALTHY, True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._num_polls, LIMIT_S)
        self.restarted.set()

    def stop(self, timeout_s: float) -> list[Finished]:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        return []

    def _finished(self, item: WorkItem, number: int) -> Finished:
        rollout = Rollout(
            rollout_id=f"{item.request_id}-{number}" if item.size > 1 else item.request_id,
            group_id=item.group_id,
            prompt_id=item.prompt_id,
            sample_index=item.sample_index + number,
            attempt=item.attempt,
            prompt_ids=list(item.prompt_ids),
            token_ids=[5],
            logprobs=[-1.0],
            loss_mask=[1],
            version_spans=[VersionSpan(0, 0)],
            prefill_version=0,
            finish_reason=FinishReason.STOP,
            worker_id=self.worker_id,
        )
        return Finished(rollout=rollout, attempt=item.attempt, incarnation=self._incarnation)


class ThreadedFleet:
    """Those it is given."""

    def __init__(self, *workers: ThreadedWorker) -> None:
        self.workers = workers

    def start(self, serve_from_version: int) -> Sequence[ThreadedWorker]:
        return self.workers

    def add_worker(self, serve_from_version: int) -> ThreadedWorker:
        raise NotImplementedError

    def stop(self, timeout_s: float) -> None:
        for worker in self.workers:
            worker.stop(timeout_s)

"""A loop whose time passes only when somebody waits."""

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from rollout.errors import RolloutError
from rollout.fleet.protocols import FleetWorker, WorkerEvents
from rollout.simulate.worker import SimulatedWorker
from rollout.workers.wire import WorkItem

T = TypeVar("T")

log = logging.getLogger("rollsync")

POLL_ITEMS = 4096


class VirtualLoop:
    """Runs callbacks in the order of their times, then of their calls, on the thread that waits. Single-threaded."""

    tick_s = 5.0

    def __init__(self) -> None:
        self._now = 0.0
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._on_error: Callable[[BaseException], None] | None = None
        self.num_events = 0
        """Callbacks run so far."""

    def now(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now + delay_s, next(self._numbers), callback))

    def wait(self, future: "Future[T]", timeout_s: float) -> T:
        deadline = self._now + timeout_s
        done: list[bool] = []  # cheaper to ask than the future, which takes a lock each time
        future.add_done_callback(lambda _: done.append(True))
        while not done:
            if not self._run_one(deadline):
                raise TimeoutError(f"nothing of the kind by {deadline:g} s of virtual time")
        return future.result()

    def advance(self, seconds: float) -> None:
        """Lets time pass, as while a trainer trains."""
        deadline = self._now + seconds
        while self._run_one(deadline):
            pass
        self._now = deadline

    def link(self, worker: FleetWorker, events: WorkerEvents) -> "VirtualLink":
        assert isinstance(worker, SimulatedWorker), "a virtual clock drives simulated workers only"
        return VirtualLink(self, worker, events)

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error

    def stop(self, timeout_s: float) -> None:
        self._soon.clear()
        self._later.clear()

    def join(self, timeout_s: float) -> None:
        """It has no threads."""

    def _run_one(self, deadline: float) -> bool:
        if self._soon:
            callback = self._soon.popleft()
        elif self._later and self._later[0][0] <= deadline:
            self._now, _, callback = heapq.heappop(self._later)
        else:
            self._now = max(self._now, deadline)
            return False
        self.num_events += 1
        try:
            callback()
        except Exception as error:
            if self._on_error is None:
                raise
            log.exception("the controller's loop failed")
            self._on_error(error)
        return True


class VirtualLink:
    """Calls the worker at once, and hears of its results when it has some."""

    def __init__(self, loop: VirtualLoop, worker: SimulatedWorker, events: WorkerEvents) -> None:
        self._loop = loop
        self._worker = worker
        self._events = events
        self._is_closed = False
        self._delivery_is_due = False
        worker.listener = self

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._loop.call_soon(lambda: self._submit(items))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._loop.call_soon(lambda: self._quietly(lambda: self._worker.cancel(request_ids)))

    def snapshot(self) -> None:
        self._loop.call_soon(lambda: self._quietly(self._snapshot))

    def restart(self, serve_from_version: int) -> None:
        self._loop.call_later(self._worker.restart_s, lambda: self._restart(serve_from_version))

    def close(self) -> None:
        self._is_closed = True
        self._worker.listener = None

    def heard(self) -> None:
        """The worker has results, or another version."""
        if not self._delivery_is_due:
            self._delivery_is_due = True
            self._loop.call_soon(self._deliver)

    def died(self, error: RolloutError) -> None:
        """The worker has died."""
        if not self._is_closed:
            self._loop.call_soon(lambda: self._events.on_lost(self._worker.worker_id, error))

    def _deliver(self) -> None:
        self._delivery_is_due = False
        if self._is_closed:
            return
        try:
            results = self._worker.poll(POLL_ITEMS, 0)
        except RolloutError:
            return  # its death is told by itself
        self._events.on_results(self._worker.worker_id, results)

    def _submit(self, items: Sequence[WorkItem]) -> None:
        try:
            refusals = self._worker.submit(items)
        except RolloutError:
            return  # its death is told by itself
        if refusals and not self._is_closed:
            refused = [(items[refusal.position], refusal.error) for refusal in refusals]
            self._events.on_refused(self._worker.worker_id, refused)

    def _snapshot(self) -> None:
        self._events.on_snapshot(self._worker.worker_id, self._worker.snapshot())

    def _restart(self, serve_from_version: int) -> None:
        if self._is_closed:
            return
        try:
            self._worker.restart(serve_from_version=serve_from_version)
        except RolloutError as error:
            self._events.on_restart_failed(self._worker.worker_id, error)
        else:
            self._events.on_restarted(self._worker.worker_id)

    def _quietly(self, call: Callable[[], object]) -> None:
        if not self._is_closed:
            try:
                call()
            except RolloutError as error:
                log.debug("worker %s: %s", self._worker.worker_id, error)

"""The loop of a real controller: a thread for its callbacks, two for each worker."""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from rollout.errors import RolloutError, WorkerUnreachableError
from rollout.fleet.protocols import FleetWorker, WorkerEvents
from rollout.workers.wire import WorkItem

T = TypeVar("T")

log = logging.getLogger("rollsync")

POLL_ITEMS = 256
POLL_TIMEOUT_S = 2.0
"""How long a worker keeps a poll that has nothing to say."""
RETRY_AFTER_S = 0.5
SUBMIT_TRIES = 3
LONGEST_WAIT_S = 3600.0


class ThreadLoop:
    """Real time. Callbacks run on one thread, in order."""

    tick_s = 0.05

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._on_error: Callable[[BaseException], None] | None = None
        self._thread = threading.Thread(target=self._run, name="rollsync-controller", daemon=True)
        self._links: list[ThreadLink] = []

    def now(self) -> float:
        return time.monotonic()

    def call_soon(self, callback: Callable[[], None]) -> None:
        with self._condition:
            self._soon.append(callback)
            self._condition.notify()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        with self._condition:
            heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), callback))
            self._condition.notify()

    def wait(self, future: "Future[T]", timeout_s: float) -> T:
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        return future.result(timeout_s)

    def link(self, worker: FleetWorker, events: WorkerEvents) -> "ThreadLink":
        link = ThreadLink(self, worker, events)
        self._links = [*(other for other in self._links if not other.is_closed), link]
        return link

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """What is waiting to run is forgotten."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        for link in self._links:
            link.close()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for link in self._links:
            link.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback()
            except Exception as error:
                log.exception("the controller's loop failed")
                assert self._on_error is not None
                self._on_error(error)

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            while not self._stopping:
                wait_s = self._later[0][0] - time.monotonic() if self._later else LONGEST_WAIT_S
                if wait_s <= 0:
                    return heapq.heappop(self._later)[2]
                if self._soon:
                    return self._soon.popleft()
                self._condition.wait(min(wait_s, LONGEST_WAIT_S))
            return None


class ThreadLink:
    """One thread polls the worker, one sends to it: a worker that answers slowly holds up nobody else."""

    def __init__(self, loop: ThreadLoop, worker: FleetWorker, events: WorkerEvents) -> None:
        self._loop = loop
        self._worker = worker
        self._events = events
        self._sends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._alive = threading.Event()  # cleared between a death and the next incarnation
        self._alive.set()
        self._reporting = threading.Lock()
        name = worker.worker_id
        self._threads = [
            threading.Thread(target=self._poll, name=f"rollsync-poll-{name}", daemon=True),
            threading.Thread(target=self._send, name=f"rollsync-send-{name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._sends.put(partial(self._submit, list(items)))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._sends.put(partial(self._cancel, list(request_ids)))

    def snapshot(self) -> None:
        self._sends.put(self._snapshot)

    def restart(self, serve_from_version: int) -> None:
        self._sends.put(partial(self._restart, serve_from_version))

    def close(self) -> None:
        """Listens no more; the worker itself goes on."""
        self._closing.set()
        self._alive.set()
        self._sends.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of a closed link."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _poll(self) -> None:
        while not self._closing.is_set():
            if not self._alive.wait(POLL_TIMEOUT_S):
                continue
            try:
                results = self._worker.poll(POLL_ITEMS, POLL_TIMEOUT_S)
            except WorkerUnreachableError:
                self._closing.wait(RETRY_AFTER_S)  # its heartbeat says when it is more than slow
            except RolloutError as error:
                self._lost(error)
            else:
                if results:
                    self._tell(partial(self._events.on_results, self._worker.worker_id, results))

    def _send(self) -> None:
        while (send := self._sends.get()) is not None:
            if self._closing.is_set():
                return
            send()

    def _submit(self, items: list[WorkItem]) -> None:
        for left in reversed(range(SUBMIT_TRIES)):
            try:
                refusals = self._worker.submit(items)
            except WorkerUnreachableError as error:
                # the same items may be sent again: a worker takes none twice
                if not left:
                    self._lost(error)
                elif self._closing.wait(RETRY_AFTER_S):
                    return
            except RolloutError as error:
                self._lost(error)
                return
            else:
                if refusals:
                    refused = [(items[refusal.position], refusal.error) for refusal in refusals]
                    self._tell(partial(self._events.on_refused, self._worker.worker_id, refused))
                return

    def _cancel(self, request_ids: list[str]) -> None:
        try:
            self._worker.cancel(request_ids)
        except RolloutError as error:  # the results are not wanted any more, whether they come or not
            log.warning("worker %s could not be told to cancel: %s", self._worker.worker_id, error)

    def _snapshot(self) -> None:
        try:
            rollouts = self._worker.snapshot()
        except RolloutError as error:  # the one before it stays in use
            log.warning("no snapshot of worker %s: %s", self._worker.worker_id, error)
            return
        self._tell(partial(self._events.on_snapshot, self._worker.worker_id, rollouts))

    def _restart(self, serve_from_version: int) -> None:
        try:
            self._worker.restart(serve_from_version=serve_from_version)
        except RolloutError as error:
            self._tell(partial(self._events.on_lost, self._worker.worker_id, error))
            return
        self._alive.set()
        self._tell(partial(self._events.on_restarted, self._worker.worker_id))

    def _lost(self, error: RolloutError) -> None:
        with self._reporting:  # poller and sender both notice a death
            if not self._alive.is_set() or self._closing.is_set():
                return
            self._alive.clear()
        self._tell(partial(self._events.on_lost, self._worker.worker_id, error))

    def _tell(self, callback: Callable[[], None]) -> None:
        if not self._closing.is_set():
            self._loop.call_soon(callback)

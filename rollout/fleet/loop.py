"""The loop of a real controller: a thread for its callbacks, two for each incarnation of a worker."""

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

from rollout.errors import WorkerUnreachableError
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
    """A worker through its incarnations. Each is talked to by threads of its own, and a restart has another, so that
    nothing waits behind a call to the incarnation that is replaced, and nothing which that one says is taken for the
    next one's."""

    def __init__(self, loop: ThreadLoop, worker: FleetWorker, events: WorkerEvents) -> None:
        self._loop = loop
        self._worker = worker
        self._events = events
        self._lock = threading.Lock()
        self._is_closed = False
        self._talk = Talk(loop, worker, events)
        self._threads = list(self._talk.threads)
        self._talk.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._talk.submit(list(items))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._talk.cancel(list(request_ids))

    def snapshot(self) -> None:
        self._talk.snapshot()

    def restart(self, serve_from_version: int) -> None:
        with self._lock:
            self._talk.end()
            if self._is_closed:
                return
            name = f"rollsync-restart-{self._worker.worker_id}"
            thread = threading.Thread(target=self._restart, args=(serve_from_version,), name=name, daemon=True)
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def close(self) -> None:
        """Listens no more; the worker itself goes on."""
        with self._lock:
            self._is_closed = True
            self._talk.end()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of a closed link."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _restart(self, serve_from_version: int) -> None:
        try:
            self._worker.restart(serve_from_version=serve_from_version)
        except Exception as error:
            with self._lock:
                if not self._is_closed:
                    self._loop.call_soon(partial(self._events.on_restart_failed, self._worker.worker_id, error))
            return
        with self._lock:
            if not self._is_closed:
                self._talk = Talk(self._loop, self._worker, self._events)
                self._threads += self._talk.threads
                # a death of the new incarnation is told after this, or it would be taken for the one that is known
                self._loop.call_soon(partial(self._events.on_restarted, self._worker.worker_id))
                self._talk.start()


class Talk:
    """One thread polls a worker's incarnation, one sends to it: a worker that answers slowly holds up nobody else. It ends
    at the first sign of a death, which is told once."""

    def __init__(self, loop: ThreadLoop, worker: FleetWorker, events: WorkerEvents) -> None:
        self._loop = loop
        self._worker = worker
        self._events = events
        self._sends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._ending = threading.Lock()
        name = worker.worker_id
        self.threads = [
            threading.Thread(target=self._poll, name=f"rollsync-poll-{name}", daemon=True),
            threading.Thread(target=self._send, name=f"rollsync-send-{name}", daemon=True),
        ]

    def start(self) -> None:
        """Begins to listen, and to send."""
        for thread in self.threads:
            thread.start()

    def submit(self, items: list[WorkItem]) -> None:
        """Items that are refused are told of."""
        self._sends.put(partial(self._submit, items))

    def cancel(self, request_ids: list[str]) -> None:
        """Their results are not wanted any more."""
        self._sends.put(partial(self._cancel, request_ids))

    def snapshot(self) -> None:
        """Tells of what runs there."""
        self._sends.put(self._snapshot)

    def end(self) -> bool:
        """Nothing more is told, and what is not sent yet never is. Whether it had not ended before."""
        with self._ending:
            if self._over.is_set():
                return False
            self._over.set()
        self._sends.put(None)
        return True

    def _poll(self) -> None:
        while not self._over.is_set():
            try:
                results = self._worker.poll(POLL_ITEMS, POLL_TIMEOUT_S)
            except WorkerUnreachableError:
                self._over.wait(RETRY_AFTER_S)  # its heartbeat says when it is more than slow
            except Exception as error:  # whatever it is, an incarnation that cannot be polled gives nothing
                self._lost(error)
            else:
                if results:
                    self._tell(partial(self._events.on_results, self._worker.worker_id, results))

    def _send(self) -> None:
        while (send := self._sends.get()) is not None:
            if self._over.is_set():
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
                elif self._over.wait(RETRY_AFTER_S):
                    return
            except Exception as error:  # whether they arrived is not known, and only a death settles it
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
        except Exception as error:  # the results are not wanted any more, whether they come or not
            log.warning("worker %s could not be told to cancel: %s", self._worker.worker_id, error)

    def _snapshot(self) -> None:
        try:
            rollouts = self._worker.snapshot()
        except Exception as error:  # the one before it stays in use
            log.warning("no snapshot of worker %s: %s", self._worker.worker_id, error)
            return
        self._tell(partial(self._events.on_snapshot, self._worker.worker_id, rollouts))

    def _lost(self, error: Exception) -> None:
        if self.end():  # poller and sender both notice a death
            self._loop.call_soon(partial(self._events.on_lost, self._worker.worker_id, error))

    def _tell(self, callback: Callable[[], None]) -> None:
        if not self._over.is_set():
            self._loop.call_soon(callback)

"""Futures, the thread that resolves them, and the clock that ends what takes too long.

Futures resolve on a thread of their own, so that a callback may call any method of the engine: on the loop's thread an
update would wait for itself.
"""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from rollout.types import Rollout


class RolloutFuture(Future[Rollout]):
    """The result of `submit`. `cancel()` asks the engine to end the request: the future then resolves with its partial
    rollout (finish reason ABORT) rather than raising CancelledError."""

    def __init__(self, request_id: str, cancel: Callable[[str], bool]) -> None:
        super().__init__()
        self.request_id = request_id
        self._cancel_request = cancel
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """True if the request was in flight and will now end."""
        return self._cancel_request(self.request_id)


class Delivery:
    """A thread that resolves futures in the order they are handed over."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[RolloutFuture, Rollout] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollsync-delivery", daemon=True)
        self._thread.start()

    def resolve(self, future: RolloutFuture, rollout: Rollout) -> None:
        """Hands a result over. Never blocks."""
        self._queue.put((future, rollout))

    def stop(self, timeout_s: float) -> None:
        """Resolves what was handed over, then ends the thread (after the callback, if called from one)."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, rollout = item
            future.set_result(rollout)


class Alarms:
    """A thread that calls functions when their time has come. The functions must not block."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollsync-alarms", daemon=True)
        self._thread.start()

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Calls `call` after `seconds`, unless the function returned here is called before."""
        number = next(self._numbers)
        entry = (time.monotonic() + seconds, number, call)
        with self._condition:
            heapq.heappush(self._due, entry)
            self._condition.notify()

        def cancel() -> None:
            with self._condition:
                if entry in self._due:
                    # Removal keeps the heap from filling up with the alarms of requests that ended in time.
                    self._due.remove(entry)
                    heapq.heapify(self._due)

        return cancel

    def stop(self, timeout_s: float) -> None:
        """Forgets what is not due yet and ends the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and (not self._due or self._due[0][0] > time.monotonic()):
                    wait = self._due[0][0] - time.monotonic() if self._due else None
                    self._condition.wait(wait)
                if self._stopping:
                    return
                _, _, call = heapq.heappop(self._due)
            call()

"""Futures, the thread that resolves them, and the clock that ends what takes too long.

Futures resolve on a thread of their own, so that a callback may call any method of the engine: on the loop's thread an
update would wait for itself.
"""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Self

from rollout.types import Rollout

log = logging.getLogger("rollsync")

LONGEST_WAIT_S = 3600.0


class RolloutFuture(Future[Rollout]):
    """The result of `submit`. `cancel()` asks the engine to end the request: the future then resolves with its partial
    rollout (finish reason ABORT) rather than raising CancelledError."""

    def __init__(self, request_id: str, cancel: Callable[[], bool]) -> None:
        super().__init__()
        self.request_id = request_id
        self._cancel_request = cancel
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """True if the request was in flight and will now end."""
        return self._cancel_request()


class TokenStream:
    """The tokens of one request as they come: iterate over it. `future` has the whole rollout in the end. Leaving its
    `with` block, or `close()`, ends a request that is still in flight (ABORT)."""

    def __init__(self) -> None:
        self.future: RolloutFuture | None = None
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_seen = 0

    def see(self, token_ids: list[int]) -> None:
        """On the loop's thread: these are its tokens so far."""
        for token in token_ids[self._num_seen :]:
            self._tokens.put(token)
        self._num_seen = max(self._num_seen, len(token_ids))

    def end(self) -> None:
        """On the loop's thread: no more will come."""
        self._tokens.put(None)

    def result(self, timeout_s: float | None = None) -> Rollout:
        """The whole rollout; waits for its end."""
        assert self.future is not None
        return self.future.result(timeout_s)

    def close(self) -> None:
        """Ends the request if it is in flight."""
        assert self.future is not None
        self.future.cancel()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        token = self._tokens.get()
        if token is None:
            self._tokens.put(None)  # for whoever asks again
            raise StopIteration
        return token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Delivery:
    """A thread that resolves futures in the order they are handed over."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[RolloutFuture, Rollout] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollsync-delivery", daemon=True)

    def start(self) -> None:
        """Begins to resolve."""
        self._thread.start()

    def resolve(self, future: RolloutFuture, rollout: Rollout) -> None:
        """Hands a result over. Never blocks."""
        self._queue.put((future, rollout))

    def is_current(self) -> bool:
        """Whether the caller is on this thread: in a callback."""
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> None:
        """Resolves what was handed over, then ends the thread (after the callback, if called from one)."""
        self._queue.put(None)
        if self._thread.is_alive() and not self.is_current():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, rollout = item
            try:
                future.set_result(rollout)
            except BaseException:
                # Future logs a callback's Exception, but lets SystemExit and the like through, with which this thread
                # would end and everybody else's results with it.
                log.exception("a callback of request %s raised", future.request_id)


class Alarms:
    """A thread that calls functions when their time has come. The functions must not block."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._calls: dict[int, Callable[[], None]] = {}
        self._due: list[tuple[float, int]] = []  # heap of (time, number); a number without a call was cancelled
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollsync-alarms", daemon=True)

    def start(self) -> None:
        """Begins to call."""
        self._thread.start()

    def __len__(self) -> int:
        """How many are yet to come."""
        with self._condition:
            return len(self._calls)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Calls `call` after `seconds`, unless the function returned here is called before."""
        number = next(self._numbers)
        with self._condition:
            self._calls[number] = call
            heapq.heappush(self._due, (time.monotonic() + seconds, number))
            if self._due[0][1] == number:
                self._condition.notify()

        def cancel() -> None:
            with self._condition:
                self._calls.pop(number, None)
                if len(self._due) > 2 * len(self._calls) + 100:
                    # Cancelled ones leave in bulk: one by one, ten thousand requests would spend seconds here.
                    self._due = [entry for entry in self._due if entry[1] in self._calls]
                    heapq.heapify(self._due)

        return cancel

    def stop(self, timeout_s: float) -> None:
        """Forgets what is not due yet and ends the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and (not self._due or self._due[0][0] > time.monotonic()):
                    # capped: a wait beyond the clock's range raises, and would end every later alarm too
                    wait = min(self._due[0][0] - time.monotonic(), LONGEST_WAIT_S) if self._due else None
                    self._condition.wait(wait)
                if self._stopping:
                    return
                call = self._calls.pop(heapq.heappop(self._due)[1], None)
            if call is not None:
                call()

"""The control thread: the one thread of an engine that enters and leaves pauses.

Upstream's pause must be left on the thread that entered it, has no time limit, and excludes nobody but the loop. One
thread that does one job at a time gives exclusion between writers, and a place where an interrupt of the main thread
cannot strike half-way through a pause.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollout.errors import EngineStateError


class ControlThread:
    """Runs functions one after the other on a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollsync-control", daemon=True)

    def start(self) -> None:
        """Begins to run what is queued."""
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queues `function`; the future has its result. EngineStateError after `stop`."""
        future: Future[Any] = Future()
        self.submit_to(future, function)
        return future

    def submit_to(self, future: Future[Any], function: Callable[[], Any]) -> None:
        """Like `submit`, for a caller that must hold the future whenever an interrupt strikes."""
        with self._lock:
            if self._closed:
                raise EngineStateError("the engine is stopped; make a new one")
            self._queue.put((future, function))

    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> bool:
        """Runs what is queued, then ends. True if the thread has ended in time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if self._thread.is_alive() and not self.is_current():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    # the caller sees it; the thread lives on for the next job
                    future.set_exception(error)
            # Until the next job comes, this frame would hold what the job was given (a bucket of weights, say), and an
            # error's traceback holds this frame.
            del job, future, function

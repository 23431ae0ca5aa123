"""Futures of what another process was asked: each resolves once, by its answer or by its limit, on one thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from rollout.control import ControlThread
from rollout.errors import EngineStateError, RolloutError
from rollout.requests.delivery import Alarms

R = TypeVar("R")


class PendingCalls:
    """Those of one worker's handle. Callbacks run on its thread, one after the other, and must not wait for a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._resolver = ControlThread()
        self._alarms = Alarms()
        self._is_started = False
        self._ended: RolloutError | None = None

    def add(self, limit_s: float, unanswered: RolloutError) -> "Future[Any]":
        """A future that resolves by `answer`, or after `limit_s` with the error `unanswered`. Raises what `fail_all` was
        given, after that."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._ended is not None:
                raise self._ended  # its limit would never come
            if not self._is_started:
                self._resolver.start()
                self._alarms.start()
                self._is_started = True
            self._pending.add(future)
        disarm = self._alarms.after(limit_s, lambda: self._submit(partial(_fail, future, unanswered)))

        def end(done: "Future[Any]") -> None:  # not `future`: a future keeps its callbacks, and would keep itself
            disarm()
            with self._lock:
                self._pending.discard(done)

        future.add_done_callback(end)
        return future

    def answer(self, future: "Future[R]", get: Callable[[], R]) -> None:
        """Resolves it with what `get` returns or raises. Never blocks."""
        self._submit(partial(_settle, future, get))

    def fail_all(self, error: RolloutError) -> None:
        """Resolves what is pending with `error`, and takes no more. Never blocks."""
        with self._lock:
            self._ended = error
            pending = list(self._pending)
        for future in pending:
            self._submit(partial(_fail, future, error))

    def stop(self, timeout_s: float) -> None:
        """After `fail_all`: ends the threads."""
        with self._lock:
            if not self._is_started:
                return
        self._alarms.stop(timeout_s)
        self._resolver.stop(timeout_s)

    def _submit(self, function: Callable[[], None]) -> None:
        with suppress(EngineStateError):  # stopped: all has been resolved, and this is a late word
            self._resolver.submit(function)


# Both run on the one thread, so that nothing comes between the question and the deed.


def _settle(future: "Future[R]", get: Callable[[], R]) -> None:
    if future.done():
        return  # its limit passed before
    try:
        value = get()
    except BaseException as error:
        # whoever called sees it
        future.set_exception(error)
        # its traceback holds this frame: with them in it, what was asked about would stay until the next collection
        del future, get
    else:
        future.set_result(value)


def _fail(future: "Future[Any]", error: RolloutError) -> None:
    if not future.done():
        future.set_exception(error)

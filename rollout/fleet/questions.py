"""What other threads ask of a controller's loop: each waits up to its limit, and no longer than the controller runs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from rollout.errors import EngineStateError, RolloutStalledError
from rollout.fleet.coordinator import Coordinator
from rollout.fleet.report import Status

T = TypeVar("T")

ASK_TIMEOUT_S = 60.0
"""How long the loop may take to answer what it answers at once."""
STATUS_TIMEOUT_S = 1.0
"""How long it is waited for before others look at what it does."""
NOT_RUNNING = "the controller is not running; use `with controller:` or controller.start()"


class Questions:
    """None is forgotten when the loop ends before it came to it: whoever waits learns of the stop at once."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._loop = coordinator.loop
        self._lock = threading.Lock()
        self._refusal: str | None = NOT_RUNNING
        self._open: set[Future[Any]] = set()

    def open(self) -> None:
        """The loop runs."""
        with self._lock:
            self._refusal = None

    def close(self, refusal: str) -> None:
        """The loop has ended: whoever waits gets an EngineStateError that says so, and so does whoever comes later."""
        with self._lock:
            self._refusal, left = refusal, list(self._open)
        for future in left:
            with suppress(InvalidStateError):  # answered at the last moment, or given up
                future.set_exception(EngineStateError(refusal))

    def check_open(self) -> None:
        """EngineStateError unless the loop runs."""
        with self._lock:
            if self._refusal is not None:
                raise EngineStateError(self._refusal)

    def put(self, begin: "Callable[[Future[T]], None]") -> "Future[T]":
        """Has `begin` called on the loop, with the future that is returned here."""
        future: Future[T] = Future()
        with self._lock:
            if self._refusal is not None:
                raise EngineStateError(self._refusal)
            self._open.add(future)
        future.add_done_callback(self._forget)
        self._loop.call_soon(lambda: None if future.done() else begin(future))
        return future

    def ask(self, function: Callable[[], T]) -> T:
        """What `function` returns on the loop."""

        def begin(future: "Future[T]") -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        return self._result(self.put(begin), ASK_TIMEOUT_S, "asking the controller's loop")

    def status(self) -> Status:
        """Who waits for what, as the loop sees it; as it can be seen from here if the loop is busy with a user's function."""
        future: Future[Status] = self.put(lambda future: future.set_result(self._coordinator.status()))
        try:
            return self._loop.wait(future, STATUS_TIMEOUT_S)
        except TimeoutError:
            return self._coordinator.status()

    def wait(self, begin: "Callable[[Future[T]], None]", timeout_s: float, doing: str) -> T:
        """What becomes of the future that `begin` is called with. Raises what is fatal to the fleet, and after `timeout_s`
        RolloutStalledError."""
        if self._coordinator.fatal is not None:
            raise self._coordinator.fatal
        return self._result(self.put(begin), timeout_s, doing)

    def _result(self, future: "Future[T]", timeout_s: float, doing: str) -> T:
        try:
            return self._loop.wait(future, timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            future.cancel()
            raise RolloutStalledError(f"{doing} took longer than {timeout_s:g} s", self.status()) from None

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._open.discard(future)

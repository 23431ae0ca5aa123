"""Who wants to know of a worker's new incarnations, and the threads on which they are told."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("rollsync")

W = TypeVar("W")


class JoinCallbacks(Generic[W]):
    """The `on_join` callbacks of one worker's handle. Each telling has a thread of its own, on which a callback may publish
    to the worker and wait for that."""

    def __init__(self, worker: W, name: str) -> None:
        self._worker = worker
        self._name = name
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[W], None]] = []
        self._threads: list[threading.Thread] = []

    def add(self, callback: Callable[[W], None]) -> None:
        """It will be told."""
        with self._lock:
            self._callbacks.append(callback)

    def tell(self, *callbacks: Callable[[W], None]) -> None:
        """Calls these, or all there are. What one raises is logged: the worker stays STALE, and says so."""
        with self._lock:
            called = list(callbacks) or list(self._callbacks)
            if not called:
                return
            thread = threading.Thread(
                target=self._call, args=(called,), name=f"rollsync-join-{self._name}", daemon=True
            )
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the tellings under way, for each no longer than this."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _call(self, callbacks: list[Callable[[W], None]]) -> None:
        for callback in callbacks:
            try:
                callback(self._worker)
            except Exception:  # somebody else's function
                log.exception("on_join callback %r of worker %s raised", callback, self._name)

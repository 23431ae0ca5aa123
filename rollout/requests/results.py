"""Requests of upstream's own API: what their callers call them, and the queues in which they and their results wait."""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rollout.errors import InvalidRequestError
from rollout.requests.inflight import group_keys

PULSE_S = 0.1
"""How often a reader looks whether its result may still come."""


class Named(Protocol):
    """A result, as far as this file goes."""

    request_id: str


class ResultQueue(queue.Queue[Any]):
    """Upstream's output queue, in which each reader waits for its own and leaves the others' where they are."""

    def _put(self, item: Named) -> None:
        super()._put(item)
        # queue.Queue wakes one reader, which may wait for another's result
        self.not_empty.notify_all()

    def get_for(self, request_id: str | None, timeout_s: float | None, may_come: Callable[[], bool]) -> Any:
        """The oldest result of that request (None: of any), or None when none comes within the limit, or can come any
        more, as `may_come` says."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.not_empty:
            while True:
                # asked before the look: what ends between the two has been put by then
                coming = may_come()
                for number, output in enumerate(self.queue):
                    if request_id is None or output.request_id == request_id:
                        del self.queue[number]
                        return output
                left = PULSE_S if deadline is None else deadline - time.monotonic()
                if not coming or left <= 0:
                    return None
                self.not_empty.wait(min(left, PULSE_S))


class RequestQueue(queue.Queue[Any]):
    """Upstream's input queue. It is never full: only those of upstream's own methods wait for room in it."""

    def wait_for_room(self, limit: int, timeout_s: float, check: Callable[[], None]) -> bool:
        """Waits until fewer than `limit` requests wait; False if that takes longer. `check` raises where it makes no sense to
        wait on; it is asked first and after each `wake`."""

        def is_there() -> bool:
            check()
            return self._qsize() < limit

        with self.not_full:
            return self.not_full.wait_for(is_there, timeout_s)

    def wake(self) -> None:
        """Lets those who wait ask `check` again."""
        with self.not_full:
            self.not_full.notify_all()


class RequestNames:
    """The callers' ids of requests in flight, and the key under which the loop knows each.

    A key is never used twice: the loop confuses a request with one of the same id that is queued, has just ended or is
    being cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._numbers = itertools.count()
        self._made_up = itertools.count()

    def add(self, name: str | None, size: int) -> tuple[list[str], str]:
        """Takes in a request with its `size` samples. Returns their names and the loop's key of the first.
        InvalidRequestError if a name is in flight; None makes one up that is not."""
        with self._lock:
            names = group_keys(name if name is not None else self._make_up(), size)
            while any(sample in self._keys for sample in names):
                if name is not None:
                    raise InvalidRequestError(
                        f"request_id {name!r} is already in flight; use another or wait for its result"
                    )
                names = group_keys(self._make_up(), size)
            keys = group_keys(f"upstream-{next(self._numbers)}", size)
            self._keys.update(zip(names, keys, strict=True))
            self._names.update(zip(keys, names, strict=True))
        return names, keys[0]

    def key_of(self, name: str) -> str | None:
        """The loop's key of a request in flight, else None."""
        return self._keys.get(name)

    def name_of(self, key: str) -> str | None:
        """The caller's id of the request with that key, None if it is nobody's."""
        return self._names.get(key)

    def forget(self, key: str) -> None:
        """The request has ended."""
        with self._lock:
            name = self._names.pop(key, None)
            if name is not None:
                del self._keys[name]

    def _make_up(self) -> str:
        return f"req_{next(self._made_up)}"

"""Futures of work that cannot be called off: it has ended already, or others wait for it."""

from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def failed(error: BaseException) -> "Future[Any]":
    """A call that came to nothing before it was made."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def uncancellable(inner: "Future[T]") -> "Future[T]":
    """The same result; `cancel` does nothing. Callbacks run where those of `inner` do."""
    outer: Future[T] = Future()
    outer.set_running_or_notify_cancel()

    def end(done: "Future[T]") -> None:  # not `inner`, which keeps its callbacks, and would keep itself
        error = done.exception()
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())

    inner.add_done_callback(end)
    return outer

"""Futures that have ended already."""

from concurrent.futures import Future
from typing import Any


def failed(error: BaseException) -> "Future[Any]":
    """A call that came to nothing before it was made."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future

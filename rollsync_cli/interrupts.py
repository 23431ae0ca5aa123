"""Ctrl-C at moments of our choosing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def after_block() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: inside a write it would leave half a line in a pipe. A second one does not
    wait, for a reader that has stopped reading."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # nobody is interrupted here
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            before(number, frame)
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        before(signal.SIGINT, None)

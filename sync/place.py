"""Where this process runs, as far as sharing memory goes, and until when others may take."""

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sync.ticket import Place

MEMORY_FOLDER = Path("/dev/shm")
"""The memory file system; another folder where there is none makes `SharedMemory` slower, not wrong."""

ANSWER_GRACE_S = 1.0
"""How long after a limit a target may still answer. An update ends by the same deadline; cut off at that moment, its own
error, which says what it waited for, would be lost."""


@cache
def machine() -> str:
    """The running kernel and its memory file system: two containers on one host do not share the latter."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot_id.read_text().strip() if boot_id.exists() else os.uname().nodename
    memory = MEMORY_FOLDER.stat().st_dev if MEMORY_FOLDER.exists() else 0
    return f"{kernel}/{memory}"


def here() -> Place:
    # not cached: a forked child is another process
    return Place(machine=machine(), pid=os.getpid())


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A moment of one machine's monotonic clock, readable on that machine alone."""

    machine: str
    at: float

    @staticmethod
    def after(seconds: float) -> "Deadline":
        return Deadline(machine=machine(), at=time.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Never negative; infinite on another machine, whose clock says nothing about this one's."""
        if self.machine != machine():
            return float("inf")
        return max(0.0, self.at - time.monotonic())

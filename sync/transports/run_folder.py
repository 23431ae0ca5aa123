"""Files of one living process, on a memory file system, that vanish with it."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sync.errors import SyncError
from sync.place import MEMORY_FOLDER

ALIVE = "alive"
UNFINISHED = ".new-"
UNFINISHED_FOR_S = 3600.0
TRIES = 100


class RunFolder:
    """A folder of mode 0700 that lasts as long as its process.

    Its owner holds a lock in it, which the kernel lets go of however the owner ends. Whoever makes the next run folder
    of the same user removes those whose lock is free, so that a killed process leaves nothing behind for long. A file
    may be unlinked while it is mapped: readers keep what they have.
    """

    def __init__(self, base: Path | None = None) -> None:
        if base is None:
            base = MEMORY_FOLDER if MEMORY_FOLDER.exists() else Path(tempfile.gettempdir())
        self._home = base / f"rollsync-{os.getuid()}"
        # Locked before it has the name that a sweep looks for.
        unfinished = _make_in(self._home)
        self._lock = try_lock(unfinished / ALIVE)
        assert self._lock is not None
        self.path = unfinished.rename(self._home / f"run-{unfinished.name.removeprefix(UNFINISHED)}")

    def close(self) -> None:
        """Remove the folder. Harmless twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
        with suppress(OSError):  # another process has a run folder in it
            self._home.rmdir()


def _make_in(home: Path) -> Path:
    for _ in range(TRIES):
        with suppress(FileExistsError):  # not `exist_ok`, which looks again at what may be gone by then
            home.mkdir(mode=0o700)
        # Whoever else closes its run folder now, the last one in there, takes `home` along.
        with suppress(FileNotFoundError):
            check_private(home)
            sweep(home)
            return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=home))
    raise SyncError(f"{home} is removed again and again while a folder is made in it; name another folder")


def sweep(home: Path) -> None:
    """Remove the run folders of processes that have ended."""
    for folder in home.iterdir():
        if folder.name.startswith(UNFINISHED):
            with suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime < UNFINISHED_FOR_S:
                    continue
        with suppress(FileNotFoundError, NotADirectoryError):
            lock = try_lock(folder / ALIVE)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def check_private(home: Path) -> None:
    """SyncError if another user could read or write what is in this folder."""
    status = home.lstat()
    # Of the link itself, and asked once: it may be removed between two questions.
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise SyncError(
            f"{home} must be a folder of this user alone (mode 0700), it has owner {status.st_uid} and mode "
            f"{status.st_mode & 0o777:o}: others could read or replace the weights in it; remove it or name another folder"
        )

"""One staged copy per node, which every engine of the node maps."""

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from sync.errors import SyncError
from sync.layout import Layout
from sync.place import Deadline, machine
from sync.receiver import CommitMode, accept
from sync.ticket import Package, TargetStatus
from sync.transports.base import Link
from sync.transports.mapped_file import MappedFile, drop_unlinked, map_file
from sync.transports.run_folder import RunFolder

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""The file system, the largest file that this process may write, its user's share."""


class SharedMemory:
    """For engines in other processes of this machine: staged into a mapped file that all of them read.

    `commit="copy"`: each engine copies from it inside its pause. `commit="remap"`: each engine's parameters are
    re-pointed at its private mapping of the file: milliseconds at any size, one physical copy for all engines; a write
    to such a parameter never reaches the file or another engine, but the bytes under a tensor that somebody took from the
    engine's model (`parameter.data`, a state dict) change when the file is written again, two versions later: clone what
    is kept. None: remap where an engine allows it.

    A reader holds a lock on the file that it reads, which the kernel lets go of when it dies. The file is written again
    only when nobody holds one (whoever mapped it before uses that mapping then, and verifies what is in it); until then the
    next version goes into another file, and what is older than the two newest versions loses its name. So three files at
    most for engines of one kind: what they run on, what is staged next, what one that is slow has not left yet.
    """

    name = "shared_memory"

    def __init__(self, commit: CommitMode | None = None, *, folder: Path | None = None) -> None:
        """`folder`: where the run folder is made; None: the memory file system. SyncError if others could read it."""
        if commit not in (None, "copy", "remap"):
            raise SyncError(f'commit must be "copy", "remap", or None for whichever an engine allows, got {commit!r}')
        self._commit = commit
        self._folder = RunFolder(folder)
        self._files: list[_File] = []
        self._newest = self._before = 0  # the two versions that were sent last
        self._num_made = 0
        self._readers: dict[str, Link] = {}

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        if status.place.machine != machine():
            raise SyncError("SharedMemory reaches engines of this machine only; use ObjectStore between machines")
        if self._commit == "remap" and not status.can_remap:
            raise SyncError(
                'an engine cannot re-point its parameters (another model shares them, or it runs on a GPU); use commit="copy"'
            )
        return self._commit if self._commit is not None else "remap" if status.can_remap else "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        files = [file for file in self._files if file.layout == layout]
        # The newest stays whole until the next one is, for whoever comes late.
        sent = max((file for file in files if file.version is not None), key=_version, default=None)
        free = (file for file in files if file is not sent and file.run is not spared and file.lock_if_unread())
        file = next(free, None) or self._make(layout)
        file.version = None
        return file.run

    def _make(self, layout: Layout) -> "_File":
        self._num_made += 1
        file = _File.make(self._folder.path / f"weights-{self._num_made}", layout)
        self._files.append(file)
        return file

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        file = next(file for file in self._files if file.run is run)
        file.version = package.ticket.version
        file.unlock()
        if file.version != self._newest:
            self._before, self._newest = self._newest, file.version
        for old in [old for old in self._files if old.version is not None and old.version < self._before]:
            self._files.remove(old)
            old.remove()
        self._readers |= {link.name: link for link in links}
        cargo = MappedFile(path=str(file.path), inode=file.inode)
        return {link.name: link.call(accept, package, cargo) for link in links}

    def close(self) -> None:
        for file in self._files:
            file.remove()
        self._files.clear()
        self._folder.close()
        for link in self._readers.values():
            link.call(drop_unlinked)
        self._readers.clear()


class _File:
    """The sender's side: a file that it alone writes."""

    def __init__(self, path: Path, layout: Layout, descriptor: int) -> None:
        self.path = path
        self.layout = layout
        self.version: int | None = None
        """What was sent in it; None while it is written."""
        self.inode = os.fstat(descriptor).st_ino
        self.run = map_file(str(path), layout.num_bytes, shared=True)
        self._descriptor: int | None = descriptor

    @staticmethod
    def make(path: Path, layout: Layout) -> "_File":
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Without it a full file system shows as SIGBUS in whoever touches the first page that is missing.
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
            return _File(path, layout, descriptor)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(path.parent).free
            raise SyncError(
                f"staging needs {layout.num_bytes / 2**30:.2f} GiB in {path.parent}, {free / 2**30:.2f} GiB are free; make "
                "the memory file system larger, or name a folder on another one: SharedMemory(folder=...)"
            ) from error

    def lock_if_unread(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Engines that map it keep it; the memory goes with the last of them."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def _version(file: _File) -> int:
    return file.version or 0

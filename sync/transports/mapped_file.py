"""The receivers' side of shared memory: a sealed version in a file, mapped, and the mappings that wait for the next one."""

import fcntl
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sync.errors import SyncError
from sync.layout import Layout
from sync.ticket import Package


@dataclass(frozen=True)
class MappedFile:
    """A sealed version in a file of this machine."""

    path: str
    inode: int

    def open(self, layout: Layout) -> "Mapping":
        """SyncError if it has been removed, replaced, or is being written again."""
        drop_unlinked()
        descriptor = self._descriptor(layout)
        mapping = _waiting_for(descriptor, layout.num_bytes)
        if mapping is None:
            mapping = Mapping(descriptor, layout.num_bytes)
        else:
            os.close(descriptor)
        try:
            mapping.lock()
        except BaseException:
            mapping.drop()
            raise
        return mapping

    def _descriptor(self, layout: Layout) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SyncError(f"the staged weights are gone ({error}); publish again") from error
        status = os.fstat(descriptor)
        if status.st_ino != self.inode or status.st_size < layout.num_bytes:
            os.close(descriptor)
            raise SyncError(f"{self.path} is not the file that was sent; publish again")
        return descriptor


class Mapping:
    """One engine's private mapping of a file: what it writes there, neither the file nor another engine sees.

    While an engine reads it, a lock keeps the file from being written again. After that it waits for the version that comes
    in the same file: to fill the page tables of gigabytes takes longer than to verify what is in them.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """`descriptor`: of the file; this object's from now on."""
        self._descriptor = descriptor
        self._end = weakref.finalize(self, os.close, descriptor)
        self._may_differ = False
        # Through the descriptor: the name may be another file by now.
        self.run = map_file(f"/proc/self/fd/{descriptor}", num_bytes, shared=False)

    @property
    def is_unlinked(self) -> bool:
        """Whether no version will come in the file any more."""
        return os.fstat(self._descriptor).st_nlink == 0

    def is_of(self, descriptor: int) -> bool:
        """Whether it is of the file that is open here."""
        return os.path.sameopenfile(self._descriptor, descriptor)

    def lock(self) -> None:
        """SyncError while the file is being written."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SyncError("the staged weights are being written again, a newer version is on its way") from None

    def verify(self, package: Package) -> None:
        try:
            package.verify_all(self.run)
        except SyncError:
            if not self._may_differ:
                raise
            # Pages that somebody wrote to when the engine's parameters lay here do not follow the file any more.
            self.run = map_file(f"/proc/self/fd/{self._descriptor}", self.run.numel(), shared=False)
            package.verify_all(self.run)

    def close(self) -> None:
        """Nobody in this process reads it any more. Harmless twice."""
        if not self._end.alive:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._may_differ = True
        with _lock:
            if self not in _waiting:
                _waiting.append(self)
        drop_unlinked()

    def drop(self) -> None:
        """The memory goes with the last tensor over it."""
        self._end()


def drop_unlinked(_: Any = None) -> None:
    """Let go of the mappings that wait for a version in a file that has been removed: they hold its memory."""
    with _lock:
        for mapping in [mapping for mapping in _waiting if mapping.is_unlinked]:
            _waiting.remove(mapping)
            mapping.drop()


def map_file(path: str, num_bytes: int, *, shared: bool) -> Tensor:
    """[num_bytes] uint8 over a file. `shared`: what is written goes into the file."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with torch.inference_mode(False):
        storage = torch.UntypedStorage.from_file(path, shared=shared, nbytes=num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _waiting_for(descriptor: int, num_bytes: int) -> Mapping | None:
    """A mapping that waits for this file; its taker's from now on."""
    with _lock:
        for mapping in _waiting:
            if mapping.is_of(descriptor) and mapping.run.numel() == num_bytes:
                _waiting.remove(mapping)
                return mapping
    return None


_lock = threading.Lock()
_waiting: list[Mapping] = []

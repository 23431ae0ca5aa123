"""Engines of this process read the staging itself."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from sync.errors import SyncError
from sync.layout import Layout, empty_run
from sync.place import Deadline, here
from sync.receiver import CommitMode, accept
from sync.ticket import Package, TargetStatus
from sync.transports.base import Link


class InProcess:
    """For engines in the trainer's own process: staged once on their device, then one copy in memory inside each pause.

    The staging is used again for the next version unless an engine still reads it (a commit that outlived its publish);
    then the next one gets memory of its own.
    """

    name = "in_process"

    def __init__(self) -> None:
        # whoever keeps a version keeps its memory; a layout that no engine has any more is let go of
        self._runs: weakref.WeakValueDictionary[Layout, Tensor] = weakref.WeakValueDictionary()
        self._readers = _Readers()

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        if status.place != here():
            raise SyncError("InProcess reaches engines of this process only; use SharedMemory or ObjectStore")
        return "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        run = self._runs.get(layout)
        if run is None or run is spared or self._readers.of(run):
            run = self._runs[layout] = empty_run(layout.num_bytes, layout.manifest.device, zeroed=True)
        return run

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        staged: dict[str, Future[Any]] = {}
        for link in links:
            lease = _Lease(run, self._readers)
            staged[link.name] = link.call(accept, package, lease)
            staged[link.name].add_done_callback(lease.close_if_unread)
        return staged

    def close(self) -> None:
        self._runs.clear()


class _Readers:
    """Who may still read which run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # an engine that is dropped with a version that it never committed gives nothing back
        self._leases: weakref.WeakSet[_Lease] = weakref.WeakSet()

    def add(self, lease: "_Lease") -> None:
        with self._lock:
            self._leases.add(lease)

    def discard(self, lease: "_Lease") -> None:
        with self._lock:
            self._leases.discard(lease)

    def of(self, run: Tensor) -> bool:
        with self._lock:
            return any(lease.run is run for lease in self._leases)


class _Lease:
    """Memory of this process, lent to one engine from the moment it is sent."""

    def __init__(self, run: Tensor, readers: _Readers) -> None:
        self.run = run
        self._readers = readers
        self._is_read = False
        readers.add(self)

    def open(self, layout: Layout) -> "_Lease":
        self._is_read = True
        return self

    def verify(self, package: Package) -> None:
        """They have not travelled."""

    def close(self) -> None:
        self._readers.discard(self)

    def close_if_unread(self, _: "Future[Any]") -> None:
        """The engine refused it, had it already, or never came to it."""
        if not self._is_read:
            self.close()

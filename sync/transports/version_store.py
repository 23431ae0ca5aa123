"""Versions on disk: a folder for each, and a pointer, written last, that names the newest."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from sync.errors import SyncError
from sync.place import Deadline
from sync.run_record import sync_folder, write_at_once
from sync.ticket import Package, Ticket
from sync.transports.run_folder import check_private, try_lock
from sync.transports.stored_version import LOCK, GoneError, StoredVersion, write_version
from sync.transports.version_index import VersionIndex, file_name

POINTER = "newest.json"
WRITER = "writer"
"""Held by the one process that writes."""
VERSION = "version-"
UNFINISHED = ".new-"
REMOVED = ".old-"


class VersionStore:
    """A folder of mode 0700 that outlives its writers.

    A version is written under another name, brought to the disk, renamed, and only then named by the pointer, which is
    replaced at once: whenever a writer is killed, the pointer names a whole version. What such a writer left is removed by
    the next one.
    """

    def __init__(self, path: Path) -> None:
        """SyncError if it is not there, or other users could read or write in it."""
        self.path = path
        try:
            check_private(path)
        except OSError as error:
            raise SyncError(
                f"no version has been published to {path}, or it is not shared with this machine: {error}"
            ) from error

    @staticmethod
    def make(path: Path) -> "VersionStore":
        """The same, and the folder is made if it is not there."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SyncError(f"{path} cannot be the folder of the versions: {error}") from error
        return VersionStore(path)

    def write(self, package: Package, run: Tensor, deadline: Deadline, *, keep: int) -> str:
        """Make this the newest version, and remove all but the `keep` newest that nobody reads. Returns the name of its
        folder. SyncError if the folder belongs to another run, or a newer sender or version is there."""
        with self._writing():
            current = self._pointed()
            if current is not None:
                name, index = current
                if index.ticket == package.ticket:
                    return name
                self._check_succeeds(index.ticket, package.ticket)
            self._sweep()
            name = self._write_folder(package, run, deadline)
            if current is None or _replaces(package, current[1]):
                write_at_once(self.path / POINTER, json.dumps({"folder": name}).encode())
            self._prune(keep)
        return name

    def open(self, name: str, deadline: Deadline) -> StoredVersion:
        """GoneError if it has been removed."""
        return StoredVersion(self.path / file_name(name), deadline)

    def open_newest(self, deadline: Deadline) -> StoredVersion:
        """SyncError if there is none."""
        missed = None
        while (name := self._pointer()) is not None:
            try:
                return self.open(name, deadline)
            except GoneError as error:
                if name == missed:
                    raise SyncError(
                        f"{self.path / POINTER} names {name}, which is not there; publish again, or remove {self.path}"
                    ) from error
                missed = name  # removed since the pointer was read, which then names another
        raise SyncError(f"no version has been published to {self.path} yet")

    # -------------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _writing(self) -> Iterator[None]:
        lock = try_lock(self.path / WRITER)
        if lock is None:
            raise SyncError(
                f"another process is writing a version to {self.path}; give each trainer a folder of its own, or stop the "
                "one that was replaced"
            )
        try:
            yield
        finally:
            os.close(lock)

    def _pointer(self) -> str | None:
        path = self.path / POINTER
        try:
            return file_name(json.loads(path.read_bytes())["folder"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise SyncError(f"{path} is damaged ({error!r}); remove it, and publish again") from error

    def _pointed(self) -> tuple[str, VersionIndex] | None:
        name = self._pointer()
        try:
            return (name, VersionIndex.load(self.path / name)) if name is not None else None
        except FileNotFoundError as error:
            raise SyncError(f"{self.path / POINTER} names {name}, which is not there; remove {self.path}") from error

    def _check_succeeds(self, there: Ticket, new: Ticket) -> None:
        known, claim = there.claim, new.claim
        if known.run_id != claim.run_id:
            raise SyncError(
                f"{self.path} holds version {there.version} of run {known.run_id!r}, this is run {claim.run_id!r}; give "
                "each run a folder of its own, or go on with the old one: SyncConfig(run_id=...)"
            )
        if claim.epoch < known.epoch or (claim.epoch == known.epoch and claim.sender != known.sender):
            raise SyncError(
                f"{self.path} was written by a newer trainer (epoch {known.epoch} of run {known.run_id!r}, this one has "
                f"{claim.epoch}); stop this trainer, or make a new WeightSync if it is the one that should go on"
            )
        if new.version < there.version:
            raise SyncError(
                f"{self.path} holds version {there.version}, and versions only grow: bring the engines up from it "
                f"(Disk.bring_up), or publish as version {there.version + 1}"
            )

    def _write_folder(self, package: Package, run: Tensor, deadline: Deadline) -> str:
        folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.path))
        try:
            write_version(folder, package, run, deadline)
            name = f"{VERSION}{package.ticket.version}-{folder.name.removeprefix(UNFINISHED)}"
            folder.rename(self.path / name)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_folder(self.path)
        return name

    def _sweep(self) -> None:
        """What writers that were killed have left: nobody else writes now."""
        for entry in self.path.iterdir():
            if entry.name.startswith((UNFINISHED, REMOVED)):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(f".{POINTER}-"):
                entry.unlink(missing_ok=True)

    def _prune(self, keep: int) -> None:
        folders = {entry: _number(entry) for entry in self.path.iterdir() if entry.name.startswith(VERSION)}
        newest = sorted(set(folders.values()), reverse=True)[:keep]
        pointer = self._pointer()
        for folder, number in folders.items():
            if number in newest or folder.name == pointer:
                continue
            lock = try_lock(folder / LOCK)
            if lock is None:
                continue  # somebody reads it; a later publish removes it
            try:
                removed = folder.rename(folder.with_name(REMOVED + folder.name))
                shutil.rmtree(removed, ignore_errors=True)
            finally:
                os.close(lock)


def _replaces(package: Package, current: VersionIndex) -> bool:
    """Engines of several dtypes get one version in several layouts: the pointer stays at the one that says most."""
    return package.ticket.version > current.ticket.version or package.layout.num_bytes > current.num_bytes


def _number(folder: Path) -> int:
    """The version of a folder; older than all if its name does not say."""
    number = folder.name.removeprefix(VERSION).partition("-")[0]
    return int(number) if number.isdecimal() else -1

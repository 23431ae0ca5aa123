"""Versions in a folder of safetensors files, for engines anywhere, now or later."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rollout import EngineState, GenerationEngine, RolloutError
from sync.config import check_seconds
from sync.errors import SyncError, SyncTimeoutError
from sync.futures import failed
from sync.layout import Layout, empty_run, seal
from sync.link import Link as TargetLink
from sync.link import Target
from sync.manifest import Manifest
from sync.place import ANSWER_GRACE_S, Deadline
from sync.receiver import CommitMode, accept, commit, receiver_of
from sync.staging import Staging
from sync.ticket import Package, TargetStatus
from sync.transports.base import Link
from sync.transports.host_memory import HOST, HostMemory
from sync.transports.stored_version import StoredVersion
from sync.transports.version_store import VersionStore


class Disk:
    """For engines that see the same file system, also those that start when no trainer runs any more.

    Each version is a folder of safetensors shards, whole tensors under their names, and JSON; a pointer, written last,
    names the newest. Engines read it while they generate, verify every tensor, and copy it in their pause. Kept are the
    `keep` newest versions, and any that somebody reads. Files are of mode 0600, in a folder of mode 0700.

        Disk.bring_up(engine, path)     # a joiner, another cluster, a restart
    """

    name = "disk"

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        """`path`: made if it is not there; the same on each machine. SyncError if others could read or write in it."""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise SyncError(f"keep must be at least 1 version, got {keep!r}")
        self._store = VersionStore.make(Path(path).absolute())
        self._keep = keep
        self._memory = HostMemory()

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        return "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        return self._memory.run(layout, spared)

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        try:
            folder = self._store.write(package, run, deadline, keep=self._keep)
        except (OSError, SafetensorError, SyncError) as error:
            failure = error if isinstance(error, SyncError) else self._cannot_write(package, error)
            return {link.name: failed(failure) for link in links}
        cargo = StoredCargo(path=str(self._store.path), folder=folder, deadline=deadline)
        return {link.name: link.call(accept, package, cargo) for link in links}

    def close(self) -> None:
        """The versions stay."""

    def _cannot_write(self, package: Package, error: Exception) -> SyncError:
        failure = SyncError(
            f"version {package.ticket.version} ({package.layout.num_bytes / 2**30:.2f} GiB) cannot be written to "
            f"{self._store.path}: {error}"
        )
        failure.__cause__ = error
        return failure

    @staticmethod
    def bring_up(target: Target, path: str | Path, *, timeout_s: float = 120.0) -> int:
        """Give an engine, or a worker, the newest version of a folder that a `Disk` has written; no trainer need run.
        Returns that version. Harmless if the target has it already.

        From then on the engine belongs to the run of the trainer that wrote it. Dtypes may differ, as in a publish. Raises
        ManifestError if engine and folder do not hold the same tensors; SyncError where no version is there, for a damaged
        file, by name, for a version that is not newer than the engine's, and from the engine's own errors;
        SyncTimeoutError. Nothing read is executed: JSON and safetensors only.
        """
        check_seconds("timeout_s", timeout_s)
        deadline = Deadline.after(timeout_s)
        try:
            call = TargetLink("the engine", target).call_update(
                _bring_up, str(Path(path).absolute()), deadline, timeout_s
            )
            version: int = call.result(timeout_s + ANSWER_GRACE_S)
            return version
        except RolloutError as error:
            raise SyncError(f"the engine could not be brought up from {path}: {error}") from error
        except SyncError:
            raise
        except TimeoutError as error:
            call.cancel()
            raise SyncTimeoutError(f"bringing an engine up from {path} took longer than {timeout_s:g} s") from error


@dataclass(frozen=True, kw_only=True)
class StoredCargo:
    """A version in a folder, by name. Read when it is opened; the folder may go afterwards."""

    path: str
    folder: str
    deadline: Deadline

    def open(self, layout: Layout) -> "_InMemory":
        with VersionStore(Path(self.path)).open(self.folder, self.deadline) as stored:
            return _InMemory(_on_device(_read(stored, layout), layout))


@dataclass
class _InMemory:
    """A version that has been read."""

    run: Tensor

    def open(self, layout: Layout) -> "_InMemory":
        return self

    def verify(self, package: Package) -> None:
        # on a device they cannot be digested again; each tensor has been, on its way from the file
        if self.run.device == HOST:
            package.verify_all(self.run)

    def close(self) -> None:
        """The memory goes with the last that refers to it."""


def _bring_up(engine: GenerationEngine, path: str, deadline: Deadline, timeout_s: float) -> int:
    with VersionStore(Path(path)).open_newest(deadline) as stored:
        index = stored.index
        held = receiver_of(engine).obey(engine, None)
        if held == (index.ticket.claim, index.ticket.version) and engine.state != EngineState.FENCED:
            return engine.version
        layout = Layout(Manifest.of(engine.model), index.bucket_bytes)
        layout.manifest.check(stored.specs())
        run = _read(stored, layout)
    digests = layout.digests(run)
    # In another dtype these are other bytes than those that were written, so another seal.
    ticket = replace(index.ticket, seal=seal(digests))
    package = Package(ticket=ticket, layout=layout, digests=digests)
    accept(engine, package, _InMemory(_on_device(run, layout)))
    commit(engine, ticket, "copy", deadline, timeout_s)
    return engine.version


def _read(stored: StoredVersion, layout: Layout) -> Tensor:
    """[layout.num_bytes] uint8 in host memory, cast to the layout's dtypes. Raises ManifestError."""
    staging = Staging(layout, empty_run(layout.num_bytes, HOST, zeroed=True))
    for name, tensor in stored.tensors():
        staging.put(name, tensor)
    staging.seal()
    return staging.run


def _on_device(run: Tensor, layout: Layout) -> Tensor:
    """Where the engine's weights are, so that its pause holds one copy on the device; where there is no room, as it is."""
    if layout.manifest.device != HOST:
        with suppress(torch.cuda.OutOfMemoryError):
            return run.to(layout.manifest.device)
    return run

"""One version in a folder of safetensors shards: how it is written, and read again with every byte verified."""

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sync.errors import SyncError, SyncTimeoutError
from sync.layout import digest, empty_run
from sync.manifest import Slot, TensorSpec
from sync.place import Deadline
from sync.run_record import sync_folder, write_at_once
from sync.ticket import Package
from sync.transports.version_index import INDEX, Shard, VersionIndex

LOCK = "lock"
"""Held, shared, by whoever reads the folder."""


class GoneError(SyncError):
    """The folder has been removed: there is a newer version."""


class StoredVersion:
    """A version on disk, as a WeightSource. It is not removed before `close`.

    Read by offset rather than mapped: on a mapped file, a failing disk or a file that somebody cuts short is a SIGBUS,
    which no engine survives. Raises SyncError that names the file for what is damaged.
    """

    def __init__(self, folder: Path, deadline: Deadline) -> None:
        """GoneError if there is no such folder any more."""
        self._folder = folder
        self._deadline = deadline
        self._lock: int | None = _lock_shared(folder)
        try:
            self.index = VersionIndex.load(folder)
        except FileNotFoundError as error:
            self.close()
            raise SyncError(f"{folder} has no {INDEX}; publish again, or remove the folder") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: spec for shard in self.index.shards for name, (spec, _) in self._entries(shard).items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each in memory of its own. SyncTimeoutError once the deadline has passed."""
        version = self.index.ticket.version
        for shard in self.index.shards:
            entries = self._entries(shard)
            with self._reading(shard) as descriptor:
                for name, (spec, offset) in entries.items():
                    if self._deadline.remaining_s() == 0:
                        raise SyncTimeoutError(
                            f"reading version {version} from {self._folder} did not end in time, at {name}"
                        )
                    with torch.inference_mode(False):
                        tensor = torch.empty(spec.shape, dtype=spec.dtype)
                    content = as_bytes(tensor)
                    _read_at(descriptor, content, offset)
                    if digest(content) != shard.digests.get(name):
                        raise SyncError(
                            f"{self._folder / shard.file} is damaged: {name} has other bytes than were written; publish again"
                        )
                    yield name, tensor

    def _entries(self, shard: Shard) -> "dict[str, tuple[TensorSpec, int]]":
        """Each tensor's spec and first byte, in the order of the file. That the file is whole, and that its tensors fill
        it to the end without a gap, is what safetensors checks when it opens one."""
        with self._reading(shard) as descriptor, safe_open(self._folder / shard.file, framework="pt") as file:
            mapped = {name: file.get_tensor(name) for name in file.offset_keys()}  # touches no page
            offset = os.fstat(descriptor).st_size - sum(tensor.nbytes for tensor in mapped.values())
            entries = {}
            for name, tensor in mapped.items():
                entries[name] = (TensorSpec.of(tensor), offset)
                offset += tensor.nbytes
            del mapped, tensor
        if entries.keys() != shard.digests.keys():
            raise SyncError(f"{self._folder / shard.file} is damaged: it holds other tensors than {INDEX} says")
        return entries

    @contextmanager
    def _reading(self, shard: Shard) -> Iterator[int]:
        """A descriptor of the file; SyncError that names it for what is wrong with it inside the block."""
        path = self._folder / shard.file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise SyncError(f"{path} is damaged: it is not a file")
                yield descriptor
            finally:
                os.close(descriptor)
        except (OSError, SafetensorError) as error:
            raise SyncError(
                f"{path} cannot be read ({error}); publish again, or bring up from another folder"
            ) from error


def write_version(folder: Path, package: Package, run: Tensor, deadline: Deadline) -> None:
    """Fill an empty folder; all of it is on the disk when this returns. SyncTimeoutError once the deadline has passed."""
    layout = package.layout
    os.close(os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    views = dict(zip((slot.names[0] for slot in layout.manifest.slots), layout.views(run), strict=True))
    shards = []
    for number, names in enumerate(shard_names(layout.manifest.slots, layout.bucket_bytes)):
        if deadline.remaining_s() == 0:
            raise SyncTimeoutError(f"writing version {package.ticket.version} to {folder.parent} did not end in time")
        file = f"weights-{number:05d}.safetensors"
        _write_shard(folder / file, {name: views[name] for name in names})
        shards.append(Shard(file=file, digests={name: digest(as_bytes(views[name])) for name in names}))
    index = VersionIndex(
        ticket=package.ticket,
        bucket_bytes=layout.bucket_bytes,
        num_bytes=layout.num_bytes,
        aliases={slot.names[0]: slot.names[1:] for slot in layout.manifest.slots if len(slot.names) > 1},
        shards=tuple(shards),
    )
    write_at_once(folder / INDEX, index.to_bytes())


def shard_names(slots: Sequence[Slot], max_bytes: int) -> list[list[str]]:
    """Whole tensors, under their first names, in shards of at most `max_bytes`; a larger tensor has one for itself."""
    shards: list[list[str]] = []
    room = 0
    for slot in slots:
        if not shards or slot.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(slot.names[0])
        room -= slot.num_bytes
    return shards


def as_bytes(tensor: Tensor) -> Tensor:
    """[num_bytes] uint8 over the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else empty_run(0, tensor.device)


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _read_at(descriptor: int, into: Tensor, offset: int) -> None:
    rest = into.numpy().data
    while rest:
        count = os.preadv(descriptor, [rest], offset)
        if count == 0:
            raise OSError("it ends too early")
        rest, offset = rest[count:], offset + count


def _lock_shared(folder: Path) -> int:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GoneError(
            f"{folder} is not there; a newer version is, or the folder is not shared with this machine"
        ) from error
    try:
        with suppress(FileNotFoundError, BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (folder / LOCK).stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        # Whoever removes a folder locks it, then renames it: it may have gone before this lock was held.
        raise GoneError(f"{folder} has been removed, a newer version is there")
    except BaseException:
        os.close(descriptor)
        raise

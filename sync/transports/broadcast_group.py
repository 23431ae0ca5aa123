"""A group of processes of its own, in which rank 0 broadcasts. Every operation has a limit."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, Self

import psutil
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, FileStore, Store, TCPStore  # type: ignore[attr-defined]

from sync.errors import SyncError
from sync.place import Deadline

BackendName = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
SHORTEST_S = 0.001
"""What is shorter is no limit at all to torch.distributed, which counts whole milliseconds."""
ERROR_GRACE_S = 1.0
"""Joining has limits of its own, and its errors say more than that a wait was over."""


class BrokenGroupError(SyncError):
    """A rank died, stopped or left, or the network failed: the group is of no more use to anybody."""


class Meeting(Protocol):
    """Where ranks find each other. Picklable."""

    def store(self, size: int, limit_s: float) -> Store: ...

    def own_address(self) -> str:
        """The address at which the other ranks reach this process."""


@dataclass(frozen=True)
class MeetingFile:
    """For ranks of one machine: a file in a folder that is private to the sender's user."""

    path: str

    def store(self, size: int, limit_s: float) -> Store:
        store = FileStore(self.path, size)
        store.set_timeout(timedelta(seconds=limit_s))
        return store

    def own_address(self) -> str:
        return LOOPBACK


@dataclass(frozen=True)
class MeetingSocket:
    """For ranks that share no folder: the sender listens, at one address."""

    host: str
    port: int

    def store(self, size: int, limit_s: float) -> Store:
        return TCPStore(self.host, self.port, timeout=timedelta(seconds=limit_s), wait_for_workers=False)

    def own_address(self) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # sends nothing: it only says by which way it would
            address: str = probe.getsockname()[0]
            return address


class MeetingServer:
    """The sender's end of a MeetingSocket."""

    def __init__(self, interface: str | None, limit_s: float) -> None:
        """`interface`: listen at its address; None: at loopback, where this machine alone can reach it."""
        host = address_of(interface) if interface is not None else LOOPBACK
        with socket.socket() as listener:
            listener.bind((host, 0))
            listener.listen()
            self.meeting = MeetingSocket(host, listener.getsockname()[1])
            # Given a port alone, it would listen at every address of the machine.
            self._store = TCPStore(
                host,
                self.meeting.port,
                is_master=True,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. SyncError if it has none."""
    known = psutil.net_if_addrs()
    for address in known.get(interface, []):
        if address.family == socket.AF_INET:
            return address.address
    raise SyncError(f"interface {interface!r} has no IPv4 address here; this machine has {', '.join(sorted(known))}")


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a rank must know to join."""

    group_id: str
    meeting: Meeting
    backend: BackendName
    rank: int
    size: int
    limit_s: float
    """For joining, and for each broadcast."""


class BroadcastGroup:
    """This process's membership. Independent of any other group of `torch.distributed`, the default one included.

    The caller sees to it that no forward of this process runs collectives meanwhile (tensor parallelism): two groups whose
    operations interleave differently on two ranks wait for each other for ever. Such models are refused by the engine.
    """

    def __init__(self, invitation: Invitation, device: torch.device, deadline: Deadline) -> None:
        """Waits for all ranks. BrokenGroupError if they have not come within the limit, or by the deadline."""
        self.group_id = invitation.group_id
        self._limit_s = invitation.limit_s
        self._device = device
        limit_s = min(invitation.limit_s + ERROR_GRACE_S, deadline.remaining_s())
        try:
            # A store in a file is locked without a limit, by a process that may be stopped while it holds the lock.
            self._backend: Any = within(limit_s, lambda: _backend(invitation))
        except (RuntimeError, OSError, TimeoutError) as error:
            limit_s = min(limit_s, invitation.limit_s)
            raise BrokenGroupError(
                f"the {invitation.size} ranks did not come together within {limit_s:.3g} s ({_first_line(error)})"
            ) from error

    @classmethod
    def joined(
        cls, current: "BroadcastGroup | None", invitation: Invitation, device: torch.device, deadline: Deadline
    ) -> Self:
        """The group that this process is in already, or a new one in its place."""
        if isinstance(current, cls) and current.group_id == invitation.group_id:
            return current
        if current is not None:
            current.leave()
        return cls(invitation, device, deadline)

    def broadcast(self, part: Tensor, deadline: Deadline) -> None:
        """From rank 0's `part` into every other's: [num_bytes] uint8, in host memory. BrokenGroupError, also when the
        deadline passes."""
        if self._backend is None:
            raise BrokenGroupError("this process has left the group")
        limit_s = min(self._limit_s, deadline.remaining_s())
        if limit_s < SHORTEST_S:
            self.leave()
            raise BrokenGroupError("the time of the publish was over before the last bucket")
        on_device = part.to(self._device)
        try:
            self._backend.broadcast([on_device], BroadcastOptions()).wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            self.leave()
            raise BrokenGroupError(
                f"a broadcast broke off, or did not end within {limit_s:.3g} s ({_first_line(error)})"
            ) from error
        if on_device is not part:
            part.copy_(on_device)

    def leave(self) -> None:
        """The other ranks notice. Harmless twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            # Its end waits for what it has begun, for the limit at most: nobody need wait with it.
            held = [backend]
            del backend
            threading.Thread(target=_end, args=(held,), name="rollsync-leave", daemon=True).start()


def within(limit_s: float, make: Callable[[], Any]) -> Any:
    """What `make` returns or raises, on a thread of its own. TimeoutError, and the thread is left to itself."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="rollsync-join", daemon=True).start()
    return made.result(limit_s)


def _backend(invitation: Invitation) -> Any:
    store = invitation.meeting.store(invitation.size, invitation.limit_s)
    if invitation.backend == "gloo":
        return _gloo(invitation, store)
    return _nccl(invitation, store)


def _gloo(invitation: Invitation, store: Store) -> Any:
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo  # its stubs lack what follows
    options = kind._Options()
    options._timeout = timedelta(seconds=invitation.limit_s)
    # Its own choice is the host name's address, at which others than the ranks can knock.
    options._devices = [kind.create_device(hostname=invitation.meeting.own_address())]
    return kind(store, invitation.rank, invitation.size, options)


def _nccl(invitation: Invitation, store: Store) -> Any:
    from torch.distributed import ProcessGroupNCCL

    kind: Any = ProcessGroupNCCL
    options = kind.Options()
    # Beyond the limit of each wait: NCCL's own watchdog would end the process.
    options._timeout = timedelta(seconds=3 * invitation.limit_s)
    return kind(store, invitation.rank, invitation.size, options)


def _end(held: list[Any]) -> None:
    held.pop().abort()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]

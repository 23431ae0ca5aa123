"""Broadcast from the trainer to all engines at once, with torch.distributed."""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from rollout import GenerationEngine
from sync.config import check_seconds
from sync.errors import SyncError
from sync.layout import Layout
from sync.place import Deadline, here, machine
from sync.receiver import CommitMode, begin, receive
from sync.ticket import Package, Place, TargetStatus
from sync.transports.base import Link
from sync.transports.broadcast_group import (
    BackendName,
    BroadcastGroup,
    BrokenGroupError,
    Invitation,
    Meeting,
    MeetingFile,
    MeetingServer,
    address_of,
)
from sync.transports.host_memory import HOST, HostMemory
from sync.transports.roll_call import RollCall, Unanswered, failure_of
from sync.transports.run_folder import RunFolder

MEETING = "group-"
CLOSE_S = 5.0


class Collective:
    """For engines in other processes that a fast network joins, above all several with GPUs: each bucket is broadcast
    once to all of them, which pass it on to each other.

    The group is this transport's own, beside any that trainer and engines have: rank 0 the sender, the engines 1 to n. It
    is kept from one publish to the next and made anew when other engines take part, and after any failure. Engines take
    their part on their control threads, while they generate. No forward of an engine may run a collective meanwhile
    (sglang#22620): models that are split over several processes (tensor parallel) are refused when an engine is made.

    Whatever waits has a limit: `operation_timeout_s`, or what is left of the publish if that is less. An engine that dies or
    stops breaks the group; it fails by name, and the others get the version in a new group without it, if the publish has
    time left.

    Ranks meet in a private file where all are on one machine, and gloo talks over loopback there. Engines elsewhere need
    `interface`, the network interface of this machine at which they reach it: whoever can connect there can disturb.
    """

    name = "collective"

    def __init__(
        self, backend: BackendName = "gloo", *, interface: str | None = None, operation_timeout_s: float = 10.0
    ) -> None:
        """`operation_timeout_s`: seconds for the group to come together, and for each bucket."""
        if backend not in ("gloo", "nccl"):
            raise SyncError(f'backend must be "gloo" or "nccl", got {backend!r}')
        check_seconds("operation_timeout_s", operation_timeout_s)
        if interface is not None:
            address_of(interface)
        self._backend: BackendName = backend
        self._interface = interface
        self._limit_s = operation_timeout_s
        self._memory = HostMemory()
        self._unanswered = Unanswered()
        self._folder: RunFolder | None = None
        self._numbers = itertools.count(1)
        self._circle: _Circle | None = None

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        if self._backend == "nccl" and not (torch.cuda.is_available() and status.manifest.device.type == "cuda"):
            raise SyncError('backend="nccl" needs a GPU here and in each engine; use Collective("gloo")')
        return "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        return self._memory.run(layout, spared)

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        roll_call = RollCall(links, self._unanswered, deadline)
        may_repeat = True
        while roll_call.present:
            num_present = len(roll_call.present)
            ready = self._prepare(package, roll_call)
            broken = self._broadcast(package, run, ready, roll_call, deadline) if ready else None
            if broken is None or len(roll_call.present) < num_present:
                continue  # without those who are left out it may work
            if not may_repeat:
                for link in list(roll_call.present):
                    roll_call.fail(link, broken)
            may_repeat = False
        return roll_call.ends()

    def close(self) -> None:
        wait_for(self._dissolve(), timeout=CLOSE_S)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # -------------------------------------------------------------------------------------------------------- inside

    def _prepare(self, package: Package, roll_call: RollCall) -> "dict[Link, _Ready]":
        calls = {link: link.call(_get_ready, package) for link in roll_call.present}
        ready: dict[Link, _Ready] = roll_call.wait(calls, self._limit_s, "that a version comes")
        for link, answer in list(ready.items()):
            if not answer.is_wanted:
                roll_call.finish(link)
                del ready[link]
        return ready

    def _broadcast(
        self,
        package: Package,
        run: Tensor,
        ready: "Mapping[Link, _Ready]",
        roll_call: RollCall,
        deadline: Deadline,
    ) -> BrokenGroupError | None:
        """One try with all who are ready. Returns why the group broke; for whom it did, and for no other reason, is
        present still."""
        try:
            circle = self._circle_of(ready)
        except (OSError, RuntimeError, SyncError) as error:
            for link in ready:
                roll_call.fail(link, SyncError(f"no place for the ranks to meet could be made: {error}"))
            return None
        links = circle.links
        calls = {
            link: link.call(_take_part, package, circle.invitation(rank), deadline)
            for rank, link in enumerate(links, start=1)
        }
        broken = None
        try:
            circle.group = BroadcastGroup.joined(circle.group, circle.invitation(0), self._device(), deadline)
            for _, part in package.layout.parts(run):
                circle.group.broadcast(part, deadline)
        except BrokenGroupError as error:
            broken = error
        # Its last wait may have begun now; then it verifies, and prepares what is derived from the weights.
        answers = roll_call.wait(calls, 2 * self._limit_s, "the broadcast", forgiven=BrokenGroupError)
        for link in answers:
            roll_call.finish(link)
        if broken is None:
            broken = next(filter(None, map(_broken, calls.values())), None)
        if broken is not None or len(answers) < len(links):
            self._dissolve()
        return broken if roll_call.present else None

    def _circle_of(self, ready: "Mapping[Link, _Ready]") -> "_Circle":
        """The one of the last publish, if it is of just these and each of them is in it still."""
        circle, links = self._circle, tuple(ready)
        if circle is None or circle.links != links or any(r.group_id != circle.group_id for r in ready.values()):
            self._dissolve()
            circle = self._circle = self._invite(links, [answer.place for answer in ready.values()])
        return circle

    def _invite(self, links: tuple[Link, ...], places: Iterable[Place]) -> "_Circle":
        meeting: Meeting
        server = None
        if self._interface is None and all(place.machine == machine() for place in places):
            meeting = MeetingFile(self._meeting_file())
        else:
            server = MeetingServer(self._interface, self._limit_s)
            meeting = server.meeting
        first = Invitation(
            group_id=uuid4().hex,
            meeting=meeting,
            backend=self._backend,
            rank=0,
            size=len(links) + 1,
            limit_s=self._limit_s,
        )
        return _Circle(links, first, server)

    def _meeting_file(self) -> str:
        if self._folder is None:
            self._folder = RunFolder()
        number = next(self._numbers)
        # The last rank to leave removes its file, but two that leave at once may each take the other for the last, and one
        # that is killed never leaves. The group before this one may still be in use.
        for left in self._folder.path.glob(f"{MEETING}*"):
            if int(left.name.removeprefix(MEETING)) < number - 1:
                left.unlink(missing_ok=True)
        return str(self._folder.path / f"{MEETING}{number}")

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else HOST

    def _dissolve(self) -> "list[Future[None]]":
        """Leave the group, and have those leave it who have not noticed. Waits for nobody."""
        circle, self._circle = self._circle, None
        if circle is None:
            return []
        if circle.group is not None:
            circle.group.leave()
        return [link.call(_leave, circle.group_id) for link in circle.links if not self._unanswered.has(link)]


@dataclass
class _Circle:
    """The ranks of one group, as the sender knows them."""

    links: tuple[Link, ...]
    """Ranks 1 to n."""
    first: Invitation
    """Rank 0's."""
    server: MeetingServer | None
    group: BroadcastGroup | None = None

    @property
    def group_id(self) -> str:
        return self.first.group_id

    def invitation(self, rank: int) -> Invitation:
        return replace(self.first, rank=rank)


def _broken(call: "Future[Any]") -> BrokenGroupError | None:
    error = failure_of(call) if call.done() else None
    return error if isinstance(error, BrokenGroupError) else None


# --------------------------------------------------------------------------------- on each engine's control thread


@dataclass(frozen=True, kw_only=True)
class _Ready:
    is_wanted: bool
    group_id: str | None
    """Of the group that this engine is in."""
    place: Place


def _get_ready(engine: GenerationEngine, package: Package) -> _Ready:
    group = _groups.get(engine)
    is_wanted = begin(engine, package)
    return _Ready(is_wanted=is_wanted, group_id=group.group_id if group is not None else None, place=here())


def _take_part(engine: GenerationEngine, package: Package, invitation: Invitation, deadline: Deadline) -> None:
    """Receive every bucket. A bucket with other bytes than were sent is an error at the end only: the others' come through
    this rank."""
    layout = package.layout
    device = layout.manifest.device if invitation.backend == "nccl" else HOST
    group = _groups[engine] = BroadcastGroup.joined(_groups.pop(engine, None), invitation, device, deadline)
    failure: Exception | None = None
    for bucket in layout.buckets:
        parcel = _Broadcast(group, deadline)
        try:
            receive(engine, package.ticket, bucket.index, parcel)
        except BrokenGroupError:
            _leave(engine, group.group_id)
            raise
        except Exception as error:
            failure = failure or error
        if not parcel.is_read:
            # Out of step with the others; they notice that it has gone.
            _leave(engine, group.group_id)
            raise failure or SyncError(f"version {package.ticket.version} was taken from elsewhere meanwhile")
    if failure is not None:
        raise failure


def _leave(engine: GenerationEngine, group_id: str) -> None:
    group = _groups.get(engine)
    if group is not None and group.group_id == group_id:
        del _groups[engine]
        group.leave()


class _Broadcast:
    """The next bucket of a group, as a parcel."""

    def __init__(self, group: BroadcastGroup, deadline: Deadline) -> None:
        self._group = group
        self._deadline = deadline
        self.is_read = False

    def read(self, into: Tensor) -> None:
        self.is_read = True
        self._group.broadcast(into, self._deadline)


_groups: "weakref.WeakKeyDictionary[GenerationEngine, BroadcastGroup]" = weakref.WeakKeyDictionary()

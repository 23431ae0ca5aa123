"""Engines, targets and a transport in memory, whose every step a test can break, hold up or replay.

Nothing here runs by itself: a target does what it is called for at once, on the caller's thread, until it is told to stop
short of a step. So a fault strikes at one exact state of the protocol, every time.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollout import EngineState, PauseTimeoutError, RolloutError, UpdateRecord
from sync.layout import Layout, empty_run
from sync.place import Deadline
from sync.receiver import CommitMode, begin, receive
from sync.ticket import Package, TargetStatus
from sync.transports.base import Link

BUCKET_BYTES = 64
NUM_BUCKETS = 4


def marked(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module of four buckets in which every number is `value`: weights of two versions in it show."""
    module = nn.Module()
    module.embed = nn.Embedding(4, 4)
    module.body = nn.Linear(4, 4)
    module.head = nn.Linear(4, 4, bias=False)
    module.head.weight = module.embed.weight
    module.register_buffer("scale", torch.zeros(3))
    module = module.to(dtype)
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            tensor.fill_(value)
    return module


def marks(module: nn.Module) -> set[float]:
    """The values that are in a module; one, unless its weights are mixed."""
    return {value for tensor in module.state_dict().values() for value in tensor.double().flatten().tolist()}


class Killed(BaseException):
    """The process ends here: nothing after it runs, not even what handles exceptions."""


@dataclass
class FakeEngine:
    """What a receiver needs of an engine. An update goes through points, in order: "pause" (it has not been entered), a
    "copy" before each of the copies, "leave" (the version has not moved), "after" (it has)."""

    model: nn.Module
    at: Callable[[str], None] = lambda point: None
    """Called at each point of an update; what it raises happens there."""
    version: int = 0
    state: EngineState = EngineState.RUNNING
    last_update: UpdateRecord | None = None
    can_remap: bool = False
    served: list[tuple[int, frozenset[float]]] = field(default_factory=list)
    """Version and marks of the weights after each update that succeeded: what requests then run on."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @contextmanager
    def update(self, version: int, timeout_s: float) -> Iterator[nn.Module]:
        is_repair = version == self.version and self.state == EngineState.FENCED
        assert version > self.version or is_repair, "an engine refuses a version that is not newer"
        self.at("pause")
        try:
            with _Watched(self.at):
                yield self.model
            self.at("leave")
        except Exception:
            self.state = EngineState.FENCED
            raise
        self.version, self.state = version, EngineState.RUNNING
        self.last_update = UpdateRecord(version=version, wait_s=0.0, held_s=0.0, straddlers=0)
        self.served.append((version, frozenset(marks(self.model))))
        self.at("after")


class _Watched(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls back before each copy."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._at("copy")
        return func(*args, **(kwargs or {}))


class FakeTarget:
    """A target whose control thread is the caller's, as far as it is let.

    `fault_at("receive", fault, skip=2)`: the third call of `receive`, or the third time an update comes to that point, runs
    into `fault`, once. A fault is `kill`, `stall`, or an exception to raise.
    """

    can_remap = False

    def __init__(self, name: str, model: nn.Module | None = None) -> None:
        self.worker_id = name
        self._make_model = lambda: model if model is not None else marked(0.0)
        self._lock = threading.RLock()
        self._joined: list[Callable[[Any], None]] = []
        self._faults: list[_Fault] = []
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._stalled = False
        self._dead = False
        self.calls: list[str] = []
        self.engines: list[FakeEngine] = []
        """One for each incarnation."""
        self._new_engine()

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def is_dead(self) -> bool:
        return self._dead

    @property
    def is_stalled(self) -> bool:
        return self._stalled

    @property
    def will_stall(self) -> bool:
        """Whether a fault that stalls it is still to come."""
        with self._lock:
            return any(fault.what == "stall" for fault in self._faults)

    @property
    def num_queued(self) -> int:
        return len(self._jobs)

    # --------------------------------------------------------------------------------------------- what WeightSync uses

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._dead:
                raise RolloutError(f"{self.worker_id} is dead")
            self.calls.append(fn.__name__)
            self._jobs.append((future, fn, args))
            self._run()
        return future

    def on_join(self, callback: Callable[[Any], None]) -> None:
        self._joined.append(callback)

    # ------------------------------------------------------------------------------------------------- what tests do

    def fault_at(self, point: str, fault: "str | Exception", skip: int = 0) -> None:
        with self._lock:
            self._faults.append(_Fault(point, fault, skip))

    def kill(self) -> None:
        """What waits fails, as with a worker's death."""
        with self._lock:
            self._dead, self._stalled = True, False
            jobs, self._jobs = list(self._jobs), deque()
        for future, _, _ in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(RolloutError(f"{self.worker_id} has died"))

    def stall(self) -> None:
        """Nothing runs any more until `resume`."""
        with self._lock:
            self._stalled = True

    def resume(self) -> None:
        """What has waited runs now, in order."""
        with self._lock:
            self._stalled = False
            self._run()

    def revive(self) -> None:
        """A new incarnation, with the weights that it was made with."""
        with self._lock:
            assert self._dead
            self._dead = False
            self._faults.clear()
            self._new_engine()
        for callback in self._joined:
            callback(self)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing runs there inside this block; what is asked for waits."""
        with self._lock:
            yield

    def clear_faults(self) -> None:
        with self._lock:
            self._faults.clear()

    def forget_who_joins(self) -> None:
        """From now on it comes back without telling anybody."""
        self._joined.clear()

    # ------------------------------------------------------------------------------------------------------ inside

    def _new_engine(self) -> None:
        self.engines.append(FakeEngine(self._make_model(), self._strike))

    def _run(self) -> None:
        while self._jobs and not self._stalled and not self._dead:
            future, fn, args = self._jobs.popleft()
            try:
                self._strike(fn.__name__)
            except _Stalled:
                self._jobs.appendleft((future, fn, args))
                return
            except Killed:
                self._jobs.appendleft((future, fn, args))
                self.kill()
                return
            except Exception as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(self.engine, *args)
            except Killed:
                future.set_exception(RolloutError(f"{self.worker_id} has died"))
                self.kill()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _strike(self, point: str) -> None:
        for fault in self._faults:
            if fault.point == point:
                if fault.skip:
                    fault.skip -= 1
                    continue
                self._faults.remove(fault)
                if fault.what == "kill":
                    raise Killed
                if fault.what == "stall":
                    self._stalled = True
                    raise _Stalled
                raise fault.what


class _Stalled(Exception):
    """Before a call: it waits, with all after it."""


@dataclass
class _Fault:
    point: str
    what: Any
    skip: int


def check_fleet(targets: "Sequence[FakeTarget]", published: Mapping[int, float]) -> None:
    """What holds at every moment, whatever happened: an engine that serves has whole weights, those of the version that it
    says it has; versions only grow; and one version is one set of bytes, on whichever engine."""
    known = {0: 0.0, **published}
    for target in targets:
        with target.standing_still():
            _check_target(target, known)


def _check_target(target: FakeTarget, known: dict[int, float]) -> None:
    for engine in target.engines:
        for version, values in engine.served:
            assert len(values) == 1, f"{target.worker_id} served {sorted(values)} as version {version}"
            (value,) = values
            assert known.setdefault(version, value) == value, f"version {version} is {known[version]} and {value}"
        versions = [version for version, _ in engine.served]
        assert versions == sorted(set(versions)), f"versions of {target.worker_id} went {versions}"
    engine = target.engine
    if not target.is_dead and engine.state == EngineState.RUNNING:
        assert marks(engine.model) == {known[engine.version]}, (
            f"{target.worker_id} serves {sorted(marks(engine.model))} as version {engine.version}"
        )


# --------------------------------------------------------------------------------------------------------- the transport


@dataclass(frozen=True)
class MemoryParcel:
    """A bucket's bytes, as they came out at the other end."""

    part: Tensor

    def read(self, into: Tensor) -> None:
        into.copy_(self.part)


Parcels = list[tuple[int, MemoryParcel]]
"""Number and bytes of each bucket, in the order of arrival."""


def corrupt(index: int) -> Callable[[Parcels], Parcels]:
    """One byte of a bucket flips on the way."""

    def change(parcels: Parcels) -> Parcels:
        part = parcels[index][1].part.clone()
        part[0] ^= 1
        return [(number, MemoryParcel(part) if number == index else parcel) for number, parcel in parcels]

    return change


def drop(index: int) -> Callable[[Parcels], Parcels]:
    return lambda parcels: [(number, parcel) for number, parcel in parcels if number != index]


def duplicate(index: int) -> Callable[[Parcels], Parcels]:
    """It comes again, after all others."""
    return lambda parcels: [*parcels, parcels[index]]


def corrupt_duplicate(index: int) -> Callable[[Parcels], Parcels]:
    """It comes again, after all others, with a byte flipped."""
    return lambda parcels: [*parcels, corrupt(index)(parcels)[index]]


def swap(index: int) -> Callable[[Parcels], Parcels]:
    """Two buckets of one size come under each other's number."""

    def change(parcels: Parcels) -> Parcels:
        other = (index + 2) % NUM_BUCKETS  # the ones beside it hold the same bytes
        parts = dict(parcels)
        parts[index], parts[other] = parts[other], parts[index]
        return list(parts.items())

    return change


def reorder(parcels: Parcels) -> Parcels:
    return parcels[::-1]


class Memory:
    """A transport that hands buckets over one by one; `edits` says what happens on the way to a target, once."""

    name = "memory"

    def __init__(self, *, reuse: bool = False) -> None:
        """`reuse`: the next version is written over the one before, so that nothing is kept while it is staged."""
        self._reuse = reuse
        self._runs: dict[Layout, Tensor] = {}
        self.edits: dict[str, Callable[[Parcels], Parcels]] = {}
        self.is_closed = False
        self.num_sends = 0
        self.before_send: Callable[[int], None] | None = None
        self.fail_next_send: Exception | None = None

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        return "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        if not self._reuse or layout not in self._runs or self._runs[layout] is spared:
            self._runs[layout] = empty_run(layout.num_bytes, torch.device("cpu"), zeroed=True)
        return self._runs[layout]

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> "Mapping[str, Future[Any]]":
        self.num_sends += 1
        if self.before_send is not None:
            self.before_send(self.num_sends)
        if self.fail_next_send is not None:
            failure, self.fail_next_send = self.fail_next_send, None
            raise failure
        sent: dict[str, Future[Any]] = {}
        for link in links:
            # cloned: what is on the wire does not change with the sender's memory
            parcels = [(bucket.index, MemoryParcel(part.clone())) for bucket, part in package.layout.parts(run)]
            edit = self.edits.pop(link.name, None)
            calls = [link.call(begin, package)]
            for index, parcel in edit(parcels) if edit is not None else parcels:
                calls.append(link.call(receive, package.ticket, index, parcel))
            sent[link.name] = _all_of(calls)
        return sent

    def close(self) -> None:
        self.is_closed = True


def _all_of(calls: "Sequence[Future[Any]]") -> "Future[Any]":
    """Done when all are; fails as the first of them that failed."""
    whole: Future[Any] = Future()
    lock = threading.Lock()
    left = len(calls)

    def note(_: "Future[Any]") -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        failures = [call.exception() for call in calls if not call.cancelled() and call.exception() is not None]
        if failures:
            whole.set_exception(failures[0])
        else:
            whole.set_result(None)

    for call in calls:
        call.add_done_callback(note)
    return whole


def pause_timed_out() -> PauseTimeoutError:
    return PauseTimeoutError("the pause was not entered within 0.1 s")

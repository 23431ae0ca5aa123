"""The part of a publish that runs where the engine lives, on its control thread, through `target.call`."""

import threading
import weakref
from typing import Literal

import torch
from torch import Tensor

from rollout import EngineState, GenerationEngine, UpdateRecord
from sync.arrival import Arrival, Cargo, DerivedTensors, OpenCargo, Parcel, memory_for
from sync.errors import SyncError, SyncTimeoutError
from sync.manifest import Manifest, held_tensors
from sync.place import Deadline, here
from sync.ticket import Claim, Package, TargetStatus, Ticket, refusal

CommitMode = Literal["copy", "remap"]
"""Copy the staged bytes into the parameters, or re-point the parameters at them."""


# ------------------------------------------------------------------------------------- what a sender calls on a target


def hello(engine: GenerationEngine, claim: Claim | None = None) -> TargetStatus:
    """What this engine holds and where it runs. With a claim, it obeys that sender from now on, unless it obeys a newer
    one or another run: the answer says whom. Safe on any thread."""
    receiver = receiver_of(engine)
    obeyed, version = receiver.obey(engine, claim)
    return TargetStatus(
        manifest=Manifest.of(engine.model),
        version=version,
        is_fenced=engine.state == EngineState.FENCED,
        claim=obeyed,
        place=here(),
        can_remap=engine.can_remap,
        addresses=frozenset((held.tensor.device, held.tensor.data_ptr()) for held in held_tensors(engine.model)),
    )


def accept(engine: GenerationEngine, package: Package, cargo: Cargo) -> None:
    """Stage a whole version in one step."""
    receiver_of(engine).accept(engine, package, cargo)


def begin(engine: GenerationEngine, package: Package) -> bool:
    """Get ready for a version that comes bucket by bucket. False if there is nothing to send: it is here already."""
    return receiver_of(engine).begin(engine, package)


def receive(engine: GenerationEngine, ticket: Ticket, index: int, parcel: Parcel) -> None:
    """Take one bucket, in any order; a second copy of a bucket is verified and harmless."""
    receiver_of(engine).receive(ticket, index, parcel)


def commit(
    engine: GenerationEngine, ticket: Ticket, mode: CommitMode, deadline: Deadline, update_timeout_s: float
) -> UpdateRecord | None:
    """Give the engine the staged weights; None if it had them already.

    Inside the update there are only copies, in place (addresses stay, since captured graphs hold them), or re-pointed
    parameters. A tied tensor is one slot, so it stays tied. The engine waits for the device before it goes on. A commit
    that starts after `deadline` touches nothing, since its sender has reported this target as failed by then.
    """
    return receiver_of(engine).commit(engine, ticket, mode, deadline, update_timeout_s)


def forget(engine: GenerationEngine, claim: Claim | None = None) -> None:
    """Let go of what is staged and not committed, and of the memory kept for the next version; with a claim, unless the
    engine obeys another sender by now."""
    receiver_of(engine).forget(claim)


def add_derived(engine: GenerationEngine, derived: DerivedTensors) -> None:
    """Have something recomputed with every version: `engine.call(add_derived, derived)`."""
    receiver_of(engine).derived.append(derived)


# ----------------------------------------------------------------------------------------------------------- the state


class Receiver:
    """What one engine has been sent. Used on the engine's control thread alone, one call after the other, but for
    `obey`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the two that `obey` reads
        self._claim: Claim | None = None
        self._committing = 0  # the version that a commit in progress may yet give the engine
        self.derived: list[DerivedTensors] = []
        self._committed: Ticket | None = None
        self._staged: Arrival | None = None
        self._own: Tensor | None = None  # kept from one version to the next: fresh pages cost ten times a copy
        self._pointed_into: list[OpenCargo] = []  # where parameters lie: one, and what remaps that broke off add to it

    @property
    def claim(self) -> Claim | None:
        """Of the sender that the engine obeys."""
        return self._claim

    def obey(self, engine: GenerationEngine, claim: Claim | None) -> tuple[Claim | None, int]:
        """Whom this engine obeys from now on, and a version that no sender before that one can exceed any more."""
        with self._lock:
            if claim is not None and (self._claim is None or claim.replaces(self._claim)):
                self._claim = claim
            return self._claim, max(engine.version, self._committing)

    def accept(self, engine: GenerationEngine, package: Package, cargo: Cargo) -> None:
        if not self._admit(engine, package):
            return
        opened = cargo.open(package.layout)
        try:
            opened.verify(package)
        except BaseException:
            opened.close()
            raise
        self._staged = Arrival(package, opened.run, set(), opened)
        self._staged.prepare(self.derived)

    def begin(self, engine: GenerationEngine, package: Package) -> bool:
        if not self._admit(engine, package):
            return False
        layout = package.layout
        if self._own is None or self._own.numel() != layout.num_bytes:
            self._own = None
            self._own = memory_for(layout)
        self._staged = Arrival(package, self._own, {bucket.index for bucket in layout.buckets}, None)
        return True

    def receive(self, ticket: Ticket, index: int, parcel: Parcel) -> None:
        if self._committed == ticket and not self._is_staging(ticket):
            return
        staged = self._expect(ticket)
        staged.receive(index, parcel)
        if not staged.missing:
            staged.prepare(self.derived)

    def commit(
        self, engine: GenerationEngine, ticket: Ticket, mode: CommitMode, deadline: Deadline, update_timeout_s: float
    ) -> UpdateRecord | None:
        if self._committed == ticket and engine.state != EngineState.FENCED:
            return None
        staged = self._expect(ticket)
        if staged.missing:
            raise SyncError(
                f"version {ticket.version} is not complete: {len(staged.missing)} of "
                f"{len(staged.package.layout.buckets)} buckets have not arrived; publish it again"
            )
        if len(staged.prepared) != len(self.derived):
            staged.prepare(self.derived)  # it failed while staging, or there are more of them by now
        limit_s = min(update_timeout_s, deadline.remaining_s())
        if limit_s <= 0:
            raise SyncTimeoutError(f"the commit of version {ticket.version} began after its sender had stopped waiting")
        self._check_claim(ticket, about_to_commit=True)
        replaced: list[Tensor] = []
        try:
            self._update(engine, staged, mode, limit_s, replaced)
        finally:
            self._committing = 0
        replaced.clear()
        self._committed, self._staged = ticket, None
        source = [staged.source] if staged.source is not None else []
        if mode == "remap":
            left, self._pointed_into = self._pointed_into, source
        else:
            left = source
        for opened in left:
            opened.close()
        record = engine.last_update
        assert record is not None
        return record

    def _update(
        self, engine: GenerationEngine, staged: Arrival, mode: CommitMode, limit_s: float, replaced: list[Tensor]
    ) -> None:
        """`replaced` holds what the parameters pointed at: unmapping it takes longer than the pause should."""
        version = staged.package.ticket.version
        tensors = [held.tensor for held in held_tensors(engine.model)]
        views = staged.package.layout.views(staged.run)
        update = (
            engine.update(version, timeout_s=limit_s, remap=True)
            if mode == "remap"
            else engine.update(version, timeout_s=limit_s)
        )
        with update, torch.no_grad():
            staged.is_pointed_into |= mode == "remap"
            for tensor, view in zip(tensors, views, strict=True):
                if mode == "remap" and tensor.is_contiguous():
                    replaced.append(tensor.data)
                    tensor.data = view
                else:
                    tensor.copy_(view)
            for derived, prepared in zip(self.derived, staged.prepared, strict=True):
                derived.install(prepared)

    def forget(self, claim: Claim | None) -> None:
        if claim is not None and claim != self._claim:
            return
        self._drop_staged()
        self._own = None

    def _admit(self, engine: GenerationEngine, package: Package) -> bool:
        """Whether there is anything to stage. SyncError if this sender or version has been overtaken."""
        ticket = package.ticket
        self._check_claim(ticket)
        if ticket == self._committed and engine.state != EngineState.FENCED:
            return False
        # somebody's own update may have broken the engine since: from here it goes on again
        is_repair = ticket == self._committed and ticket.version == engine.version
        if ticket.version <= engine.version and not is_repair:
            raise SyncError(
                f"version {ticket.version} is not newer than the engine's {engine.version}; versions only grow: leave "
                "`version` out for the next one"
            )
        staged = self._staged
        if staged is not None and staged.package.ticket.claim == ticket.claim:
            if ticket.version < staged.package.ticket.version:
                raise SyncError(f"version {ticket.version} was overtaken by {staged.package.ticket.version}")
            if ticket == staged.package.ticket and not staged.missing:
                return False  # verified already; what was committed half can be rolled forward from it
        self._drop_staged()
        return True

    def _check_claim(self, ticket: Ticket, *, about_to_commit: bool = False) -> None:
        with self._lock:
            if self._claim is None or ticket.claim.replaces(self._claim):
                self._claim = ticket.claim
            if self._claim != ticket.claim:
                raise refusal("the engine", self._claim, ticket.claim)
            if about_to_commit:
                self._committing = ticket.version

    def _is_staging(self, ticket: Ticket) -> bool:
        return self._staged is not None and self._staged.package.ticket == ticket

    def _expect(self, ticket: Ticket) -> Arrival:
        staged = self._staged
        if staged is None or staged.package.ticket != ticket:
            there = "nothing" if staged is None else f"version {staged.package.ticket.version}"
            raise SyncError(f"version {ticket.version} is not staged here, {there} is; publish it again")
        return staged

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and staged.source is not None:
            if staged.is_pointed_into:
                # closed, it would be written again under the engine that is fenced on it
                self._pointed_into.append(staged.source)
            else:
                staged.source.close()


def receiver_of(engine: GenerationEngine) -> Receiver:
    """The receiver of an engine, made when it is first asked for; gone with the engine."""
    with _lock:
        return _receivers.setdefault(engine, Receiver())


_lock = threading.Lock()
_receivers: "weakref.WeakKeyDictionary[GenerationEngine, Receiver]" = weakref.WeakKeyDictionary()

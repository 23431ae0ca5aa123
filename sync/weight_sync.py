"""Bring a trainer's new weights into engines that keep generating."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Thread, current_thread
from types import TracebackType
from typing import Literal, Self, overload

import torch

from sync.config import SyncConfig, check_seconds
from sync.delivery import Delivery
from sync.errors import SenderReplacedError, SyncError
from sync.futures import uncancellable
from sync.kept import Kept, Key
from sync.latecomers import Latecomers
from sync.link import Link, Links, Target, TargetGroup
from sync.opening import Opener, Opening, nobody
from sync.place import Deadline, here
from sync.ranks import ranks_of_this_process
from sync.receiver import forget
from sync.report import SyncReport
from sync.routes import Router
from sync.sources.source import Source, WeightSource, as_source, named_tensors
from sync.staging import Staging, fill
from sync.transports.base import Transport
from sync.turns import Turns

FORGET_S = 1.0
"""How long the close of a sender waits until its targets have freed what they keep for its next version."""


class WeightSync:
    """Publishes weights to engines, in this process or others, in three steps.

    *Stage*, while generation goes on: check the source against what the engines hold and copy its tensors aside. From
    then on the trainer may change its weights. *Send*, still beside generation: each engine's process gets the bytes, or
    maps them, and verifies them. *Commit*, on each engine's control thread: pause, copy in place or re-point, move the
    version, go on. Requests in flight stay in flight and span both versions.

        with WeightSync(engine) as weight_sync:
            ...optimizer.step()...
            report = weight_sync.publish(model)

    The staging is kept until the next publish: it costs the memory of one set of weights, in the engines' dtype. A
    worker that comes back as a new incarnation gets the newest version from it.

    In a trainer of several ranks (torch.distributed is initialised) each rank makes a WeightSync and calls `publish`.
    The first rank's targets count; the others take part in gathering, and all return or raise alike.
    """

    def __init__(
        self,
        targets: Target | TargetGroup | Sequence[Target | TargetGroup],
        transport: Transport | None = None,
        config: SyncConfig | None = None,
    ) -> None:
        """`targets`: engines, workers, and controllers, whose workers of the moment count at each publish; on ranks other
        than the first it may be empty and is not used. `transport`: how the bytes travel; None chooses for each target by
        where it is. It is closed with this object."""
        self._config = config if config is not None else SyncConfig()
        self._ranks = ranks_of_this_process()
        targets = list(targets) if isinstance(targets, Sequence) else [targets]
        if self._ranks.leads and not targets:
            raise SyncError("targets must hold at least one engine, got none")
        self._router = Router(transport, self._config.bucket_bytes)
        self._kept = Kept()
        self._turns = Turns()
        self._committing_thread: Thread | None = None
        self._committer = ThreadPoolExecutor(1, "weight-sync", initializer=self._note_committing_thread)
        self._fencer = ThreadPoolExecutor(8, "weight-sync-fence")  # each may take as long as its target's own limit
        self._closed = False
        self._links = Links(targets if self._ranks.leads else [])
        self._opener = Opener(self._links, self._router, self._config)
        self._latecomers = Latecomers(self._links, self._opener, self._router, self._kept, self._turns, self._config)
        # last: a target that needs weights now asks for them at once, on a thread of its own
        self._links.listen(self._latecomers.bring_up)

    @overload
    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: Literal[True] = True
    ) -> SyncReport: ...

    @overload
    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: Literal[False]
    ) -> Future[SyncReport]: ...

    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: bool = True
    ) -> SyncReport | Future[SyncReport]:
        """Give every engine the weights of `source` as `version`; None: one above every version that an engine holds or
        waits for, that this sender has staged, whatever became of it, or that the run of a controller has published before.

        `wait=False` returns once the source is staged, with a future of the report; it can be cancelled before its delivery
        has begun, in a trainer of several ranks not at all. `timeout_s` bounds the whole: the turn, staging, sending, and the
        commits; a source's own gathering is bounded between two tensors only. A publish overtakes one before it that is still
        on its way: targets that have not taken that one get this one only, or that one after all if this one fails before it
        is staged.

        The same version again with equal bytes reaches the engines that missed it, lifts the fence of one whose update broke
        off since, and is harmless for the others.

        Raises, with every engine unchanged: ManifestError if source and engine do not hold the same tensors; SyncError
        for a version that is not new, for the newest one with other bytes, for an engine that shares its Parameters with
        the source, for a target of another run, and in a trainer that a newer one has replaced; SyncTimeoutError.
        Raises SyncError or SyncTimeoutError, from the cause, if no engine took the version; the future carries that error
        when `wait=False`. If only some failed, the report names them. An engine that failed in the middle of its copies is
        fenced until a later publish succeeds.
        """
        check_seconds("timeout_s", timeout_s)
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise SyncError(f"version must be an integer, or None for the next one, got {version!r}")
        for link in self._links:
            if link.is_inside_update():
                raise SyncError(
                    f"publish() inside {link.name}'s update() would wait for itself; publish after the block"
                )
            if wait and link.is_on_its_thread():
                raise SyncError(
                    f"publish() on the control thread of {link.name} would wait for itself; call it on another thread, or "
                    "pass wait=False"
                )
        if wait and self._is_delivering():
            raise SyncError(
                "publish() in the callback of a publish's future would wait for itself; pass wait=False there"
            )
        deadline = Deadline.after(timeout_s)
        self._latecomers.note_limit(timeout_s)
        try:
            future = self._begin(source, version, deadline, timeout_s)
        except BaseException:
            self._latecomers.bring_up_overtaken()
            raise
        if wait:
            return future.result()
        # taken back on one rank, the others would wait for its word, and hear the next one in its place
        return future if self._ranks.is_alone else uncancellable(future)

    def close(self, *, timeout_s: float = 120.0) -> None:
        """Wait for a publish under way and free the staging, here and at the targets. Closing twice is harmless. Raises
        SyncTimeoutError."""
        check_seconds("timeout_s", timeout_s)
        self._turns.take(timeout_s, f"closing waited for a publish to {self._names()}, which")
        try:
            if not self._closed:
                self._closed = True
                self._latecomers.close()
                self._kept.clear()
                self._turns.close()
                self._router.close()
        finally:
            self._turns.give_back()
        for link in self._links:
            link.ignore()
        if (claim := self._opener.claim) is not None:
            # one that is stopped forgets when it goes on
            wait_for([link.call(forget, claim) for link in self._links], timeout=FORGET_S)
        self._committer.shutdown(wait=not self._is_delivering())
        self._fencer.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _note_committing_thread(self) -> None:
        self._committing_thread = current_thread()

    def _is_delivering(self) -> bool:
        """Whether the caller is on the thread that commits, in the callback of a future."""
        return current_thread() is self._committing_thread

    def _names(self) -> str:
        return ", ".join(link.name for link in self._links)

    # --------------------------------------------------------------------------------------------- stage and deliver

    def _begin(self, source: Source, version: int | None, deadline: Deadline, timeout_s: float) -> Future[SyncReport]:
        """In its turn: stage, and have it delivered."""
        self._turns.overtake(timeout_s, f"waiting for the publish before this one to {self._names()}")
        with ExitStack() as unless_delivering:
            unless_delivering.callback(self._turns.give_back)
            try:
                staged = self._stage(source, version, deadline, timeout_s)
            except SenderReplacedError:
                self._kept.clear()
                raise
            future = self._committer.submit(self._ranks.share, partial(self._deliver, staged), deadline)
            unless_delivering.pop_all()
            # also when the caller cancels the future before the delivery begins
            turns = self._turns  # not `self`: somebody may keep the future
            future.add_done_callback(lambda _: turns.give_back())
        return future

    def _stage(self, source: Source, version: int | None, deadline: Deadline, timeout_s: float) -> "_Staged | None":
        """None on a rank that does not lead."""
        began = time.perf_counter()
        opening: Opening | None = None
        stagings: dict[Key, Staging] = {}
        with self._ranks.together("the opening", deadline):
            if self._closed:
                raise SyncError("this WeightSync is closed; make a new one")
            offer = as_source(source)
            specs = offer.specs() if isinstance(offer, WeightSource) else None
            if self._ranks.leads:
                self._links.refresh()
                opening = self._opener.open(version, self._kept.version, deadline)
                if specs is not None:
                    for route in opening.routes:
                        route.layout.manifest.check(specs)
        # A step of its own: where there is no room, the other ranks must not be in a gather already, waiting for this one.
        with self._ranks.together("making room for the staging", deadline):
            if opening is not None:
                stagings = self._kept.stagings(opening.routes, opening.again, spare=self._latecomers.has_overtaken())
        with self._ranks.together("staging", deadline):
            tensors = offer.tensors() if isinstance(offer, WeightSource) else offer
            if opening is None:
                for _ in named_tensors(tensors):
                    pass  # a rank takes part in every gather
            else:
                fill(
                    list(stagings.values()),
                    named_tensors(tensors),
                    in_use=self._addresses(),
                    # the other ranks are in the gathers to come, and would wait there for this one
                    to_the_end=not self._ranks.is_alone,
                    deadline=deadline,
                    limit=f"staging version {opening.version} took longer than {timeout_s:g} s",
                )
                # before it is what late targets get: a sender that has been replaced must not keep it
                self._opener.remember(opening)
                self._kept.seal(stagings, opening.claim, opening.version)
                self._opener.spend(opening.version)
                self._latecomers.forget_overtaken()
        if opening is None:
            return None
        shipments = []
        for route in opening.routes:
            behind = [link for link in route.links if not opening.again or _lacks(link, opening.version)]
            shipment = self._kept.shipment(route, behind)
            assert shipment is not None
            shipments.append(shipment)
        delivery = Delivery(
            shipments,
            deadline,
            version=opening.version,
            timeout_s=timeout_s,
            update_timeout_s=self._config.update_timeout_s,
        )
        largest = max(stagings.values(), key=lambda staging: staging.num_bytes)
        return _Staged(
            delivery=self._turns.delivers(delivery),
            opening=opening,
            num_bytes=largest.num_bytes,
            num_tensors=largest.num_tensors,
            stage_s=time.perf_counter() - began,
            staged_at=time.perf_counter(),
        )

    def _addresses(self) -> set[tuple[torch.device, int]]:
        """Where the tensors of this process's engines lie, also of those behind a controller."""
        statuses = [link.status for link in self._links if link.status is not None]
        return {address for status in statuses if status.place == here() for address in status.addresses}

    def _deliver(self, staged: "_Staged | None") -> SyncReport:
        assert staged is not None  # only the leading rank delivers
        outcome = staged.delivery.run()
        version = staged.opening.version
        failures = {**staged.opening.failures, **outcome.failures}
        if any(isinstance(failure, SenderReplacedError) for failure in failures.values()):
            self._kept.clear()  # a target that comes back is its successor's
        for link in self._links:
            if link.name in failures:
                self._fencer.submit(link.fence, version)
        self._latecomers.note_overtaken(outcome.overtaken)
        self._latecomers.bring_up_overtaken()
        if len(failures) == len(self._links):
            raise nobody(f"took version {version}", failures)
        records = [record for record in outcome.records.values() if record is not None]
        return SyncReport(
            version=version,
            num_bytes=staged.num_bytes,
            num_tensors=staged.num_tensors,
            stage_s=staged.stage_s,
            send_s=outcome.sent_at - staged.staged_at,
            pause_wait_s=max((record.wait_s for record in records), default=0.0),
            commit_s=max((record.held_s for record in records), default=0.0),
            straddlers=sum(record.straddlers for record in records),
            fenced=tuple(failures),
            failures={name: str(failure) for name, failure in failures.items()},
            overtaken=outcome.overtaken,
            transport="+".join(sorted({route.transport.name for route in staged.opening.routes})),
        )


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """One complete version, ready to be sent."""

    delivery: Delivery
    opening: Opening
    num_bytes: int
    num_tensors: int
    stage_s: float
    staged_at: float


def _lacks(link: Link, version: int) -> bool:
    assert link.status is not None
    return link.status.version < version or link.status.is_fenced

"""Bring a trainer's new weights into engines that keep generating."""

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Literal, Self, overload

import torch
from torch import Tensor

from rollout import GenerationEngine
from sync.config import SyncConfig, check_seconds
from sync.delivery import Delivery, Outcome, Shipment
from sync.errors import SyncError, SyncTimeoutError
from sync.layout import Layout, seal
from sync.link import JoiningTarget, Link, Target
from sync.manifest import held_tensors
from sync.place import Deadline
from sync.report import SyncReport
from sync.routes import Route, Router
from sync.run_record import RunRecord, next_claim
from sync.source import Source, WeightSource, as_source, named_tensors
from sync.staging import Staging
from sync.ticket import Claim, Package, Ticket
from sync.transports.base import Transport

logger = logging.getLogger(__name__)


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
    """

    def __init__(
        self,
        targets: Target | Sequence[Target],
        transport: Transport | None = None,
        config: SyncConfig | None = None,
    ) -> None:
        """`transport`: how the bytes travel; None chooses for each target by where it is. It is closed with this object."""
        targets = list(targets) if isinstance(targets, Sequence) else [targets]
        if not targets:
            raise SyncError("targets must hold at least one engine, got none")
        self._config = config if config is not None else SyncConfig()
        self._links = [Link(_name_of(target, index), target) for index, target in enumerate(targets)]
        self._router = Router(transport, self._config.bucket_bytes)
        self._turn = Lock()  # held from the start of a stage until its delivery has ended: both use the staging
        self._delivery: Delivery | None = None
        self._kept: dict[tuple[int, Layout], _Kept] = {}
        self._kept_version: int | None = None
        self._last_seals: dict[tuple[int, Layout], str] = {}
        self._spent_version = 0  # sent to a target whose answer is not known: never used for other bytes
        self._claim: Claim | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")
        self._joiner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync-join")
        self._closed = False
        for link in self._links:
            if isinstance(link.target, JoiningTarget):
                link.target.on_join(partial(self._bring_up_later, link))

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
        """Give every engine the weights of `source` as `version`; None: one above the newest that any engine holds.

        `wait=False` returns once the source is staged, with a future of the report. `timeout_s` bounds the whole: the
        turn, staging, sending, and the commits; a source's own gathering is bounded between two tensors only. A publish
        overtakes one before it that is still on its way: targets that have not taken that one get this one only.

        The same version again with equal bytes reaches the engines that missed it and is harmless for the others.

        Raises, with every engine unchanged: ManifestError if source and engine do not hold the same tensors; SyncError
        for a version that is not new, for a version published before with other bytes, for an engine that shares its
        Parameters with the source, for a target of another run, and in a trainer that a newer one has replaced;
        SyncTimeoutError. Raises SyncError or SyncTimeoutError, from the cause, if no engine took the version; the future
        carries that error when `wait=False`. If only some failed, the report names them. An engine that failed in the
        middle of its copies is fenced until a later publish succeeds.
        """
        check_seconds("timeout_s", timeout_s)
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise SyncError(f"version must be an integer, or None for the next one, got {version!r}")
        for link in self._links:
            if link.is_inside_update():
                raise SyncError(
                    f"publish() inside {link.name}'s update() would wait for itself; publish after the block"
                )
        deadline = Deadline.after(timeout_s)
        self._overtake()
        self._take_turn(timeout_s, "waiting for the publish before this one to")
        with ExitStack() as unless_delivering:
            unless_delivering.callback(self._turn.release)
            if self._closed:
                raise SyncError("this WeightSync is closed; make a new one")
            staged = self._stage(source, version, deadline, timeout_s)
            self._delivery = Delivery(
                staged.shipments,
                deadline,
                timeout_s=timeout_s,
                update_timeout_s=self._config.update_timeout_s,
                version=staged.version,
            )
            future = self._committer.submit(self._deliver, staged, self._delivery)
            unless_delivering.pop_all()
            # also when the caller cancels the future before the delivery begins
            future.add_done_callback(lambda _: self._turn.release())
        return future.result() if wait else future

    def close(self, *, timeout_s: float = 120.0) -> None:
        """Wait for a publish under way and free the staging. Closing twice is harmless. Raises SyncTimeoutError."""
        check_seconds("timeout_s", timeout_s)
        self._take_turn(timeout_s, "closing waited for a publish to")
        try:
            if not self._closed:
                self._closed = True
                self._kept.clear()
                self._router.close()
        finally:
            self._turn.release()
        self._committer.shutdown()
        self._joiner.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- turns

    def _take_turn(self, timeout_s: float, what: str) -> None:
        if not self._turn.acquire(timeout=timeout_s):
            names = ", ".join(link.name for link in self._links)
            raise SyncTimeoutError(f"{what} {names} took longer than {timeout_s:g} s")

    def _overtake(self) -> None:
        delivery = self._delivery
        if delivery is not None:
            delivery.overtake()

    # --------------------------------------------------------------------------------------------------------- stage

    def _stage(self, source: Source, version: int | None, deadline: Deadline, timeout_s: float) -> "_Staged":
        began = time.perf_counter()
        failures = self._open(deadline, timeout_s)
        links = [link for link in self._links if link.status is not None]
        version, again = self._choose_version(version, links)
        claim = self._claim_run(links)
        routes = self._router.routes(links)
        offer = as_source(source)
        if isinstance(offer, WeightSource):
            specs = offer.specs()
            for route in routes:
                route.layout.manifest.check(specs)
            offer = offer.tensors()
        stagings = self._stagings(routes, again)
        self._fill(list(stagings.values()), offer, version, deadline, timeout_s)
        self._seal(stagings, claim, version)
        self._remember(claim, version)
        largest = max(stagings.values(), key=lambda staging: staging.num_bytes)
        return _Staged(
            version=version,
            shipments=self._shipments(routes, again),
            failures=failures,
            num_bytes=largest.num_bytes,
            num_tensors=largest.num_tensors,
            stage_s=time.perf_counter() - began,
            staged_at=time.perf_counter(),
            transport="+".join(sorted({route.transport.name for route in routes})),
        )

    def _stagings(self, routes: Sequence[Route], again: bool) -> dict[tuple[int, Layout], Staging]:
        """Where each route's tensors are put: beside what is kept, or for the same version once more in its place."""
        stagings: dict[tuple[int, Layout], Staging] = {}
        for route in routes:
            kept = self._kept.get(_key(route)) if again else None
            stagings[_key(route)] = kept.staging if kept is not None else _staging_for(route)
        if not again:
            written = {id(staging.run) for staging in stagings.values()}
            self._kept = {key: kept for key, kept in self._kept.items() if id(kept.staging.run) not in written}
            if not self._kept:
                self._kept_version = None
        return stagings

    def _seal(self, stagings: Mapping[tuple[int, Layout], Staging], claim: Claim, version: int) -> None:
        """From here on these are the newest weights, and what was kept before may go."""
        before, self._kept, self._kept_version = self._kept, {}, version
        for key, staging in stagings.items():
            kept = before.get(key)
            if kept is not None and kept.staging is staging:
                self._kept[key] = kept
                continue
            self._kept[key] = _Kept(staging, _package(staging, claim, version))
            if self._last_seals.get(key) == self._kept[key].package.ticket.seal:
                logger.warning(
                    "version %d has the very bytes of the one before it: was the right model published, and did the "
                    "optimizer step?",
                    version,
                )
        self._last_seals = {key: kept.package.ticket.seal for key, kept in self._kept.items()}

    def _open(self, deadline: Deadline, timeout_s: float) -> dict[str, BaseException]:
        """Ask every target what it holds. Those that fail now are left out; one that is merely late is not, if it has
        answered before. Raises SyncError if nobody is left."""
        asked = {link: link.ask() for link in self._links}
        wait_for(asked.values(), timeout=min(self._config.open_timeout_s, deadline.remaining_s()))
        failures: dict[str, BaseException] = {}
        for link, answer in asked.items():
            if not answer.done():
                if link.status is None:
                    failures[link.name] = SyncTimeoutError("it did not say in time what it holds")
            elif answer.cancelled():
                link.status, failures[link.name] = None, SyncError("the engine was stopped")
            elif (cause := answer.exception()) is not None:
                link.status, failures[link.name] = None, cause
            else:
                link.status = answer.result()
        for name, failure in failures.items():
            logger.warning("%s does not answer: %s", name, failure)
        if len(failures) == len(self._links):
            raise _nobody("answered", failures)
        return failures

    def _choose_version(self, version: int | None, links: Sequence[Link]) -> tuple[int, bool]:
        """The version to publish, and whether it is the one that is staged already."""
        newest = max(link.status.version for link in links if link.status is not None)
        newest = max(newest, self._spent_version)
        if self._claim is None and (saved := self._saved()) is not None:
            newest = max(newest, saved.version)
        if version is None:
            return newest + 1, False
        again = version == self._kept_version
        if version <= newest and not again:
            raise SyncError(
                f"version must be greater than {newest}, which an engine holds, got {version}; leave it out for the "
                "next one"
            )
        return version, again

    def _saved(self) -> RunRecord | None:
        folder = self._config.run_folder
        return RunRecord.load(folder) if folder is not None else None

    def _claim_run(self, links: Sequence[Link]) -> Claim:
        statuses = [link.status for link in links if link.status is not None]
        if self._claim is None:
            self._claim = next_claim(self._config.run_id, self._saved(), statuses)
        for link in links:
            theirs = link.status.claim if link.status is not None else None
            if theirs is not None and theirs.run_id == self._claim.run_id and theirs.epoch > self._claim.epoch:
                raise SyncError(
                    f"{link.name} obeys a newer trainer (epoch {theirs.epoch} of run {theirs.run_id!r}, this one has "
                    f"{self._claim.epoch}); stop this trainer, or make a new WeightSync if it is the one that should go on"
                )
        return self._claim

    def _remember(self, claim: Claim, version: int) -> None:
        """Before anything is sent: a trainer that dies now has a successor that goes on above this version."""
        if self._config.run_folder is not None:
            RunRecord(run_id=claim.run_id, epoch=claim.epoch, version=version).save(self._config.run_folder)

    def _fill(
        self,
        stagings: Sequence[Staging],
        offer: Iterable[tuple[str, Tensor]],
        version: int,
        deadline: Deadline,
        timeout_s: float,
    ) -> None:
        """Put all that is offered into each staging."""
        addresses = self._addresses()
        for name, tensor in named_tensors(offer):
            if (tensor.device, tensor.data_ptr()) in addresses and tensor.numel():
                raise SyncError(
                    f"an engine runs on the very tensor that the source offers as {name}, so there is nothing to "
                    "publish; change it in place instead: `with engine.update(): optimizer.step()`, or give the engine "
                    "weights of its own with copy_weights=True"
                )
            if deadline.remaining_s() == 0:
                raise SyncTimeoutError(f"staging version {version} took longer than {timeout_s:g} s, at {name}")
            for staging in stagings:
                staging.put(name, tensor)
        for staging in stagings:
            staging.seal()

    def _addresses(self) -> set[tuple[torch.device, int]]:
        """Where the tensors of this process's engines lie."""
        return {
            (held.tensor.device, held.tensor.data_ptr())
            for link in self._links
            if isinstance(link.target, GenerationEngine)
            for held in held_tensors(link.target.model)
        }

    def _shipments(self, routes: Sequence[Route], again: bool) -> list[Shipment]:
        shipments = []
        for route in routes:
            kept = self._kept[_key(route)]
            version = kept.package.ticket.version
            behind = [link for link in route.links if not again or _lacks(link, version)]
            shipments.append(Shipment(kept.package, kept.staging.run, route.transport, behind))
        return shipments

    # ------------------------------------------------------------------------------------------------------- deliver

    def _deliver(self, staged: "_Staged", delivery: Delivery) -> SyncReport:
        outcome = delivery.run()
        if not outcome.is_certain:
            self._spent_version = max(self._spent_version, staged.version)
        failures = {**staged.failures, **outcome.failures}
        if len(failures) == len(self._links):
            raise _nobody(f"took version {staged.version}", failures)
        records = [record for record in outcome.records.values() if record is not None]
        return SyncReport(
            version=staged.version,
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
            transport=staged.transport,
        )

    # ---------------------------------------------------------------------------------------------------------- join

    def _bring_up_later(self, link: Link, _: Target) -> None:
        if not self._closed:
            self._joiner.submit(self._bring_up, link)

    def _bring_up(self, link: Link) -> None:
        """Give a new incarnation the version that the others have; it serves nothing before."""
        timeout_s = self._config.open_timeout_s + self._config.update_timeout_s
        deadline = Deadline.after(timeout_s)
        try:
            self._take_turn(timeout_s, "bringing up a new incarnation waited for a publish to")
        except SyncTimeoutError as error:
            logger.warning("%s is not brought up before the next publish: %s", link.name, error)
            return
        try:
            outcome = self._bring_up_in_turn(link, deadline, timeout_s)
        except Exception as error:  # on a thread of ours: the log is all there is
            logger.warning("%s is not brought up before the next publish: %s", link.name, error)
            return
        finally:
            self._turn.release()
        if outcome is not None and link.name in outcome.records:
            logger.info("%s has come back and holds version %d", link.name, self._kept_version)

    def _bring_up_in_turn(self, link: Link, deadline: Deadline, timeout_s: float) -> Outcome | None:
        if self._closed or self._kept_version is None:
            return None
        link.status = link.ask().result(self._config.open_timeout_s)
        (route,) = self._router.routes([link])
        kept = self._kept.get(_key(route))
        if kept is None:
            raise SyncError("it holds other tensors than the targets of the last publish")
        shipment = Shipment(kept.package, kept.staging.run, route.transport, [link])
        delivery = Delivery(
            [shipment],
            deadline,
            timeout_s=timeout_s,
            update_timeout_s=self._config.update_timeout_s,
            version=kept.package.ticket.version,
        )
        self._delivery = delivery
        return delivery.run()


@dataclass(frozen=True)
class _Kept:
    """The newest sealed version in one layout, for stragglers and joiners."""

    staging: Staging
    package: Package


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """One complete version, and the targets that lack it."""

    version: int
    shipments: Sequence[Shipment]
    failures: dict[str, BaseException]
    num_bytes: int
    num_tensors: int
    stage_s: float
    staged_at: float
    transport: str


def _name_of(target: Target, index: int) -> str:
    return str(getattr(target, "worker_id", f"engine[{index}]"))


def _key(route: Route) -> tuple[int, Layout]:
    return id(route.transport), route.layout


def _staging_for(route: Route) -> Staging:
    return Staging(route.layout, route.transport.run(route.layout))


def _package(staging: Staging, claim: Claim, version: int) -> Package:
    digests = staging.layout.digests(staging.run) if staging.run.device.type == "cpu" else None
    name = seal(digests) if digests is not None else uuid.uuid4().hex
    return Package(ticket=Ticket(claim=claim, version=version, seal=name), layout=staging.layout, digests=digests)


def _lacks(link: Link, version: int) -> bool:
    assert link.status is not None
    return link.status.version < version or link.status.is_fenced


def _nobody(did: str, failures: dict[str, BaseException]) -> SyncError:
    first = next(iter(failures.values()))
    kind = SyncTimeoutError if isinstance(first, TimeoutError) else SyncError
    error = kind(f"no engine {did}: " + "; ".join(f"{name}: {cause}" for name, cause in failures.items()))
    error.__cause__ = first
    return error

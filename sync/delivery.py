"""One sealed version on its way to the targets that lack it."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout import RolloutError, UpdateRecord
from sync.errors import SyncError, SyncTimeoutError
from sync.futures import failed
from sync.link import Link
from sync.place import ANSWER_GRACE_S, Deadline
from sync.receiver import commit
from sync.ticket import Package
from sync.transports.base import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shipment:
    """A sealed version in one layout, and who shall have it."""

    package: Package
    run: Tensor
    transport: Transport
    links: Sequence[Link]


@dataclass
class Outcome:
    """What became of each target, by name."""

    records: dict[str, UpdateRecord | None] = field(default_factory=dict)
    """None for one that had the version already."""
    failures: dict[str, BaseException] = field(default_factory=dict)
    overtaken: tuple[str, ...] = ()
    sent_at: float = 0.0
    """In `time.perf_counter` seconds, when the last target had its bytes."""


class Delivery:
    """Sends and commits. A target's commit is queued behind its own bytes: it waits for no other target's.

    `overtake`, from any thread, ends the waiting: a newer version is on its way.
    """

    def __init__(
        self,
        shipments: Sequence[Shipment],
        deadline: Deadline,
        *,
        version: int,
        timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        self._version = version
        self._shipments = shipments
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s
        self._wake = threading.Event()
        self._is_overtaken = False

    def overtake(self) -> None:
        self._is_overtaken = True
        self._wake.set()

    def run(self) -> Outcome:
        outcome = Outcome()
        sent: dict[str, Future[None]] = {}
        commits: dict[str, Future[UpdateRecord | None]] = {}
        for shipment in self._shipments:
            if not self._is_overtaken:
                sent.update(self._send(shipment))
                # Who was given up for being late may be stopped, and would be waited for until the publish's limit.
                able = [link for link in shipment.links if not _is_late(sent[link.name])]
                commits.update(self._commit(shipment, able))
        self._note_sent(sent.values(), outcome)
        self._wait(commits.values())
        again = self._roll_forward(commits)
        self._wait(again.values())
        commits.update(again)
        overtaken = []
        for name in (link.name for shipment in self._shipments for link in shipment.links):
            call = commits.get(name)
            if name in sent and call is None:
                failure = _failure_of(sent[name])
                assert failure is not None
                outcome.failures[name] = failure
            elif call is None or (not call.done() and self._is_overtaken):
                overtaken.append(name)
                if call is not None:
                    call.cancel()
            elif not call.done():
                call.cancel()
                outcome.failures[name] = SyncTimeoutError(
                    f"its commit of version {self._version} exceeded {self._timeout_s:g} s"
                )
            elif (cause := _failure_of(call)) is not None:
                # why nothing was staged says more than that nothing was
                outcome.failures[name] = _failure_of(sent[name]) or cause if sent[name].done() else cause
            else:
                outcome.records[name] = call.result()
        outcome.overtaken = tuple(overtaken)
        for name, failure in outcome.failures.items():
            # as text: a handler that keeps its records would keep the failure's frames, and the staging with them
            logger.warning("%s did not take version %d: %s", name, self._version, str(failure))
        return outcome

    def _send(self, shipment: Shipment) -> "Mapping[str, Future[Any]]":
        """When each target has the bytes, by name."""
        try:
            return shipment.transport.send(shipment.package, shipment.run, shipment.links, self._deadline)
        except Exception as error:  # it costs this version these targets, not the others behind other transports
            return dict.fromkeys((link.name for link in shipment.links), failed(error))

    @staticmethod
    def _note_sent(sent: "Iterable[Future[None]]", outcome: Outcome) -> None:
        outcome.sent_at = time.perf_counter()

        def note(_: "Future[None]") -> None:
            outcome.sent_at = time.perf_counter()

        for call in sent:
            if not call.done():
                call.add_done_callback(note)

    def _commit(self, shipment: Shipment, links: Iterable[Link]) -> "dict[str, Future[UpdateRecord | None]]":
        calls: dict[str, Future[UpdateRecord | None]] = {}
        for link in links:
            assert link.status is not None
            mode = shipment.transport.commit_mode(link.status)
            calls[link.name] = link.call_update(
                commit, shipment.package.ticket, mode, self._deadline, self._update_timeout_s
            )
        return calls

    def _roll_forward(
        self, commits: "Mapping[str, Future[UpdateRecord | None]]"
    ) -> "dict[str, Future[UpdateRecord | None]]":
        """Once more where the copies broke off half-way: the verified bytes are still there, and nothing else ends the
        fence."""
        calls: dict[str, Future[UpdateRecord | None]] = {}
        for shipment in self._shipments:
            broken = [link for link in shipment.links if link.name in commits and _broke_off(commits[link.name])]
            calls.update(self._commit(shipment, broken))
        return calls

    def _wait(self, calls: "Iterable[Future[UpdateRecord | None]]") -> None:
        pending = list(calls)
        wake = self._wake
        for call in pending:
            # not `self`: a future that somebody keeps would keep the staging, too
            call.add_done_callback(lambda _: wake.set())
        until = time.monotonic() + self._deadline.remaining_s() + ANSWER_GRACE_S
        while (pending := [call for call in pending if not call.done()]) and not self._is_overtaken:
            if not self._wake.wait(max(0.0, until - time.monotonic())):
                return
            self._wake.clear()


def _broke_off(call: "Future[UpdateRecord | None]") -> bool:
    if not call.done() or call.cancelled():
        return False
    return isinstance(call.exception(), Exception) and not isinstance(
        call.exception(), (SyncError, RolloutError, TimeoutError)
    )


def _is_late(call: "Future[Any]") -> bool:
    return call.done() and isinstance(_failure_of(call), TimeoutError)


def _failure_of(call: "Future[Any]") -> BaseException | None:
    if call.cancelled():
        return SyncError("the engine stopped before it came to the commit")
    return call.exception()

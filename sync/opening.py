"""The first step of a publish: what do the targets hold, and may this sender give them that version?"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from sync.config import SyncConfig
from sync.errors import SyncError, SyncTimeoutError
from sync.link import Link
from sync.place import Deadline
from sync.routes import Route, Router
from sync.run_record import RunRecord, next_claim
from sync.ticket import Claim

logger = logging.getLogger(__name__)

KNOWN_TARGET_S = 1.0
"""What a target that has answered before may take: one that hangs must not cost every publish the whole limit."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A publish that may begin. No byte has moved."""

    version: int
    again: bool
    """Whether it is the version that is staged already."""
    claim: Claim
    routes: Sequence[Route]
    failures: Mapping[str, BaseException]
    """Targets that are left out, by name."""


class Opener:
    """Asks, and remembers what must not be used twice: the sender's claim, and version numbers that were sent."""

    def __init__(self, links: Sequence[Link], router: Router, config: SyncConfig) -> None:
        self._links = links
        self._router = router
        self._config = config
        self._claim: Claim | None = None
        self._spent_version = 0

    def spend(self, version: int) -> None:
        """This version was sent to a target whose answer is not known: it is never used for other bytes."""
        self._spent_version = max(self._spent_version, version)

    def open(self, version: int | None, staged_version: int | None, deadline: Deadline) -> Opening:
        """Raises SyncError if no target answers, for a version that is not new (or None: the next one), for a target
        of another run or newer trainer, and for one that the transport cannot reach."""
        failures = self._ask(deadline)
        links = [link for link in self._links if link.status is not None]
        claim = self._claim_run(links)
        newest = max(link.status.version for link in links if link.status is not None)
        newest = max(newest, self._spent_version)
        if version is None:
            version, again = newest + 1, False
        else:
            again = version == staged_version
            if version <= newest and not again:
                raise SyncError(
                    f"version must be greater than {newest}, which an engine holds, got {version}; leave it out for the "
                    "next one"
                )
        return Opening(version=version, again=again, claim=claim, routes=self._router.routes(links), failures=failures)

    def remember(self, opening: Opening) -> None:
        """Before anything is sent: a trainer that dies now has a successor that goes on above this version."""
        if self._config.run_folder is not None:
            claim = opening.claim
            RunRecord(run_id=claim.run_id, epoch=claim.epoch, version=opening.version).save(self._config.run_folder)

    def _ask(self, deadline: Deadline) -> dict[str, BaseException]:
        """Ask every target what it holds. Those that fail now are left out; one that is merely late is not, if it has
        answered before."""
        asked = {link: link.ask() for link in self._links}
        wait_for(asked.values(), timeout=min(KNOWN_TARGET_S, deadline.remaining_s()))
        strangers = [answer for link, answer in asked.items() if link.status is None]
        wait_for(strangers, timeout=min(self._config.open_timeout_s, deadline.remaining_s()))
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
            raise nobody("answered", failures)
        return failures

    def _claim_run(self, links: Sequence[Link]) -> Claim:
        statuses = [link.status for link in links if link.status is not None]
        if self._claim is None:
            folder = self._config.run_folder
            saved = RunRecord.load(folder) if folder is not None else None
            self._claim = next_claim(self._config.run_id, saved, statuses)
            if saved is not None:
                self.spend(saved.version)
        for link in links:
            theirs = link.status.claim if link.status is not None else None
            if theirs is not None and theirs.run_id == self._claim.run_id and theirs.epoch > self._claim.epoch:
                raise SyncError(
                    f"{link.name} obeys a newer trainer (epoch {theirs.epoch} of run {theirs.run_id!r}, this one has "
                    f"{self._claim.epoch}); stop this trainer, or make a new WeightSync if it is the one that should go on"
                )
        return self._claim


def nobody(did: str, failures: Mapping[str, BaseException]) -> SyncError:
    """The error of a publish that no target has `did`; its cause is the first target's."""
    first = next(iter(failures.values()))
    kind = SyncTimeoutError if isinstance(first, TimeoutError) else SyncError
    error = kind(f"no engine {did}: " + "; ".join(f"{name}: {cause}" for name, cause in failures.items()))
    error.__cause__ = first
    return error

"""The first step of a publish: what do the targets hold, and may this sender give them that version?"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from sync.config import SyncConfig
from sync.errors import SenderReplacedError, SyncError, SyncTimeoutError
from sync.link import Links
from sync.place import Deadline
from sync.routes import Route, Router
from sync.run_record import RunRecord, next_claim
from sync.ticket import Claim, refusal

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

    def __init__(self, links: Links, router: Router, config: SyncConfig) -> None:
        self._links = links
        self._router = router
        self._config = config
        self._claim: Claim | None = None
        self._newest = 0

    @property
    def claim(self) -> Claim | None:
        """Of this sender; None before its first publish."""
        return self._claim

    def spend(self, version: int) -> None:
        """Never use this version, or one before it, for other bytes: an engine holds it, or it was staged, so that an engine
        may have taken it, or take it yet, or wait for it."""
        self._newest = max(self._newest, version)

    def open(self, version: int | None, staged_version: int | None, deadline: Deadline) -> Opening:
        """`version` None: the next one. Raises SyncError if no target answers, for a version that is not new, for a target
        of another run or newer trainer, and for one that the transport cannot reach."""
        failures = self._ask(deadline, self._claim)
        if self._claim is None:
            # Asked again, as the sender that this makes it: what its predecessor has not committed by then is refused, so
            # that the next version is this one's at every target.
            self._claim = self._make_claim()
            failures = self._ask(deadline, self._claim)
        claim = self._claim
        links = [link for link in self._links if link.status is not None]
        for link in links:
            obeyed = link.status.claim if link.status is not None else None
            if obeyed is not None and obeyed != claim and not claim.replaces(obeyed):
                raise refusal(link.name, obeyed, claim)
        self._spend_what_is_known()
        again = version is not None and version == staged_version
        if version is None:
            version = max(self._newest, *(link.serves_from for link in self._links)) + 1
        elif version <= self._newest and not again:
            raise SyncError(
                f"version must be at least {self._newest + 1}, got {version}: what is below was published or staged before, or "
                "an engine waits for that one; leave it out for the next one"
            )
        return Opening(version=version, again=again, claim=claim, routes=self._router.routes(links), failures=failures)

    def _spend_what_is_known(self) -> None:
        remembered = self._links.highest_version
        if remembered is not None:
            self.spend(remembered)
        for link in self._links:
            self.spend(link.serves_from - 1)  # given less, it would wait on
            if link.status is not None:
                self.spend(link.status.version)

    def remember(self, opening: Opening) -> None:
        """Before anything is sent: a trainer that dies now has a successor that goes on above this version. Raises
        SyncError if there is one already."""
        if self._config.run_folder is not None:
            claim = opening.claim
            saved = RunRecord.load(self._config.run_folder)
            # of two that claimed one epoch at the same moment, on engines apart, the one that every engine would obey
            if saved is not None and saved.claim != claim and not claim.replaces(saved.claim):
                raise SenderReplacedError(
                    f"{self._config.run_folder} belongs to a newer trainer (epoch {saved.claim.epoch} of run "
                    f"{saved.claim.run_id!r}, this one has {claim.epoch}); stop this trainer"
                )
            RunRecord(claim=claim, version=opening.version).save(self._config.run_folder)

    def _ask(self, deadline: Deadline, claim: Claim | None) -> dict[str, BaseException]:
        """Ask every target what it holds. Those that fail now are left out; one that is merely late is not, if it has
        answered before."""
        if not self._links:
            raise SyncError("there is no target to publish to: the controller has no worker at the moment")
        asked = {link: link.ask(claim) for link in self._links}
        # Half of what is left: one that is stopped must not use up the time of the others.
        wait_for(asked.values(), timeout=min(KNOWN_TARGET_S, self._config.open_timeout_s, deadline.remaining_s() / 2))
        strangers = [answer for link, answer in asked.items() if link.status is None]
        wait_for(strangers, timeout=min(self._config.open_timeout_s, deadline.remaining_s() / 2))
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

    def _make_claim(self) -> Claim:
        folder = self._config.run_folder
        saved = RunRecord.load(folder) if folder is not None else None
        if saved is not None:
            self.spend(saved.version)
        statuses = [link.status for link in self._links if link.status is not None]
        claim = next_claim(self._config.run_id, saved, statuses)
        if folder is not None:
            # at once: a trainer that starts before this one's first version would claim the same epoch
            RunRecord(claim=claim, version=saved.version if saved is not None else 0).save(folder)
        return claim


def nobody(did: str, failures: Mapping[str, BaseException]) -> SyncError:
    """The error of a publish that no target has `did`; its cause is the first target's."""
    first = next(iter(failures.values()))
    kind = SyncTimeoutError if isinstance(first, TimeoutError) else SyncError
    if any(isinstance(failure, SenderReplacedError) for failure in failures.values()):
        kind = SenderReplacedError
    error = kind(f"no engine {did}: " + "; ".join(f"{name}: {cause}" for name, cause in failures.items()))
    error.__cause__ = first
    return error

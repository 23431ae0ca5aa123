"""Targets that lack the version which the others have, and get it from the staging that is kept."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress

from sync.config import SyncConfig
from sync.delivery import Delivery, Outcome
from sync.errors import SyncError, SyncTimeoutError
from sync.kept import Kept
from sync.link import Link
from sync.opening import Opener
from sync.place import Deadline
from sync.routes import Router
from sync.turns import Turns

logger = logging.getLogger(__name__)


class Latecomers:
    """A target that has come back as a new incarnation, and serves nothing before; or one that was overtaken by a publish
    which then failed before it was sent. One after the other, each in a turn of its own, on one thread."""

    def __init__(
        self, links: Sequence[Link], opener: Opener, router: Router, kept: Kept, turns: Turns, config: SyncConfig
    ) -> None:
        self._links = links
        self._opener = opener
        self._router = router
        self._kept = kept
        self._turns = turns
        self._config = config
        self._executor = ThreadPoolExecutor(1, "weight-sync-join")
        self._overtaken: frozenset[str] = frozenset()
        self._longest_s = 0.0  # of the limits of all publishes: how long a turn may last
        self._is_closed = False

    def note_limit(self, timeout_s: float) -> None:
        """Of a publish that begins."""
        self._longest_s = max(self._longest_s, timeout_s)

    # ------------------------------------------------------------------------- in the turn of a publish, or of one of these

    def note_overtaken(self, names: Iterable[str]) -> None:
        """They have not begun to take what is kept."""
        self._overtaken |= set(names)

    def forget_overtaken(self) -> None:
        """Something newer is kept, and sent to all."""
        self._overtaken = frozenset()

    def has_overtaken(self) -> bool:
        """Whether what is kept may have to be sent yet."""
        return bool(self._overtaken)

    # -------------------------------------------------------------------------------------------------------- at any time

    def bring_up_overtaken(self) -> None:
        """Nothing newer has come of what overtook them, unless it is on its way yet."""
        if not self._turns.is_one_coming():
            for link in list(self._links):
                if link.name in self._overtaken:
                    self.bring_up(link)

    def bring_up(self, link: Link) -> None:
        """Soon. Of no effect after `close`."""
        with suppress(RuntimeError):  # closed meanwhile
            if not self._is_closed:
                self._executor.submit(self._bring_up, link)

    def close(self) -> None:
        """Waits for nobody."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _bring_up(self, link: Link) -> None:
        timeout_s = self._config.open_timeout_s + self._config.update_timeout_s
        try:
            # Not less: the publish under way has left this target out, and the next one may be an hour away.
            self._turns.take(self._longest_s + timeout_s, "waiting for a publish")
            try:
                self._overtaken -= {link.name}
                outcome = self._deliver(link, Deadline.after(timeout_s), timeout_s)
                self.note_overtaken(outcome.overtaken)
            finally:
                self._turns.give_back()
        except Exception as error:  # on a thread of ours: the log is all there is
            logger.warning("%s is not brought up before the next publish: %s", link.name, error)
            return
        self.bring_up_overtaken()
        if link.name in outcome.records:
            logger.info("%s has been brought up to version %s", link.name, self._kept.version)

    def _deliver(self, link: Link, deadline: Deadline, timeout_s: float) -> Outcome:
        version = self._kept.version
        if self._is_closed or version is None:
            return Outcome()
        answer = link.ask(self._opener.claim)
        wait_for([answer], timeout=self._config.open_timeout_s)
        if not answer.done():
            raise SyncTimeoutError("it did not say in time what it holds")
        link.status = answer.result()
        (route,) = self._router.routes([link])
        shipment = self._kept.shipment(route, [link])
        if shipment is None:
            raise SyncError("it holds other tensors than the targets of the last publish, or is reached another way")
        delivery = Delivery(
            [shipment],
            deadline,
            version=version,
            timeout_s=timeout_s,
            update_timeout_s=self._config.update_timeout_s,
        )
        return self._turns.delivers(delivery).run()

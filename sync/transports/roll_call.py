"""Who of a send's targets still takes part, and what became of the others."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from sync.errors import SyncError, SyncTimeoutError
from sync.place import Deadline
from sync.transports.base import Link


class Unanswered:
    """Targets that were given up, by name, until they have answered what they were asked then. A stopped process must
    not be sent one version after the other that nobody takes and everybody waits for."""

    def __init__(self) -> None:
        self._calls: dict[str, Future[Any]] = {}

    def add(self, link: Link, call: "Future[Any]") -> None:
        self._calls[link.name] = call

    def has(self, link: Link) -> bool:
        call = self._calls.get(link.name)
        if call is not None and call.done():
            del self._calls[link.name]
        return link.name in self._calls


class RollCall:
    """The targets of one send."""

    def __init__(self, links: Sequence[Link], unanswered: Unanswered, deadline: Deadline) -> None:
        self._unanswered = unanswered
        self._deadline = deadline
        self._ends: dict[str, Future[Any]] = {}
        self.present: list[Link] = list(links)
        """Those that take part still."""
        for link in links:
            if unanswered.has(link):
                self.fail(link, SyncTimeoutError("it has not yet answered what it was sent of an earlier version"))

    def fail(self, link: Link, error: BaseException) -> None:
        """It takes no further part; the others do."""
        self._end(link).set_exception(error)

    def finish(self, link: Link) -> None:
        """It has the version."""
        self._end(link).set_result(None)

    def wait(
        self,
        calls: Mapping[Link, "Future[Any]"],
        limit_s: float,
        what: str,
        *,
        forgiven: type[Exception] | tuple[()] = (),
    ) -> dict[Link, Any]:
        """The results of those present, as soon as each has answered or `limit_s` is over. Who fails, or is late, is
        present no longer, but for failures that are `forgiven`: they have no result."""
        calls = {link: call for link, call in calls.items() if link in self.present}
        limit_s = min(limit_s, self._deadline.remaining_s())
        wait_for(calls.values(), timeout=limit_s)
        results: dict[Link, Any] = {}
        for link, call in calls.items():
            if not call.done():
                self._unanswered.add(link, call)
                self.fail(link, SyncTimeoutError(f"it did not answer {what} within {limit_s:g} s"))
            elif (error := failure_of(call)) is not None:
                if not isinstance(error, forgiven):
                    self.fail(link, error)
            else:
                results[link] = call.result()
        return results

    def ends(self) -> Mapping[str, "Future[Any]"]:
        """By name; done. Everybody has finished or failed."""
        assert not self.present, f"nothing is known of {[link.name for link in self.present]}"
        return self._ends

    def _end(self, link: Link) -> "Future[Any]":
        self.present.remove(link)
        return self._ends.setdefault(link.name, Future())


def failure_of(call: "Future[Any]") -> BaseException | None:
    """Of a call that is done."""
    if call.cancelled():
        return SyncError("the engine stopped before it had taken the weights")
    return call.exception()

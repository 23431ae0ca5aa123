"""A batch in the trainer's hands, until it says that it has trained on it."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rollout.batches.entries import GroupEntry
from rollout.batches.groups import RolloutGroup
from rollout.types import Rollout


class Lease:
    """Complete groups, in canonical order.

        with controller.next_batch() as lease:
            ...train on lease.groups...

    A clean exit acknowledges; an exception gives the groups back, and the next batch has them again. Without `with`:
    `acknowledge()` or `give_back()`. A lease that ends neither way is still out: a checkpoint made meanwhile holds its
    groups as not trained, so acknowledge before saving.
    """

    def __init__(
        self,
        number: int,
        groups: list[RolloutGroup],
        entries: list[GroupEntry],
        *,
        version: int,
        since: float,
        end: Callable[["Lease", bool], None],
    ) -> None:
        self.number = number
        """Leases are numbered from 0."""
        self.groups = groups
        self.version = version
        """The fleet's version when it was handed out."""
        self.since = since
        """In the loop's seconds."""
        self.entries = entries
        self._end = end
        self._has_ended = False

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def staleness(self) -> int:
        """Of its stalest group, in versions."""
        return max((group.staleness for group in self.groups), default=0)

    def acknowledge(self) -> None:
        """The groups have been trained on. Once; later calls do nothing."""
        self._finish(True)

    def give_back(self) -> None:
        """They have not. Once; later calls do nothing."""
        self._finish(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(kind is None)

    def __len__(self) -> int:
        return len(self.groups)

    def _finish(self, trained: bool) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end(self, trained)

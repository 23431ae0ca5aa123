"""The states of the books: of prompts, groups, samples and attempts. See `rollout.batches.ledger`."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class SampleState(enum.StrEnum):
    """Where a sample is."""

    QUEUED = "queued"
    """Issued, on no worker: not yet, or no longer."""
    RUNNING = "running"
    """On a worker, in its newest attempt."""
    REWARDING = "rewarding"
    """Its tokens are there, its reward is not."""
    SCORED = "scored"
    """It waits for its group, in a ready group, or in a lease."""


class GroupState(enum.StrEnum):
    """Where a group is."""

    OPEN = "open"
    """Some of its samples are not scored yet."""
    READY = "ready"
    """It can be handed out."""
    LEASED = "leased"
    """It was handed out, and not acknowledged yet."""


class Ending(enum.StrEnum):
    """How samples, groups and prompts end."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptEnding(enum.StrEnum):
    """How attempts end."""

    FINISHED = "finished"
    LOST = "lost"
    """Its worker died, or gave it up."""
    CANCELLED = "cancelled"
    """Its sample ended while it ran."""


class LedgerError(AssertionError):
    """An event that does not fit the state it meets: a defect of the caller, never a user's mistake."""


@dataclass(eq=False, slots=True, kw_only=True)
class SampleEntry:
    """An outstanding sample. Read it; only the ledger writes."""

    group: "GroupEntry" = field(repr=False)
    index: int
    state: SampleState = SampleState.QUEUED
    num_attempts: int = 0
    worker_id: str | None = None
    """Where it runs."""
    incarnation: int = 0
    """The worker's, when it was dispatched."""
    num_infra_failures: int = 0
    num_data_failures: int = 0

    @property
    def sample_id(self) -> str:
        """Its rollout's id."""
        return f"{self.group.group_id}-{self.index}"

    @property
    def attempt(self) -> int:
        """The newest attempt, from 0 on; of a sample that was dispatched."""
        assert self.num_attempts, f"sample {self.sample_id} has not been dispatched yet"
        return self.num_attempts - 1


@dataclass(eq=False, slots=True, kw_only=True)
class GroupEntry:
    """An outstanding group. Read it; only the ledger writes, but for `start_version`, which admission sets."""

    number: int
    """Its prompt's place in the order of prompts."""
    round: int
    start_version: int
    """The fleet's version when it was admitted: no token of it is older."""
    state: GroupState = GroupState.OPEN
    samples: dict[int, SampleEntry] = field(default_factory=dict)  # by index; those that have not ended
    num_issued: int = 0
    num_failed: int = 0
    returned: bool = False
    """It came out of a checkpoint or back from a lease, so its age is not admission's doing."""

    @property
    def group_id(self) -> str:
        """Deterministic: the prompt's number, and the round from the second on."""
        return f"g{self.number}" if self.round == 0 else f"g{self.number}r{self.round}"

    @property
    def order(self) -> tuple[int, int]:
        """Canonical: by prompt, then by round."""
        return (self.number, self.round)


def entry_state(group: GroupEntry) -> dict[str, Any]:
    """JSON-safe: a group and its samples."""
    return {
        "number": group.number,
        "round": group.round,
        "start_version": group.start_version,
        "state": str(group.state),
        "num_issued": group.num_issued,
        "num_failed": group.num_failed,
        "samples": [
            {
                "index": sample.index,
                "state": str(sample.state),
                "num_attempts": sample.num_attempts,
                "incarnation": sample.incarnation,
                "num_infra_failures": sample.num_infra_failures,
                "num_data_failures": sample.num_data_failures,
            }
            for sample in group.samples.values()
        ],
    }


def entry_from_state(saved: Mapping[str, Any]) -> GroupEntry:
    """The group as it goes on elsewhere: what ran is queued again, and a lease was not acknowledged."""
    group = GroupEntry(
        number=saved["number"],
        round=saved["round"],
        start_version=saved["start_version"],
        state=GroupState.OPEN if saved["state"] == GroupState.OPEN else GroupState.READY,
        num_issued=saved["num_issued"],
        num_failed=saved["num_failed"],
        returned=True,
    )
    for one in saved["samples"]:
        state = SampleState(one["state"])
        group.samples[one["index"]] = SampleEntry(
            group=group,
            index=one["index"],
            state=SampleState.QUEUED if state is SampleState.RUNNING else state,
            num_attempts=one["num_attempts"],
            incarnation=one["incarnation"],
            num_infra_failures=one["num_infra_failures"],
            num_data_failures=one["num_data_failures"],
        )
    return group

"""Groups: what becomes of a sample that fails, when a group is complete, and which ones are worth training on."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from rollout.batches.entries import GroupEntry, SampleEntry, SampleState
from rollout.errors import InvalidRequestError
from rollout.types import Rollout

OnFailure = Literal["shrink", "drop", "refill"]

KeepGroup = Callable[[Sequence[Rollout]], bool]
"""The dynamic filter: whether a complete group, rewards included, is handed out. One that is not makes room for exactly
one other."""


@dataclass(frozen=True, kw_only=True)
class RolloutGroup(Sequence[Rollout]):
    """The rollouts of one prompt, by sample index. It is a sequence of them, so that whatever takes a list of groups of
    rollouts takes a list of these."""

    group_id: str
    prompt_id: str
    prompt_ids: list[int]  # [prompt_len]
    rollouts: tuple[Rollout, ...]
    staleness: int
    """The fleet's version at the hand-out, minus that of the group's oldest token."""
    num_failed: int = 0
    """Samples that failed for good and are not among the rollouts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's columns."""

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...

    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        return self.rollouts[index]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)


class FailureKind(enum.StrEnum):
    """Whose fault it was that a sample came to nothing."""

    INFRA = "infra"
    """A worker's: it died, or its engine did. Another one may do better, from where this one was."""
    DATA = "data"
    """The sample's: its reward could not be computed, its time ran out. Other noise may do better."""
    HOPELESS = "hopeless"
    """The prompt's: refused by name. It would be refused again."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """That a sample, or a group, came to nothing."""

    kind: FailureKind
    reason: str
    """A sentence."""
    cause: BaseException | None = None
    """What the user's own function raised, if it was that."""


class Verdict(enum.StrEnum):
    """What becomes of a sample that failed."""

    RETRY = "retry"
    """It alone is generated again."""
    SHRINK = "shrink"
    """It ends; its group goes on without it."""
    REFILL = "refill"
    """It ends; another sample takes its place."""
    DROP = "drop"
    """Its whole group ends."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Retries a sample alone, on two budgets; then its group shrinks, refills or is dropped."""

    max_infra_retries: int = 3
    """Of one sample, after failures that were not its own."""
    max_data_retries: int = 1
    """Of one sample, after failures of its own."""
    then: OnFailure = "shrink"
    min_group_size: int = 2
    """A group that shrinks below this is dropped: alone, a sample has nothing to be compared with."""
    max_refills: int = 8
    """Of one group; beyond it, it shrinks."""

    def __post_init__(self) -> None:
        for name, low in (("max_infra_retries", 0), ("max_data_retries", 0), ("min_group_size", 1), ("max_refills", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidRequestError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.then not in ("shrink", "drop", "refill"):
            raise InvalidRequestError(f'on_failed_sample must be "shrink", "drop" or "refill", got {self.then!r}')

    def decide(self, sample: SampleEntry, kind: FailureKind, *, group_size: int) -> Verdict:
        """Counts the failure on the sample, and says what becomes of it. `group_size`: what its group was issued with."""
        if kind is FailureKind.INFRA:
            sample.num_infra_failures += 1
            if sample.num_infra_failures <= self.max_infra_retries:
                return Verdict.RETRY
        elif kind is FailureKind.DATA:
            sample.num_data_failures += 1
            if sample.num_data_failures <= self.max_data_retries:
                return Verdict.RETRY
        if self.then == "drop":
            return Verdict.DROP
        num_refilled = sample.group.num_issued - group_size
        if self.then == "refill" and kind is not FailureKind.HOPELESS and num_refilled < self.max_refills:
            return Verdict.REFILL
        left = len(sample.group.samples) - 1
        return Verdict.SHRINK if left >= min(self.min_group_size, group_size) else Verdict.DROP


def is_complete(group: GroupEntry) -> bool:
    """Every sample that has not failed is scored, and there is one."""
    return bool(group.samples) and all(s.state is SampleState.SCORED for s in group.samples.values())


def in_canonical_order(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """By sample index, in whatever order they finished."""
    return tuple(sorted(rollouts, key=lambda rollout: rollout.sample_index))


def rewards_differ(group: Sequence[Rollout]) -> bool:
    """The usual dynamic filter: in a group of equal rewards all advantages are zero, and so are the gradients.

    Source: DAPO (Yu et al. 2025), dynamic sampling.
    """
    return len({rollout.reward for rollout in group}) > 1


def oldest_version(rollouts: Iterable[Rollout]) -> int | None:
    """Of their tokens; None without tokens."""
    return min((r.min_version for r in rollouts if r.min_version is not None), default=None)

"""How far generation may run ahead of training, and which groups make the next batch.

The bound. P groups make a batch, S is `max_staleness`. Suppose one publish follows each batch. Then every group is handed
out at most S versions after the one it was admitted at; and since none of its tokens is older than its admission, its
staleness (version at the hand-out, minus that of its oldest token) is at most S.

Sketch of a proof. Let the version be v, and give a group admitted now the deadline v + S. Hand-outs still to come at
versions up to v + S: S + 1 if none has been made at v yet, else S, since a publish comes before the next.

- Admission (`room`) keeps the groups not yet handed out to P for each of those hand-outs. All their deadlines are at most
  v + S, so right after an admission there are, for the deadline v + S, no more groups than places. (1)
- A batch (`pick`) is handed out at v only if, for every deadline d, the groups due by d that stay behind are at most
  P * (d - v): the places of the hand-outs after v, up to d. So no hand-out breaks (1) for any d. (2)
- A publish without a hand-out before it would use up places unfilled. That is the supposition; see `is_too_old`.

With (1) and (2), at the hand-out at version d nobody who is due by d stays behind. Nothing has to be dropped, and nobody
waits for ever: a batch that breaks (2) waits for the groups that are due, which are running; it may pass over slower
groups that are not due yet. A filtered or failed group leaves its place, which admits exactly one other.

Everything is computed from what the ledger holds at the moment, never from counters that are kept beside it: a group that
is finished but not yet noticed cannot be counted twice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout.batches.entries import GroupEntry, GroupState
from rollout.errors import InvalidRequestError

Order = Literal["windowed", "fifo", "expiring"]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What admission looks at."""

    version: int
    """The fleet's."""
    handed_version: int | None
    """At the last hand-out; None before the first."""
    num_ahead: int
    """Groups admitted and not handed out, in whatever state."""
    is_awaited: bool
    """Somebody waits for a batch, and nobody holds one: no publish can come before the next hand-out."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What the groups ahead make."""

    groups: list[GroupEntry] = field(default_factory=list)
    """The batch, in canonical order; empty if it is not complete."""
    missing: int = 0
    """At least so many groups must become ready, or end, before it can be."""


@dataclass(frozen=True, kw_only=True)
class StalenessPolicy:
    """Admission, batches and expiry. Pure: it holds settings only."""

    prompts_per_step: int
    """P: groups of a batch."""
    max_staleness: int
    """S, in versions; 0 is strictly on-policy."""
    order: Order = "windowed"
    """"windowed": the oldest ready groups among the oldest `look_ahead`, none kept back beyond its deadline. "fifo": the
    oldest P groups, however long the slowest of them takes. "expiring": the oldest ready groups; what becomes too old
    is expired."""
    look_ahead: int | None = None
    """Groups that a batch is chosen from, at least P; None: all that are admitted."""

    def __post_init__(self) -> None:
        for name, low in (("prompts_per_step", 1), ("max_staleness", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidRequestError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.order not in ("windowed", "fifo", "expiring"):
            raise InvalidRequestError(f'admission must be "windowed", "fifo" or "expiring", got {self.order!r}')
        if self.look_ahead is not None and self.look_ahead < self.prompts_per_step:
            raise InvalidRequestError(
                f"look_ahead must be at least prompts_per_step={self.prompts_per_step}, or no batch is ever complete; got "
                f"{self.look_ahead}"
            )

    def room(self, moment: Moment) -> int:
        """How many groups may be admitted now."""
        return max(0, self.prompts_per_step * self._handouts_left(moment) - moment.num_ahead)

    def pick(self, ahead: Sequence[GroupEntry], version: int, *, is_last: bool = False) -> Pick:
        """The next batch, if it is complete. `ahead`: the groups not handed out. `is_last`: no other group will ever come, so
        that a short batch is one too."""
        size = min(self.prompts_per_step, len(ahead)) if is_last else self.prompts_per_step
        # not canonical order: a group that was renewed is due later than its prompt's number says
        window = sorted(ahead, key=lambda group: (group.start_version, group.order))
        window = window[: size if self.order == "fifo" else self.look_ahead]
        chosen = [group for group in window if group.state is GroupState.READY][:size]
        if not size or len(chosen) < size:
            return Pick(missing=max(1, size - len(chosen)))
        if self.order == "windowed" and (missing := self._overdue(ahead, chosen, version)):
            return Pick(missing=missing)
        return Pick(groups=sorted(chosen, key=lambda group: group.order))

    def is_too_old(self, oldest_version: int, version: int) -> bool:
        """Handed out at `version`, it would be staler than `max_staleness`. Under "windowed" and "fifo" this takes more
        than one publish a batch, or a rewind."""
        return version - oldest_version > self.max_staleness

    def _handouts_left(self, moment: Moment) -> int:
        """Hand-outs at versions at which a group that is admitted now is not too old."""
        published = moment.handed_version is None or moment.version > moment.handed_version
        if self.order == "expiring" or published:
            return self.max_staleness + 1
        if self.max_staleness == 0 and moment.is_awaited:
            return 1  # the trainer has skipped its publish: waiting for it would never end
        return self.max_staleness

    def _overdue(self, ahead: Sequence[GroupEntry], chosen: Sequence[GroupEntry], version: int) -> int:
        """How many more groups the batch must take, at the worst deadline, for the rest to be handed out in time."""
        wanted, taken = _by_deadline(ahead, self.max_staleness), _by_deadline(chosen, self.max_staleness)
        most = num_wanted = num_taken = 0
        for due in sorted(wanted):
            num_wanted += wanted[due]
            num_taken += taken[due]
            places_later = self.prompts_per_step * max(0, due - version)
            most = max(most, min(num_wanted - places_later, len(chosen)) - num_taken)
        return most


def room_in_tokens(
    ahead: Iterable[GroupEntry],
    cost: Callable[[GroupEntry], int],
    *,
    max_tokens: int,
    cost_of_next: int,
    prompts_per_step: int,
) -> bool:
    """Whether one more group fits into `max_tokens` of look-ahead. `cost`: a group's tokens, or while it runs the most
    they can become. The next batch's own groups always fit: without them none is ever complete."""
    groups = list(ahead)
    return len(groups) < prompts_per_step or sum(map(cost, groups)) + cost_of_next <= max_tokens


class Timeline:
    """Versions across a rewind.

    A run that goes on from a checkpoint of version V must label its tokens above H, the highest version ever published,
    or two policies would share a label. The weights of V are then called H + 1. Labels stay as they were stamped; how old
    one is counts from here, so that what the checkpoint held is no staler than it was.
    """

    def __init__(self, rewinds: Iterable[tuple[int, int]] = ()) -> None:
        self.rewinds = [(int(first), int(shift)) for first, shift in rewinds]
        """(first, shift) in order: labels below `first` are `shift` younger than they say."""

    def rewind(self, saved_version: int, next_version: int) -> None:
        """From here on the weights of `saved_version` are called `next_version`."""
        if next_version > saved_version:
            self.rewinds.append((next_version, next_version - saved_version))

    def effective(self, version: int) -> int:
        """The label that weights of this age have today."""
        for first, shift in self.rewinds:
            if version < first:
                version += shift
        return version


def _by_deadline(groups: Iterable[GroupEntry], max_staleness: int) -> Counter[int]:
    return Counter(group.start_version + max_staleness for group in groups)

"""What a run says about itself in numbers, by the names that the field uses."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.batches.groups import FailureKind, RolloutGroup
from rollout.batches.rewards import REWARD_ERRORS
from rollout.status import UpdateRecord
from rollout.types import FinishReason, Rollout

RECENT_GROUPS = 512
RECENT_LENGTHS = 4096
RECENT_UPDATES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What is kept of a group that was handed out."""

    staleness: int
    lengths: tuple[int, ...]  # [num_rollouts], response tokens
    spans: tuple[int, ...]  # [num_rollouts]
    num_clipped: int
    """Rollouts that ended at max_new_tokens."""
    rewards: tuple[float, ...]
    complete_s: float
    """From admission to hand-out."""


class RolloutMetrics:
    """Counts since the beginning, and statistics over the last groups handed out. Read on the loop."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._groups: deque[GroupFacts] = deque(maxlen=RECENT_GROUPS)
        self._admitted_lengths: deque[int] = deque(maxlen=RECENT_LENGTHS)
        self._trained_lengths: deque[int] = deque(maxlen=RECENT_LENGTHS)
        self._reward_metrics: dict[str, deque[float]] = {}
        self.reward_errors: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Failed attempts by kind."""
        self.num_tokens = 0
        """In rollouts that finished."""
        self.num_batches = 0
        self.num_stale = 0
        """Groups that were too old when looked at."""
        self.num_worker_deaths = 0
        self.num_updates = 0
        """Of all engines."""
        self.num_straddlers = 0
        """Requests that went on under another version, over all updates."""
        self._pause_waits_s: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._commits_s: deque[float] = deque(maxlen=RECENT_UPDATES)
        self.waited_s = 0.0
        """How long `next_batch` was waited in."""

    def finished(self, rollout: Rollout) -> None:
        """A rollout ended well, whatever becomes of it."""
        self.num_tokens += len(rollout.token_ids)
        self._admitted_lengths.append(len(rollout.token_ids))

    def rewarded(self, metrics: Iterable[tuple[str, float]]) -> None:
        """What a reward function reported."""
        for name, value in metrics:
            self._reward_metrics.setdefault(name, deque(maxlen=RECENT_LENGTHS)).append(value)

    def updated(self, record: UpdateRecord) -> None:
        """An engine has taken a version."""
        self.num_updates += 1
        self.num_straddlers += record.straddlers
        self._pause_waits_s.append(record.wait_s)
        self._commits_s.append(record.held_s)

    def handed_out(self, groups: Sequence[RolloutGroup], complete_s: Sequence[float]) -> None:
        """A batch left."""
        self.num_batches += 1
        for group, seconds in zip(groups, complete_s, strict=True):
            lengths = tuple(len(rollout.token_ids) for rollout in group.rollouts)
            self._trained_lengths.extend(lengths)
            self._groups.append(
                GroupFacts(
                    staleness=group.staleness,
                    lengths=lengths,
                    spans=tuple(len(rollout.version_spans) for rollout in group.rollouts),
                    num_clipped=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts),
                    rewards=tuple(r.reward for r in group.rollouts if r.reward is not None),
                    complete_s=seconds,
                )
            )

    def as_dict(self, now: float) -> dict[str, float]:
        """Numbers by name."""
        elapsed = max(now - self._began_at, 1e-9)
        staleness = [group.staleness for group in self._groups]
        lengths = [length for group in self._groups for length in group.lengths]
        spans = [count for group in self._groups for count in group.spans]
        rewards = [reward for group in self._groups for reward in group.rewards]
        clipped = sum(group.num_clipped for group in self._groups)
        values = {
            "rollout/batches": float(self.num_batches),
            "rollout/tokens": float(self.num_tokens),
            "rollout/tokens_per_s": self.num_tokens / elapsed,
            "rollout/stale_groups": float(self.num_stale),
            "rollout/staleness_mean": _mean(staleness),
            "rollout/staleness_max": float(max(staleness, default=0)),
            "rollout/spans_mean": _mean(spans),
            "rollout/spans_max": float(max(spans, default=0)),
            "rollout/response_length_mean": _mean(lengths),
            "rollout/response_length_p90": _quantile(lengths, 0.9),
            "rollout/response_length_clip_ratio": clipped / len(lengths) if lengths else 0.0,
            "rollout/group_completion_s_p90": _quantile([group.complete_s for group in self._groups], 0.9),
            "rollout/length_bias": length_bias(list(self._admitted_lengths), list(self._trained_lengths)),
            "rollout/worker_deaths": float(self.num_worker_deaths),
            "sync/updates": float(self.num_updates),
            "sync/straddlers": float(self.num_straddlers),
            "sync/pause_wait_s_mean": _mean(self._pause_waits_s),
            "sync/pause_wait_s_max": max(self._pause_waits_s, default=0.0),
            "sync/commit_s_mean": _mean(self._commits_s),
            "sync/commit_s_max": max(self._commits_s, default=0.0),
            "trainer/wait_share": min(1.0, self.waited_s / elapsed),
            "reward/mean": _mean(rewards),
            "reward/solve_none": _share([max(g.rewards) <= 0 for g in self._groups if g.rewards]),
            "reward/solve_all": _share([min(g.rewards) >= 1 for g in self._groups if g.rewards]),
            "reward/solve_partial": _share([min(g.rewards) < max(g.rewards) for g in self._groups if g.rewards]),
        }
        values |= {f"reward/{name}": _mean(seen) for name, seen in self._reward_metrics.items()}
        values |= {f"reward/errors_{kind}": float(self.reward_errors[kind]) for kind in REWARD_ERRORS}
        values |= {f"rollout/failures_{kind}": float(self.failures[kind]) for kind in FailureKind}
        return values


def ledger_metrics(counts: dict[str, int], imbalance: int, attempts: dict[str, int]) -> dict[str, float]:
    """The ledger's numbers by name."""
    values = {f"rollout/samples_{name}": float(count) for name, count in counts.items()}
    values |= {f"rollout/attempts_{name}": float(count) for name, count in attempts.items()}
    return {**values, "rollout/imbalance": float(imbalance)}


def length_bias(admitted: Sequence[int], trained: Sequence[int]) -> float:
    """How far the lengths trained on are from those generated: the 1-Wasserstein distance of the two distributions, as a
    share of the mean generated length. 0 is none; discarding what takes long makes it grow."""
    if not admitted or not trained:
        return 0.0
    left, right = sorted(admitted), sorted(trained)
    mean = sum(left) / len(left)
    steps = 256  # of the quantile functions
    distance = sum(
        abs(left[int(len(left) * (i + 0.5) / steps)] - right[int(len(right) * (i + 0.5) / steps)]) for i in range(steps)
    )
    return distance / steps / mean if mean else 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def _quantile(values: Sequence[float], share: float) -> float:
    return float(sorted(values)[min(len(values) - 1, int(len(values) * share))]) if values else 0.0

"""A run step by step: which rollouts were trained on in which, and their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollsync_cli.run_files import RolloutRow

MAX_REWARD = 1e100
"""The square of a larger one is no number any more, and it would hide every other in a chart."""


def steps_of(rollouts: Iterable[RolloutRow]) -> dict[int, list[RolloutRow]]:
    """What was trained on, by step.

    A run that was killed and goes on from a checkpoint, in the same file, takes some steps again; of each step the last
    record counts. It is told apart by the version at which a controller handed it out, which no other record of it has."""
    steps: dict[int, list[RolloutRow]] = {}
    for row in rollouts:
        if row.step is None:
            continue
        rows = steps.setdefault(row.step, [])
        if rows and row.ending is not None and row.trained_version != rows[-1].trained_version:
            rows.clear()
        rows.append(row)
    return dict(sorted(steps.items()))


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step in numbers."""

    step: int
    trained_version: int | None
    num_rollouts: int
    reward: float | None
    num_tokens: float
    """Mean length of a response."""
    staleness: int | None
    """Of its oldest token."""
    num_spanning: int


def step_rows(steps: Mapping[int, Sequence[RolloutRow]]) -> list[StepRow]:
    """By step."""
    return [
        StepRow(
            step=step,
            trained_version=rows[0].trained_version,
            num_rollouts=len(rows),
            reward=fmean(rewards_of(rows)) if rewards_of(rows) else None,
            num_tokens=fmean(row.num_tokens for row in rows),
            staleness=max(staleness_of(rows), default=None),
            num_spanning=sum(row.spans_update for row in rows),
        )
        for step, rows in steps.items()
    ]


def rewards_of(rows: Iterable[RolloutRow]) -> list[float]:
    """Those that are numbers of a size that can be drawn."""
    return [row.reward for row in rows if row.reward is not None and abs(row.reward) <= MAX_REWARD]


def staleness_of(rows: Iterable[RolloutRow]) -> list[int]:
    """Those that are known."""
    return [row.staleness for row in rows if row.staleness is not None]

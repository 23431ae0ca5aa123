"""The charts of a run: reward, length, staleness, pauses."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from rollsync_cli.charts import Chart, Point, Stack, bar_chart, line_chart
from rollsync_cli.run_files import RolloutRow, Update
from rollsync_cli.steps import rewards_of, staleness_of


def panels(steps: Mapping[int, Sequence[RolloutRow]], updates: Sequence[Update]) -> list[Chart]:
    """One for each, whether the run has anything for it or not."""
    return [
        line_chart(
            "Reward",
            "mean of a step, and its 95% interval",
            "step",
            [_reward_point(step, rewards_of(rows)) for step, rows in steps.items() if rewards_of(rows)],
            from_zero=False,
        ),
        line_chart(
            "Response length",
            "tokens: mean of a step, and the middle 80%",
            "step",
            [_length_point(step, sorted(row.num_tokens for row in rows)) for step, rows in steps.items()],
            from_zero=True,
        ),
        bar_chart(
            "Staleness",
            "versions from a rollout's oldest token to the trainer's",
            "step",
            [_staleness_stack(step, staleness_of(rows)) for step, rows in steps.items() if staleness_of(rows)],
            legend=(("mean", "mean"), ("most", "most")),
            whole=True,
        ),
        bar_chart(
            "Pauses",
            "ms for each update, the longest of its engines",
            "version",
            _pause_stacks(updates),
            legend=(("held", "held: generation stood still"), ("wait", "waited for: the step in progress ends")),
        ),
    ]


def _reward_point(step: int, rewards: Sequence[float]) -> Point:
    mean = fmean(rewards)
    half = 1.96 * stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    title = f"step {step}: {mean:.3f} ± {half:.3f}, {len(rewards)} rollouts"
    # no further than rewards went: an interval below 0 makes no sense of rewards that are 0 or 1
    low, high = max(mean - half, min(rewards)), min(mean + half, max(rewards))
    return Point(x=step, y=mean, low=low, high=high, title=title)


def _length_point(step: int, lengths: Sequence[int]) -> Point:
    low, high = lengths[int(0.1 * (len(lengths) - 1))], lengths[math.ceil(0.9 * (len(lengths) - 1))]
    mean = fmean(lengths)
    return Point(x=step, y=mean, low=low, high=high, title=f"step {step}: {mean:.1f} tokens, {low} to {high}")


def _staleness_stack(step: int, staleness: Sequence[int]) -> Stack:
    mean, most = fmean(staleness), max(staleness)
    title = f"step {step}: {mean:.2f} in the mean, {most} at most"
    return Stack(x=step, values=(mean, most - mean), title=title)


def _pause_stacks(updates: Sequence[Update]) -> list[Stack]:
    by_version: dict[int, list[Update]] = {}
    for update in updates:
        by_version.setdefault(update.version, []).append(update)
    stacks: list[Stack] = []
    for version, same in sorted(by_version.items()):
        held, wait = (1000 * max(getattr(update, name) for update in same) for name in ("held_s", "wait_s"))
        title = f"version {version}: held {held:.1f} ms, waited {wait:.1f} ms"
        stacks.append(Stack(x=version, values=(held, wait), title=title))
    return stacks

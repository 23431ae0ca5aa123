"""The timeline: each request a bar, coloured by the version of its tokens, in the lane of its engine that was free."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollsync_cli.lives import Life, crossings, in_flight, in_lanes
from rollsync_cli.run_files import Run, Update
from rollsync_cli.strips import Strip, has_failed, lay_out

MAX_DRAWN = 20_000
"""Requests, and updates: a page with more takes a browser too long. The latest are drawn."""
BARS_A_LANE = 25
"""Requests behind one another in a lane before the timeline breaks into another strip."""
UPDATES_A_STRIP = 40
MAX_STRIPS = 60


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The whole picture."""

    strips: tuple[Strip, ...]
    num_drawn: int
    num_left_out: int
    """Older ones than are drawn."""
    num_lines_left_out: int
    """Older updates than have a line."""
    num_without_times: int
    num_never_started: int
    num_failed: int
    num_open: int
    num_updates: int
    """In the time that is drawn; that of several engines to the same version is one."""
    num_crossed: int
    """Updates that met requests in flight which went on after them."""
    num_crossings: int
    """Such requests, over the updates of all engines."""
    num_crossings_with_tokens: int
    """Those of them with tokens from before the update and from after it."""
    held_share: float
    """Of the time that is drawn, how much of it generation stood still; of several engines, the mean."""


def timeline(run: Run, *, max_drawn: int = MAX_DRAWN) -> Timeline:
    """Lays out the run; of more than `max_drawn` requests the latest, and of so many updates in their time."""
    known = [row for row in run.rollouts if row.started_at is not None]
    without = sum(row.started_at is None and row.submitted_at is None for row in run.rollouts)
    drawn = sorted(known, key=lambda row: (row.started_at or 0.0, row.group_id or "", row.sample_index))
    num_left_out = max(len(drawn) - max_drawn, 0)
    drawn = drawn[num_left_out:]
    counts = {
        "num_drawn": len(drawn),
        "num_left_out": num_left_out,
        "num_without_times": without,
        "num_never_started": len(run.rollouts) - len(known) - without,
    }
    if not drawn:
        nothing = {"num_failed": 0, "num_open": 0, "num_updates": 0, "num_crossed": 0, "num_crossings": 0}
        nothing |= {"num_crossings_with_tokens": 0, "num_lines_left_out": 0}
        return Timeline(strips=(), held_share=0.0, **nothing, **counts)
    start = drawn[0].started_at or 0.0
    end = max(run.ended_at or start, start + 1e-3)
    updates = [update for update in run.updates if update.finished_at >= start]
    moments = {(update.worker_id, update.version): update.finished_at for update in updates}
    lives, lanes = in_lanes(drawn, moments, end)
    crossed = crossings(lives, updates)
    return Timeline(
        strips=tuple(_strips(lives, lanes, updates[-max_drawn:], start, end)),
        num_lines_left_out=max(len(updates) - max_drawn, 0),
        num_failed=sum(has_failed(life) for life in lives),
        num_open=sum(life.is_open for life in lives),
        num_crossed=len({u.version for u, count in zip(updates, crossed, strict=True) if count.num_in_flight}),
        num_crossings=sum(count.num_in_flight for count in crossed),
        num_crossings_with_tokens=sum(count.num_with_tokens for count in crossed),
        num_updates=len({update.version for update in updates}),
        held_share=sum(update.held_s for update in updates) / len(lanes) / (end - start),
        **counts,
    )


def _strips(
    lives: Sequence[Life],
    lanes: Mapping[str | None, range],
    updates: Sequence[Update],
    start: float,
    end: float,
) -> Iterable[Strip]:
    num_lanes = sum(len(own) for own in lanes.values())
    wanted = max(len(lives) / (num_lanes * BARS_A_LANE), len({u.version for u in updates}) / UPDATES_A_STRIP)
    count = min(max(math.ceil(wanted), 1), MAX_STRIPS)
    flight = in_flight(lives)
    most = max(number for _, number in flight)
    for number in range(count):
        left = start + (end - start) * number / count
        right = start + (end - start) * (number + 1) / count
        yield lay_out(lives, lanes, updates, flight, most, left=left, right=right, origin=start)

"""The lives of requests: when each was under which version, and which lane of its engine it is drawn in."""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rollsync_cli.run_files import RolloutRow, Update


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of one request's life under one version; seconds since the epoch."""

    version: int | None
    """None: it has no token yet."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Life:
    """One request, from its first prefill to its end."""

    row: RolloutRow
    segments: tuple[Segment, ...]
    lane: int
    is_open: bool
    """It had not ended when it was written."""

    @property
    def start(self) -> float:
        return self.segments[0].start

    @property
    def end(self) -> float:
        return self.segments[-1].end


def segments(row: RolloutRow, moments: Mapping[tuple[str | None, int], float], end: float) -> tuple[Segment, ...]:
    """When a started request was under which version. The moment of a change is that of its engine's update (`moments`, by
    worker and version), or as far on as its tokens were, where that is not known; `end`: of a request that has none."""
    assert row.started_at is not None
    start, stop = row.started_at, row.finished_at if row.finished_at is not None else end
    stop = max(stop, start)
    changes: list[float] = []
    for first, version in row.spans[1:]:
        moment = moments.get((row.worker_id, version), moments.get((None, version)))
        if moment is None or not start <= moment <= stop:
            moment = start + (stop - start) * first / row.num_tokens
        changes.append(max([moment, *changes]))
    versions: list[int | None] = [version for _, version in row.spans] or [None]
    return tuple(
        Segment(version=version, start=left, end=right)
        for version, left, right in zip(versions, [start, *changes], [*changes, stop], strict=True)
    )


def in_lanes(
    rows: Sequence[RolloutRow], moments: Mapping[tuple[str | None, int], float], end: float
) -> tuple[list[Life], dict[str | None, range]]:
    """Each in the first lane of its worker that is free when it starts; and the lanes of each worker."""
    by_worker: dict[str | None, list[RolloutRow]] = {}
    for row in rows:
        by_worker.setdefault(row.worker_id, []).append(row)
    lives: list[Life] = []
    lanes: dict[str | None, range] = {}
    base = 0
    for worker_id in sorted(by_worker, key=lambda name: (len(name or ""), name or "")):
        busy: list[tuple[float, int]] = []  # (until, lane)
        free: list[int] = []
        num_lanes = 0
        for row in by_worker[worker_id]:
            parts = segments(row, moments, end)
            while busy and busy[0][0] <= parts[0].start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                lane = heapq.heappop(free)
            else:
                lane, num_lanes = num_lanes, num_lanes + 1
            heapq.heappush(busy, (parts[-1].end, lane))
            lives.append(Life(row=row, segments=parts, lane=base + lane, is_open=row.finished_at is None))
        lanes[worker_id] = range(base, base + num_lanes)
        base += num_lanes
    return lives, lanes


def in_flight(lives: Iterable[Life]) -> list[tuple[float, int]]:
    """(moment, requests in flight from then on), by time."""
    changes: dict[float, int] = {}
    for life in lives:
        changes[life.start] = changes.get(life.start, 0) + 1
        changes[life.end] = changes.get(life.end, 0) - 1
    number, steps = 0, []
    for moment in sorted(changes):
        number += changes[moment]
        steps.append((moment, number))
    return steps


@dataclass(kw_only=True)
class Crossings:
    """The requests that went on across one update of their engine."""

    num_in_flight: int = 0
    """All that had started before it and ended after it."""
    num_with_tokens: int = 0
    """Those of them with tokens of versions before it and since. The others had no token yet, or got no more."""


def crossings(lives: Iterable[Life], updates: Sequence[Update]) -> list[Crossings]:
    """One for each update."""
    counts = [Crossings() for _ in updates]
    by_worker: dict[str | None, list[tuple[float, float, int]]] = {}
    for position, update in enumerate(updates):
        moment = (update.entered_at, update.finished_at, position)
        by_worker.setdefault(update.worker_id, []).append(moment)
    for moments in by_worker.values():
        moments.sort()
    for life in lives:
        for worker_id in {life.row.worker_id, None}:
            moments = by_worker.get(worker_id, [])
            first = bisect_left(moments, (life.start, 0.0, 0))
            for _, finished_at, position in islice(moments, first, None):
                if finished_at >= life.end:
                    break
                versions = [version for _, version in life.row.spans]
                counts[position].num_in_flight += 1
                if versions and versions[0] < updates[position].version <= versions[-1]:
                    counts[position].num_with_tokens += 1
    return counts

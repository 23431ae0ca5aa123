"""One strip of the timeline: a stretch of time, with its requests in their lanes and its updates across them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollsync_cli.charts import Scale, Tick, nice_ticks
from rollsync_cli.lives import Life
from rollsync_cli.run_files import Update

WIDTH = 1200.0
LEFT, RIGHT = 72.0, 14.0
TOP = 18.0
"""Room for the versions' names."""
FLIGHT_HEIGHT = 36.0
GAP = 8.0
AXIS_HEIGHT = 22.0
NUM_COLOURS = 8
"""Neighbouring versions differ; colours come again after these many."""
LABEL_ROOM = 24.0
ENDS_WELL = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A segment in its strip; x and width in pixels."""

    x: float
    width: float
    css: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A request in its strip."""

    rollout_id: str
    title: str
    y: float
    height: float
    pieces: tuple[Piece, ...]
    failed_at: float | None
    """x of the mark of an end other than by a stop or its length."""
    open_at: float | None
    """x of the mark of an end that has not come."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """An update in its strip: x where generation stood still, for how many pixels, over which lanes."""

    version: int
    x: float
    width: float
    top: float
    bottom: float
    label: str
    is_at_edge: bool
    """Its label has no room on its right."""
    title: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A stretch of time. `start` and `end` are seconds since the epoch, at x `left` and `right`."""

    start: float
    end: float
    left: float
    right: float
    height: float
    bars: tuple[Bar, ...]
    lines: tuple[Line, ...]
    ticks: tuple[Tick, ...]
    flight: str
    """A path: how many requests are in flight."""
    flight_top: float
    flight_bottom: float
    max_flight: int
    lanes_top: float
    lanes_bottom: float
    workers: tuple[tuple[float, str], ...]
    """(y, name)"""


def lay_out(
    lives: Sequence[Life],
    lanes: Mapping[str | None, range],
    updates: Sequence[Update],
    flight: Sequence[tuple[float, int]],
    most: int,
    *,
    left: float,
    right: float,
    origin: float,
) -> Strip:
    """The stretch from `left` to `right`. `flight`: (moment, requests in flight from then on), at most `most`; `origin`: the
    moment that is 0 on its axis."""
    shown = [life for life in lives if life.end >= left and life.start <= right]
    used = max((life.lane - lanes[life.row.worker_id].start for life in shown), default=0) + 1
    lanes = {worker_id: own[:used] for worker_id, own in lanes.items()}
    num_lanes = sum(len(own) for own in lanes.values())
    pitch = min(max(380.0 / num_lanes, 3.0), 15.0)
    worker_gap = 6.0 if len(lanes) > 1 else 0.0
    x = Scale(left, right, LEFT, WIDTH - RIGHT)
    lanes_top = TOP + FLIGHT_HEIGHT + GAP
    tops: dict[int, float] = {}
    ranges: dict[str | None, tuple[float, float]] = {}
    y = lanes_top
    for worker_id, own in lanes.items():
        ranges[worker_id] = (y, y + pitch * len(own))
        for lane in own:
            tops[lane] = y
            y += pitch
        y += worker_gap
    lanes_bottom = y - worker_gap
    bars = tuple(_bar(life, x, tops[life.lane], pitch, origin) for life in shown)
    in_strip = [update for update in updates if update.finished_at >= left and update.entered_at <= right]
    ticks = nice_ticks(left - origin, right - origin, 10)
    names = [(sum(ranges[worker_id]) / 2, worker_id) for worker_id in lanes if worker_id is not None]
    return Strip(
        start=left,
        end=right,
        left=LEFT,
        right=WIDTH - RIGHT,
        height=lanes_bottom + AXIS_HEIGHT,
        bars=bars,
        lines=tuple(_lines(in_strip, x, ranges, lanes_top, lanes_bottom, origin)),
        ticks=tuple(Tick(x(origin + tick), seconds(tick)) for tick in ticks),
        flight=_flight_path(flight, x, most),
        flight_top=TOP,
        flight_bottom=TOP + FLIGHT_HEIGHT,
        max_flight=most,
        lanes_top=lanes_top,
        lanes_bottom=lanes_bottom,
        workers=tuple(names) if pitch * num_lanes >= 10 * len(names) else (),
    )


def _bar(life: Life, x: Scale, y: float, pitch: float, origin: float) -> Bar:
    pieces: list[Piece] = []
    for segment in life.segments:
        left, right = max(segment.start, x.low), min(segment.end, x.high)
        if right < left or (right == left and segment.end > segment.start):
            continue  # in another strip
        width = max(x(right) - x(left), 0.8)
        label = f"v{segment.version}" if segment.version is not None and width >= LABEL_ROOM and pitch >= 11 else ""
        pieces.append(Piece(x=x(left), width=width, css=colour(segment.version), label=label))
    ends_here = x.low <= life.end <= x.high
    return Bar(
        rollout_id=life.row.rollout_id,
        title=_title(life, origin),
        y=y,
        height=pitch - (1.0 if pitch >= 4 else 0.5),
        pieces=tuple(pieces),
        failed_at=x(life.end) if ends_here and has_failed(life) else None,
        open_at=x(life.end) if ends_here and life.is_open else None,
    )


def has_failed(life: Life) -> bool:
    """Whether it came to an end that is none of its own."""
    return not life.is_open and life.row.finish_reason not in ENDS_WELL


def colour(version: int | None) -> str:
    """The css class of a version."""
    return "none" if version is None else f"v{version % NUM_COLOURS}"


def _title(life: Life, origin: float) -> str:
    row = life.row
    versions = ", ".join(f"v{version} from token {first}" for first, version in row.spans) or "no tokens"
    how = row.finish_reason or "in flight when the run ended"
    lines = [
        f"{row.rollout_id}: {row.num_tokens} tokens, {how}",
        versions,
        f"{seconds(life.start - origin)} to {seconds(life.end - origin)} ({life.end - life.start:.2f} s)",
    ]
    if row.submitted_at is not None:
        lines.append(f"waited {max(life.start - row.submitted_at, 0):.2f} s to start")
    if row.reward is not None:
        lines.append(f"reward {row.reward:.3g}")
    if row.step is not None:
        lines.append(f"trained in step {row.step}, {row.staleness} versions old")
    elif row.ending is not None:
        lines.append(f"its group: {row.ending}")
    if row.error is not None:
        lines.append(row.error[:200])
    return "\n".join(lines)


def _lines(
    updates: Iterable[Update],
    x: Scale,
    ranges: Mapping[str | None, tuple[float, float]],
    top: float,
    bottom: float,
    origin: float,
) -> Iterable[Line]:
    labelled_to = -math.inf
    named: set[int] = set()
    for update in updates:
        left = x(max(update.entered_at, x.low))
        room = 7.0 * len(f"v{update.version}") + 6.0
        at_edge = left + room > x.end + RIGHT
        fits = left - (room if at_edge else 0.0) >= labelled_to and update.version not in named
        if fits:
            labelled_to = left + room
            named.add(update.version)
        own_top, own_bottom = (
            (top, bottom) if update.worker_id is None else ranges.get(update.worker_id, (bottom, bottom))
        )
        where = "" if update.worker_id is None else f" on {update.worker_id}"
        yield Line(
            version=update.version,
            x=left,
            width=max(x(min(update.finished_at, x.high)) - left, 1.0),
            top=own_top,
            bottom=own_bottom,
            label=f"v{update.version}" if fits else "",
            is_at_edge=at_edge,
            title=(
                f"update to version {update.version}{where} at {seconds(update.entered_at - origin)}\n"
                f"waited {1000 * update.wait_s:.1f} ms, generation stood still for {1000 * update.held_s:.1f} ms\n"
                f"{update.straddlers} requests that had tokens went on across it"
            ),
        )


def _flight_path(flight: Sequence[tuple[float, int]], x: Scale, most: int) -> str:
    y = Scale(0, max(most, 1), TOP + FLIGHT_HEIGHT, TOP)
    before = [number for moment, number in flight if moment <= x.low]
    level = before[-1] if before else 0
    path = [f"M{x.start:.1f},{y(0):.1f}V{y(level):.1f}"]
    for moment, number in flight:
        if x.low < moment <= x.high:
            path.append(f"H{x(moment):.1f}V{y(number):.1f}")
    path.append(f"H{x.end:.1f}V{y(0):.1f}Z")
    return "".join(path)


def seconds(value: float) -> str:
    """0.25 s, 12 s, 3:05 min."""
    if value >= 600:
        hours, minutes = divmod(round(value) // 60, 60)
        rest = round(value) % 60
        return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
    return f"{value:.3g} s"

"""Small charts as plain numbers: where each mark lies in its picture. The templates only write them down."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

WIDTH, HEIGHT = 560.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 34.0
MAX_DOTS = 60
MAX_MARKS = 400
"""Points of a line and stacks of a chart: more than its pixels can tell apart only make the page heavy."""

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels; a range of no extent to their middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    position: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Rect:
    """A bar."""

    x: float
    y: float
    width: float
    height: float
    css: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel; without marks it says so."""

    title: str
    note: str
    x_label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    band: str = ""
    """A path."""
    line: str = ""
    """A path."""
    dots: tuple[Dot, ...] = ()
    rects: tuple[Rect, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    """(css class, label)"""
    width: float = WIDTH
    height: float = HEIGHT

    @property
    def is_empty(self) -> bool:
        return not (self.line or self.dots or self.rects)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value, and the range around it."""

    x: float
    y: float
    low: float
    high: float
    title: str


def line_chart(title: str, note: str, x_label: str, points: Sequence[Point], *, from_zero: bool) -> Chart:
    """A line through the points with the band of their ranges; dots where there is room for them. Of more than `MAX_MARKS`
    points each mark is of several neighbours, and the note says so."""
    parts = runs(points, MAX_MARKS)
    points = [_merged(part) for part in parts]
    if parts and len(parts[0]) > 1:
        note = f"{note}; a mark is the mean of {len(parts[0])}, and the whole range of theirs"
    if not points:
        return Chart(title=title, note=note, x_label=x_label, x_ticks=[], y_ticks=[])
    x, x_ticks = _x_axis([point.x for point in points])
    low, high = min(point.low for point in points), max(point.high for point in points)
    y, y_ticks = _y_axis(min(low, 0.0) if from_zero else low, high)
    upper = [(x(point.x), y(point.high)) for point in points]
    lower = [(x(point.x), y(point.low)) for point in reversed(points)]
    return Chart(
        title=title,
        note=note,
        x_label=x_label,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        band=path([*upper, *lower]) + "Z" if len(points) > 1 else "",
        line=path([(x(point.x), y(point.y)) for point in points]) if len(points) > 1 else "",
        dots=tuple(
            Dot(x=x(point.x), y=y(point.y), title=point.title) for point in (points if len(points) <= MAX_DOTS else ())
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Values that lie on one another at one place."""

    x: float
    values: tuple[float, ...]
    title: str


def bar_chart(
    title: str,
    note: str,
    x_label: str,
    stacks: Sequence[Stack],
    *,
    legend: tuple[tuple[str, str], ...],
    whole: bool = False,
) -> Chart:
    """`legend`: css class and label of each value of a stack, from the bottom up. `whole`: the values are counts. Of more than
    `MAX_MARKS` stacks each one shown is the highest of several neighbours, and the note says so."""
    parts = runs(stacks, MAX_MARKS)
    stacks = [max(part, key=lambda stack: sum(stack.values)) for part in parts]
    if parts and len(parts[0]) > 1:
        note = f"{note}; the highest of each {len(parts[0])}"
    if not stacks:
        return Chart(title=title, note=note, x_label=x_label, x_ticks=[], y_ticks=[])
    x, x_ticks = _x_axis([stack.x for stack in stacks])
    y, y_ticks = _y_axis(0.0, max(sum(stack.values) for stack in stacks), whole=whole)
    span = max(stack.x for stack in stacks) - min(stack.x for stack in stacks) + 1
    span /= max(len(part) for part in parts)
    width = min(28.0, max(0.6, 0.7 * (WIDTH - LEFT - RIGHT) / span))
    rects: list[Rect] = []
    for stack in stacks:
        base = 0.0
        for (css, _), value in zip(legend, stack.values, strict=True):
            top, bottom = y(base + value), y(base)
            if value > 0:
                left = x(stack.x) - width / 2
                rects.append(
                    Rect(x=left, y=top, width=width, height=max(bottom - top, 0.5), css=css, title=stack.title)
                )
            base += value
        if base == 0:  # a value of nothing is a value: a thin line at the bottom
            rects.append(
                Rect(x=x(stack.x) - width / 2, y=y(0) - 1, width=width, height=1, css=legend[0][0], title=stack.title)
            )
    return Chart(
        title=title, note=note, x_label=x_label, x_ticks=x_ticks, y_ticks=y_ticks, rects=tuple(rects), legend=legend
    )


def runs(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """The items in at most `most` runs of neighbours, all equally long but for the last."""
    size = max(math.ceil(len(items) / most), 1)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _merged(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    return Point(
        x=fmean(point.x for point in points),
        y=fmean(point.y for point in points),
        low=min(point.low for point in points),
        high=max(point.high for point in points),
        title="",  # only dots have one, and there are fewer of them
    )


def path(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path through the points."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten; `whole`: integers."""
    if high <= low:
        return [low]
    largest = 1.5 * (high - low) / count
    power = 10.0 ** math.floor(math.log10(largest))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= largest * 1.001)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 0.25, 12, 3,400."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _x_axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[Tick]]:
    # half a place of room at both ends, for bars and for a single dot
    low, high = min(values) - 0.5, max(values) + 0.5
    scale = Scale(low, high, LEFT, WIDTH - RIGHT)
    return scale, [Tick(scale(tick), f"{tick:.0f}") for tick in nice_ticks(low, high, 8, whole=True)]


def _y_axis(low: float, high: float, *, whole: bool = False) -> tuple[Callable[[float], float], list[Tick]]:
    if high == low:
        low, high = low - (0.5 if low else 0.0), high + (0.5 if low else 1.0)
    ticks = nice_ticks(low, high, 4, whole=whole)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    # the axis ends at a tick at or beyond the data
    low = math.floor(low / step + 1e-9) * step if step else low
    high = math.ceil(high / step - 1e-9) * step if step else high
    scale = Scale(low, high, HEIGHT - BOTTOM, TOP)
    return scale, [Tick(scale(tick), number(tick)) for tick in nice_ticks(low, high, 4, whole=whole)]

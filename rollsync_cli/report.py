"""One self-contained page from a run's folder.

Inline SVG written by Jinja2, which escapes whatever it is given: the marks are plain rectangles and paths, colours are CSS, so
one file serves light and dark screens. A plotting library would write fixed colours or bring scripts along; the page has
neither scripts nor references, and its policy forbids both to the browser.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rollsync_cli.charts import number
from rollsync_cli.errors import CommandError
from rollsync_cli.panels import panels
from rollsync_cli.run_files import RolloutRow, Run, read_run
from rollsync_cli.steps import StepRow, step_rows, steps_of
from rollsync_cli.strips import NUM_COLOURS, colour, seconds
from rollsync_cli.timeline import Timeline, timeline

MAX_TEXTS = 24
"""Rollouts shown of a step."""
MAX_TEXT = 2_000
"""Characters shown of a text."""
MAX_ERRORS = 12
MAX_STEP_ROWS = 500


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Writes the page (`report.html` in the run's folder, unless `out` says where), whole or not at all, and returns its path.
    Raises RunFolderError for what is no run, CommandError for a page that is there and no file, OSError where it cannot be
    written."""
    path = Path(run)
    html = render(read_run(path))
    folder = path if path.is_dir() else path.parent
    target = Path(out) if out is not None else folder / "report.html"
    real = Path(os.path.realpath(target))
    if real.exists() and not real.is_file():  # to take its place would do away with a device
        raise CommandError(f"the page {target} cannot be written: it is no file; give another --out")
    beside = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        # what cannot be encoded (half a surrogate pair in a model's text) becomes "?"
        beside.write_text(html, encoding="utf-8", errors="replace")
        beside.replace(real)
    finally:
        beside.unlink(missing_ok=True)
    return target


def render(run: Run) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("rollsync_cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = lambda value: f"{value:.1f}".removesuffix(".0")
    picture = timeline(run)
    steps = steps_of(run.rollouts)
    rows = step_rows(steps)
    return environment.get_template("report.html.jinja").render(
        run=run,
        charts=panels(steps, run.updates),
        timeline=picture,
        findings=list(findings(run, rows, picture)),
        facts=facts(run, rows),
        step_rows=rows[-MAX_STEP_ROWS:],
        num_rows_left_out=max(len(rows) - MAX_STEP_ROWS, 0),
        columns=_columns(run.metrics),
        metrics=run.metrics[-MAX_STEP_ROWS:],
        samples=samples(steps),
        errors=_errors(run.rollouts),
        colours=range(NUM_COLOURS),
        css_of=colour,
        show=_show,
    )


# ------------------------------------------------------------------------------------------------------------ numbers


def facts(run: Run, rows: Sequence[StepRow]) -> list[tuple[str, str, str]]:
    """(value, what it is, detail) for the head of the page."""
    num_spanning = sum(row.spans_update for row in run.rollouts)
    rewards = [row.reward for row in rows if row.reward is not None]
    items = [
        (f"{len(rows):,}", "step" if len(rows) == 1 else "steps", f"{len(run.rollouts):,} rollouts"),
        (f"{sum(row.num_tokens for row in run.rollouts):,}", "tokens", f"in {seconds(run.duration_s)}"),
    ]
    if rewards:
        edge = max(min(3, len(rewards) // 2), 1)
        first, last = fmean(rewards[:edge]), fmean(rewards[-edge:])
        which = "in the only step" if len(rewards) == 1 else f"mean of the first and of the last {edge} steps"
        value = f"{last:.2f}" if len(rewards) == 1 else f"{first:.2f} → {last:.2f}"
        items.append((value, "reward", which))
    if run.rollouts:
        share = num_spanning / len(run.rollouts)
        items.append((f"{share:.0%}", "span an update", f"{num_spanning:,} rollouts were in flight at one"))
    stale = [row.staleness for row in rows if row.staleness is not None]
    if stale:
        items.append((str(max(stale)), "versions at most", "from a token's version to the trainer's"))
    if run.updates:
        held = [1000 * update.held_s for update in run.updates]
        items.append((f"{number(median(held))} ms", "pause", f"median held, {number(max(held))} ms the longest"))
    return items


def findings(run: Run, rows: Sequence[StepRow], picture: Timeline) -> Iterable[str]:
    """What the timeline shows, and what is not in it, in sentences."""
    if run.num_torn:
        yield f"{run.num_torn:,} lines of its files are no JSON and are left out: a run that is killed tears the line it writes."
    num_again = sum(row.step is not None for row in run.rollouts) - sum(row.num_rollouts for row in rows)
    if num_again:
        yield (
            f"{num_again:,} rollouts are of steps that the run took again, from a checkpoint: of a step its last record counts."
        )
    if not picture.num_drawn:
        yield "No rollout of this run has the times of its start and end, so there is no timeline."
        return
    if run.updates:
        yield (
            f"{picture.num_crossed} of {picture.num_updates} updates came while requests were in flight; "
            f"{picture.num_crossings:,} times a request went on across one, {picture.num_crossings_with_tokens:,} of them with "
            "tokens from before it and from after it (the others had none yet, or got no more)."
        )
        yield f"Generation stood still for {picture.held_share:.1%} of the time."
    else:
        yield "The run has no updates.jsonl: colours change where the token counts say, and there are no lines for updates."
    for count, what in (
        (
            picture.num_left_out,
            f"older requests are left out of the picture; the latest {picture.num_drawn:,} are in it",
        ),
        (picture.num_lines_left_out, "lines of older updates are left out of the picture"),
        (picture.num_never_started, "requests ended while they still waited to start, and are not drawn"),
        (picture.num_without_times, "rollouts have no times, and are not drawn"),
    ):
        if count:
            yield f"{count:,} {what}."


# -------------------------------------------------------------------------------------------------------------- texts


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout to read."""

    row: RolloutRow
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Some rollouts of one step."""

    step: int
    shown: list[Sample]
    num_left_out: int


def samples(steps: Mapping[int, Sequence[RolloutRow]]) -> list[Samples]:
    """What the model said in the first and in the last step, where texts were written."""
    chosen: list[Samples] = []
    for step in dict.fromkeys([*list(steps)[:1], *list(steps)[-1:]]):
        rows = [row for row in steps[step] if row.text is not None]
        if rows:
            shown = [
                Sample(row=row, prompt=_cut(row.prompt or ""), text=_cut(row.text or "")) for row in rows[:MAX_TEXTS]
            ]
            chosen.append(Samples(step=step, shown=shown, num_left_out=len(rows) - len(shown)))
    return chosen


def _cut(text: str) -> str:
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … and {len(text) - MAX_TEXT:,} more characters"


def _errors(rows: Iterable[RolloutRow]) -> list[tuple[int, str, str]]:
    """(how often, an id, what) of what went wrong, the most frequent first."""
    seen: dict[str, list[str]] = {}
    for row in rows:
        if row.error is not None:
            seen.setdefault(_cut(row.error), []).append(row.rollout_id)
    by_count = sorted(seen.items(), key=lambda item: -len(item[1]))
    return [(len(ids), ids[0], error) for error, ids in by_count[:MAX_ERRORS]]


def _columns(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for line in metrics for name in line))


def _show(value: Any) -> str:
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else str(value)
    return "" if value is None else str(value)

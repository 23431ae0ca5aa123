"""The report: what a run's folder holds is on the page, where and when it was; and nothing on the page is alive."""

import base64
import json
import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout import FinishReason, Rollout, RunLog, Timings, UpdateRecord, VersionSpan
from rollout.batches.records import rollout_lines
from rollout.fleet.rollout_log import RolloutLog
from rollsync_cli.charts import MAX_MARKS, Point, Stack, bar_chart, line_chart
from rollsync_cli.errors import CommandError, RunFolderError
from rollsync_cli.pictures import MAX_BYTES, MAX_PICTURES, SIGNATURE, read_pictures
from rollsync_cli.report import MAX_STEP_ROWS, MAX_TEXT, MAX_TEXTS, render, write_report
from rollsync_cli.run_files import read_run
from rollsync_cli.strips import Bar, Strip
from rollsync_cli.timeline import BARS_A_LANE, timeline

T0 = 1_800_000_000.0
"""When the runs of these tests begin."""


def a_rollout(name: str, start: float, end: float | None, spans: list[tuple[int, int]], **fields: Any) -> Rollout:
    """In flight from T0 + start to T0 + end, with ten tokens unless it has no spans."""
    num_tokens = 10 if spans else 0
    return Rollout(
        **{
            "rollout_id": name,
            "group_id": name.rpartition("-")[0] or name,
            "prompt_ids": [1, 2],
            "token_ids": [3] * num_tokens,
            "logprobs": [-1.0] * num_tokens,
            "loss_mask": [1] * num_tokens,
            "version_spans": [VersionSpan(first, version) for first, version in spans],
            "prefill_version": 0,
            "finish_reason": None if end is None else FinishReason.STOP,
            "reward": 1.0,
            "timings": Timings(
                submitted_at=T0 + start - 0.5, started_at=T0 + start, finished_at=None if end is None else T0 + end
            ),
            **fields,
        }
    )


def an_update(version: int, at: float, *, held_s: float = 0.1) -> UpdateRecord:
    return UpdateRecord(version=version, wait_s=0.05, held_s=held_s, straddlers=1, finished_at=T0 + at)


def a_run(
    folder: Path, rollouts: Iterable[Rollout], updates: Iterable[UpdateRecord] = (), *, step: int | None = 1, **log: Any
) -> Path:
    run = RunLog(folder / "run", **log)
    run.write_rollouts(list(rollouts), step=step, trained_version=1 if step is not None else None)
    for update in updates:
        run.write_update(update)
    return run.path


class Words:
    """A tokenizer that says the same whatever the ids."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return self.text


class Page(HTMLParser):
    """The tags, attributes and texts of a page, as a browser reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def bars_of(path: Path) -> dict[str, list[tuple[Strip, Bar]]]:
    """The bars of each rollout, over all strips."""
    found: dict[str, list[tuple[Strip, Bar]]] = {}
    for strip in timeline(read_run(path)).strips:
        for bar in strip.bars:
            found.setdefault(bar.rollout_id, []).append((strip, bar))
    return found


def moment(strip: Strip, x: float) -> float:
    """Seconds after T0 at x."""
    return strip.start - T0 + (x - strip.left) / (strip.right - strip.left) * (strip.end - strip.start)


def pieces_of(strip: Strip, bar: Bar) -> list[tuple[str, float, float]]:
    """(colour, from, to)"""
    return [
        (piece.css, round(moment(strip, piece.x), 3), round(moment(strip, piece.x + piece.width), 3))
        for piece in bar.pieces
    ]


# ------------------------------------------------------------------------------------------------- nothing is alive

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}{% raw %}]]>"


def test_what_a_model_says_is_text_wherever_it_stands(tmp_path: Path) -> None:
    hostile = a_rollout(
        HOSTILE, 0, 2, [(0, 0)], group_id=HOSTILE, worker_id=HOSTILE, metadata={"prompt": HOSTILE}, error=HOSTILE
    )
    path = a_run(tmp_path, [hostile], tokenizer=Words(HOSTILE))
    (path / "metrics.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    page = Page(write_report(path).read_text())
    assert not {"script", "img", "iframe", "object", "link", "form", "a", "base"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    texts = "".join(page.texts)
    assert texts.count(HOSTILE) >= 6, "id, prompt, response, error, name and value of a metric"
    assert ("g", "data-id", HOSTILE) in page.attributes


def test_the_page_refers_to_nothing_and_forbids_it(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 2, [(0, 0), (4, 1)])], [an_update(1, 1.0)])
    html = write_report(path).read_text()
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link", html)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in Page(html).attributes


def test_the_page_is_made_for_dark_screens_too(tmp_path: Path) -> None:
    html = write_report(a_run(tmp_path, [a_rollout("r", 0, 2, [(0, 0)])])).read_text()
    assert "prefers-color-scheme: dark" in html
    light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in html.split("prefers-color-scheme: dark")[:2])
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    assert used <= light
    assert light == dark, "a colour has no value for dark screens"
    assert not re.search(r'(fill|stroke)="#', html), "a mark with a colour of its own"


def test_half_a_character_does_not_stop_the_report(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 2, [(0, 0)])], tokenizer=Words("half \ud83d, null \0, turned \u202e"))
    html = write_report(path).read_text(encoding="utf-8")
    assert "half ?" in html
    assert "\0" not in html


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"metadata": {"prompt": "as named"}, "prompt": "as read", "prompt_ids": [7, 8]}, "as named"),
        ({"prompt": "as read", "prompt_ids": [7, 8]}, "as read"),
        ({"prompt_ids": [7, 8]}, "[7, 8]"),
        ({}, ""),
    ],
)
def test_the_prompt_is_shown_as_it_was_named_else_as_it_was_read_else_by_its_ids(
    tmp_path: Path, changes: dict[str, Any], shown: str
) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({**GOOD, "text": "an answer", **changes}) + "\n")
    html = write_report(tmp_path).read_text()
    assert re.findall(r'<td><pre dir="auto">(.*)</pre></td>', html) == [shown, "an answer"]


def test_a_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    rollouts = [a_rollout(f"r-{i}", 0, 2, [(0, 0)], metadata={"prompt": "short"}) for i in range(MAX_TEXTS + 3)]
    html = write_report(a_run(tmp_path, rollouts, tokenizer=Words("x" * (MAX_TEXT + 1234)))).read_text()
    assert html.count("1,234 more characters") == MAX_TEXTS
    assert "3 more not shown" in html


# ----------------------------------------------------------------------------------------------------- the timeline


def test_every_rollout_is_in_the_timeline_with_its_spans_at_the_moments_of_the_updates(tmp_path: Path) -> None:
    updates = [an_update(1, 2.0), an_update(2, 6.0)]
    rollouts = [
        a_rollout("a", 0, 1.5, [(0, 0)]),
        a_rollout("b", 0, 8, [(0, 0), (1, 1), (2, 2)]),
        a_rollout("c", 3, 10, [(0, 1), (9, 2)]),
    ]
    bars = bars_of(a_run(tmp_path, rollouts, updates))
    assert {name: [pieces_of(*bar) for bar in drawn] for name, drawn in bars.items()} == {
        "a": [[("v0", 0.0, 1.5)]],
        "b": [[("v0", 0.0, 2.0), ("v1", 2.0, 6.0), ("v2", 6.0, 8.0)]],
        "c": [[("v1", 3.0, 6.0), ("v2", 6.0, 10.0)]],
    }


def test_the_page_has_the_pieces_of_the_timeline(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout(f"r-{i}", i, i + 3, [(0, 0), (4, 1)]) for i in range(40)], [an_update(1, 2.0)])
    page = Page(write_report(path).read_text())
    assert [value for tag, name, value in page.attributes if (tag, name) == ("g", "data-id")] == [
        f"r-{i}" for i in range(40)
    ]
    drawn = Counter(value for tag, name, value in page.attributes if (tag, name) == ("rect", "class"))
    assert (drawn["v0"], drawn["v1"]) == (40, 40)
    assert [value for _, name, value in page.attributes if name == "data-version"] == ["1"]


def test_an_update_is_a_line_for_as_long_as_it_held_generation(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 10, [(0, 0), (4, 1)])], [an_update(1, 5.0, held_s=2.0)])
    (strip,) = timeline(read_run(path)).strips
    (line,) = strip.lines
    assert moment(strip, line.x) == pytest.approx(3.0)
    assert moment(strip, line.x + line.width) == pytest.approx(5.0)
    assert (line.top, line.bottom, line.label) == (strip.lanes_top, strip.lanes_bottom, "v1")


def test_each_engine_has_lanes_of_its_own_and_updates_of_its_own(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    for worker, at in (("w0", 2.0), ("w1", 3.0)):
        rollouts = [a_rollout(f"{worker}-{i}", 0, 5, [(0, 0), (4, 1)], worker_id=worker) for i in range(3)]
        log.write_rollouts(rollouts, step=1, trained_version=1)
        log.write_update(an_update(1, at), worker_id=worker)
    bars = bars_of(log.path)
    (strip,) = timeline(read_run(log.path)).strips
    for line, worker, at in zip(strip.lines, ("w0", "w1"), (2.0, 3.0), strict=True):
        assert moment(strip, line.x + line.width) == pytest.approx(at, abs=0.01)
        for i in range(3):
            ((_, bar),) = bars[f"{worker}-{i}"]
            assert line.top <= bar.y <= bar.y + bar.height <= line.bottom
            assert pieces_of(strip, bar) == [("v0", 0.0, at), ("v1", at, 5.0)]
    assert strip.lines[0].bottom <= strip.lines[1].top
    assert [name for _, name in strip.workers] == ["w0", "w1"]


def test_without_the_moment_of_an_update_a_span_begins_as_far_on_as_its_tokens(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 10, [(0, 0), (4, 1)])])
    ((strip, bar),) = bars_of(path)["r"]
    assert pieces_of(strip, bar) == [("v0", 0.0, 4.0), ("v1", 4.0, 10.0)]
    assert "there are no lines for updates" in write_report(path).read_text()


def test_requests_in_flight_at_once_never_share_a_lane(tmp_path: Path) -> None:
    rollouts = [a_rollout(f"r-{i}", i % 7, i % 7 + 1 + i % 5, [(0, 0)]) for i in range(60)]
    bars = [bar for drawn in bars_of(a_run(tmp_path, rollouts)).values() for _, bar in drawn]
    assert len(bars) == 60
    lanes: dict[float, list[tuple[float, float]]] = {}
    for bar in bars:
        lanes.setdefault(bar.y, []).append((bar.pieces[0].x, bar.pieces[-1].x + bar.pieces[-1].width))
    for taken in lanes.values():
        taken.sort()
        assert all(left[1] <= right[0] + 1e-6 for left, right in pairwise(taken))
    in_flight = [sum(i % 7 <= t < i % 7 + 1 + i % 5 for i in range(60)) for t in range(12)]
    assert len(lanes) == max(in_flight), "as many lanes as requests were in flight"


def test_a_rollout_that_never_ended_reaches_the_end_of_the_run_and_is_marked(tmp_path: Path) -> None:
    rollouts = [a_rollout("done", 0, 10, [(0, 0)]), a_rollout("open", 4, None, [(0, 0)])]
    bars = bars_of(a_run(tmp_path, rollouts))
    ((strip, bar),) = bars["open"]
    assert pieces_of(strip, bar) == [("v0", 4.0, 10.0)]
    assert (bar.open_at, bar.failed_at) == (strip.right, None)
    ((_, done),) = bars["done"]
    assert (done.open_at, done.failed_at) == (None, None)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT])
def test_a_rollout_that_ended_badly_is_marked_where_it_ended(tmp_path: Path, reason: FinishReason) -> None:
    rollouts = [a_rollout("good", 0, 10, [(0, 0)]), a_rollout("bad", 1, 4, [(0, 0)], finish_reason=reason)]
    path = a_run(tmp_path, rollouts)
    ((strip, bar),) = bars_of(path)["bad"]
    assert bar.failed_at is not None
    assert moment(strip, bar.failed_at) == pytest.approx(4.0)
    assert "ended by an error" in write_report(path).read_text()


def test_a_rollout_without_tokens_is_drawn_and_one_that_never_started_is_counted(tmp_path: Path) -> None:
    never = Timings(submitted_at=T0, started_at=None, finished_at=T0 + 1)
    rollouts = [
        a_rollout("empty", 0, 1, [], finish_reason=FinishReason.ABORT),
        a_rollout("waited", 0, 1, [], finish_reason=FinishReason.ABORT, timings=never),
        a_rollout("timeless", 0, 1, [(0, 0)], timings=None),
    ]
    path = a_run(tmp_path, rollouts)
    ((strip, bar),) = bars_of(path)["empty"]
    assert pieces_of(strip, bar) == [("none", 0.0, 1.0)]
    picture = timeline(read_run(path))
    assert (picture.num_drawn, picture.num_never_started, picture.num_without_times) == (1, 1, 1)
    html = write_report(path).read_text()
    assert "1 requests ended while they still waited to start" in html
    assert "1 rollouts have no times" in html


def test_a_long_run_breaks_into_strips_and_a_request_at_the_break_is_in_both(tmp_path: Path) -> None:
    rollouts = [a_rollout(f"r-{i}", 2 * i, 2 * i + 2, [(0, 0)]) for i in range(3 * BARS_A_LANE)]
    rollouts.append(a_rollout("long", 0, 6 * BARS_A_LANE, [(0, 0)]))
    path = a_run(tmp_path, rollouts, [an_update(v, 10.0 * v) for v in range(1, 15)])
    strips = timeline(read_run(path)).strips
    assert len(strips) == 2
    assert (strips[0].end, strips[1].end) == (strips[1].start, T0 + 6 * BARS_A_LANE)
    bars = bars_of(path)
    assert set(bars) == {rollout.rollout_id for rollout in rollouts}
    assert [pieces_of(*part) for part in bars["long"]] == [
        [("v0", 0.0, 3.0 * BARS_A_LANE)],
        [("v0", 3.0 * BARS_A_LANE, 6.0 * BARS_A_LANE)],
    ]
    for name, drawn in bars.items():
        assert sum(piece.width for _, bar in drawn for piece in bar.pieces) > 0.8 * len(drawn), name
    assert sum(len(strip.lines) for strip in strips) == 14


def test_of_more_requests_than_can_be_drawn_the_latest_are(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout(f"r-{i}", i, i + 1, [(0, 0)]) for i in range(9)], [an_update(1, 2.5)])
    picture = timeline(read_run(path), max_drawn=4)
    assert [bar.rollout_id for strip in picture.strips for bar in strip.bars] == ["r-5", "r-6", "r-7", "r-8"]
    assert (picture.num_drawn, picture.num_left_out, picture.num_updates) == (4, 5, 0)


def test_of_more_updates_than_can_be_drawn_the_latest_have_lines_and_all_are_counted(tmp_path: Path) -> None:
    rollouts = [a_rollout(f"r-{i}", 0, 10, [(0, 0)]) for i in range(3)]
    path = a_run(tmp_path, rollouts, [an_update(version, version) for version in range(1, 8)])
    picture = timeline(read_run(path), max_drawn=3)
    assert [line.version for strip in picture.strips for line in strip.lines] == [5, 6, 7]
    assert (picture.num_updates, picture.num_crossings, picture.num_lines_left_out) == (7, 21, 4)


def test_updates_that_requests_went_across_are_counted(tmp_path: Path) -> None:
    rollouts = [
        a_rollout("a", 0, 4, [(0, 0), (5, 1)]),
        a_rollout("b", 1, 4, [(0, 0), (5, 1)]),
        a_rollout("in prefill", 1.5, 4, [(0, 1)]),
        a_rollout("got no more", 1.5, 4, [(0, 0)]),
        a_rollout("c", 6, 10, [(0, 1)], prefill_version=1),
    ]
    path = a_run(tmp_path, rollouts, [an_update(1, 2.0), an_update(2, 5.0)])
    picture = timeline(read_run(path))
    assert (picture.num_updates, picture.num_crossed) == (2, 1)
    assert (picture.num_crossings, picture.num_crossings_with_tokens) == (4, 2)
    assert picture.held_share == pytest.approx(0.2 / 10)
    html = write_report(path).read_text()
    assert (
        "1 of 2 updates came while requests were in flight; 4 times a request went on across one, 2 of them with tokens"
    ) in html
    assert "3 rollouts were in flight at one" in html


def test_the_update_of_several_engines_to_a_version_is_one(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    for worker, versions in (("w0", (1, 2)), ("w1", (1, 2, 3))):
        log.write_rollouts([a_rollout(worker, 0, 5, [(0, 0), (4, 1)], worker_id=worker)], step=1, trained_version=1)
        for version in versions:
            log.write_update(an_update(version, 4.0 * version), worker_id=worker)
    picture = timeline(read_run(log.path))
    assert (picture.num_updates, picture.num_crossed, picture.num_crossings) == (3, 1, 2)
    assert "1 of 3 updates came" in write_report(log.path).read_text()


def test_the_time_of_the_run_is_that_of_the_timeline(tmp_path: Path) -> None:
    rollouts = [a_rollout("a", 2, 4, [(0, 0)]), a_rollout("open", 5, None, [(0, 0)])]
    for number, (updates, end) in enumerate((([], 5.0), ([an_update(1, 9.0)], 9.0))):
        run = read_run(a_run(tmp_path / str(number), rollouts, updates))
        (strip,) = timeline(run).strips
        assert (strip.start - T0, strip.end - T0) == (2.0, end)
        assert run.duration_s == end - 2.0
        assert f"in {end - 2:.0f} s" in render(run)


def test_the_area_above_the_lanes_is_how_many_are_in_flight(tmp_path: Path) -> None:
    rollouts = [a_rollout("a", 0, 10, [(0, 0)]), a_rollout("b", 2, 4, [(0, 0)])]
    (strip,) = timeline(read_run(a_run(tmp_path, rollouts))).strips
    assert strip.max_flight == 2
    moves = re.findall(r"H([\d.]+)V([\d.]+)", strip.flight)
    half = (strip.flight_top + strip.flight_bottom) / 2
    seen = [(round(moment(strip, float(x)), 1), float(y)) for x, y in moves]
    assert seen == [(2.0, strip.flight_top), (4.0, half), (10.0, strip.flight_bottom), (10.0, strip.flight_bottom)]


# ------------------------------------------------------------------------------------------------------- the panels


def test_reward_length_and_staleness_are_those_of_each_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    for step, rewards in enumerate(([0.0, 1.0], [1.0, 1.0]), 1):
        rollouts = [a_rollout(f"s{step}-{i}", 0, 1, [(0, step - 1)], reward=reward) for i, reward in enumerate(rewards)]
        log.write_rollouts(rollouts, step=step, trained_version=step)
    log.write_rollouts([a_rollout("never trained", 0, 1, [(0, 0)], reward=-100.0)])
    log.write_update(an_update(1, 1.0))
    html = write_report(log.path).read_text()
    assert "step 1: 0.500 ± 0.980, 2 rollouts" in html
    assert "step 2: 1.000 ± 0.000, 2 rollouts" in html
    assert "step 1: 10.0 tokens, 10 to 10" in html
    assert "step 1: 1.00 in the mean, 1 at most" in html
    assert "version 1: held 100.0 ms, waited 50.0 ms" in html
    assert "-100" not in re.sub(r"<title>[^<]*</title>", "", html)


def test_a_step_that_a_run_took_again_from_a_checkpoint_is_as_its_last_record_says(tmp_path: Path) -> None:
    """Three lives of a controller: the second and the third go on from the end of step 1."""
    lines = [
        rollout_lines(
            [a_rollout(f"{life}-{step}-{i}", 0, 1, [(0, version)], reward=reward)],
            step=step,
            trained_version=version,
            ending="consumed",
        )
        for life, step, version, reward in ((1, 1, 0, 0.25), (1, 2, 1, 0.5), (2, 2, 3, 0.75), (3, 2, 5, 1.0))
        for i in range(2)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(lines))
    html = write_report(tmp_path).read_text()
    assert re.findall(r"step \d: [\d.]+ ± [\d.]+, \d rollouts", html) == [
        "step 1: 0.250 ± 0.000, 2 rollouts",
        "step 2: 1.000 ± 0.000, 2 rollouts",
    ]
    assert "4 rollouts are of steps that the run took again" in html


def test_metrics_are_on_the_page_of_a_run_that_trained_on_no_rollouts(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    for step in range(MAX_STEP_ROWS + 1):
        log.write_metrics({"step": step, "held_out": step / 1000})
    page = Page(write_report(log.path).read_text())
    assert "held_out" in page.texts
    assert "0.5" in page.texts
    assert f"metrics.jsonl, its latest {MAX_STEP_ROWS} lines" in page.texts


def test_a_loop_may_write_the_rollouts_of_a_step_under_several_versions(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    for version, reward in ((0, 0.0), (1, 1.0)):
        rollout = a_rollout(f"r-{version}", 0, 1, [(0, version)], reward=reward)
        log.write_rollouts([rollout], step=1, trained_version=version)
    html = write_report(log.path).read_text()
    assert "step 1: 0.500 ± 0.980, 2 rollouts" in html
    assert "took again" not in html


@pytest.mark.parametrize("rollouts", [[], [a_rollout("r", 0, 0, [(0, 0)], reward=None)]], ids=["none", "one"])
def test_a_run_of_no_or_one_rollout_has_a_page(tmp_path: Path, rollouts: list[Rollout]) -> None:
    html = write_report(a_run(tmp_path, rollouts)).read_text()
    assert "nothing to show" in html
    assert not re.search(r'="[^"]*\b(nan|inf)\b', html)


def test_rewards_that_are_no_numbers_leave_the_others_alone(tmp_path: Path) -> None:
    rewards = [float("nan"), float("inf"), 0.25]
    html = write_report(
        a_run(tmp_path, [a_rollout(f"r-{i}", 0, 1, [(0, 0)], reward=reward) for i, reward in enumerate(rewards)])
    ).read_text()
    assert "step 1: 0.250 ± 0.000, 1 rollouts" in html
    assert not re.search(r'="-?(nan|inf)', html)


def test_a_chart_has_room_for_a_long_run_and_hides_no_extreme() -> None:
    num, spike = 25 * MAX_MARKS + 7, 4321
    points = [
        Point(x=step, y=1.0, low=0.0, high=9.0 if step == spike else 2.0, title=f"step {step}") for step in range(num)
    ]
    line = line_chart("Reward", "mean", "step", points, from_zero=False)
    assert 0.9 * MAX_MARKS < line.line.count(",") <= MAX_MARKS
    assert line.band.count(",") == 2 * line.line.count(",")
    assert line.note == "mean; a mark is the mean of 26, and the whole range of theirs"
    heights = [float(place.partition(",")[2].rstrip("Z")) for place in line.band[1:].split("L")]
    assert sorted(heights)[0] < sorted(heights)[1] - 50, "the spike is gone"
    stacks = [Stack(x=step, values=(1.0, 8.0 if step == spike else 0.0), title=f"v{step}") for step in range(num)]
    bars = bar_chart("Pauses", "ms", "version", stacks, legend=(("held", "held"), ("wait", "wait")))
    assert 0.9 * MAX_MARKS < len(bars.rects) <= MAX_MARKS + 1
    assert bars.note == "ms; the highest of each 26"
    assert f"v{spike}" in {rect.title for rect in bars.rects}


def test_a_chart_of_a_short_run_shows_each_step() -> None:
    points = [Point(x=step, y=step, low=step, high=step, title=f"step {step}") for step in range(MAX_MARKS)]
    line = line_chart("Reward", "mean", "step", points, from_zero=False)
    assert (line.line.count(","), line.note) == (MAX_MARKS, "mean")


# -------------------------------------------------------------------------------------------------------- the files


def test_a_line_that_was_cut_short_is_left_out_and_counted_wherever_it_is(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout(f"r-{i}", 0, 1, [(0, 0)]) for i in range(3)])
    file = path / "rollouts.jsonl"
    first, second, third = file.read_text().splitlines(keepends=True)
    for text in (
        first + second[:-30],
        first + second[:-30] + "\n" + third,
        first + second[:-30] + third,
        first + "[" * 99999,
    ):
        file.write_text(text)
        run = read_run(path)
        assert [row.rollout_id for row in run.rollouts] == (["r-0", "r-2"] if text.endswith("\n" + third) else ["r-0"])
        assert run.num_torn == 1
        assert "1 lines of its files are no JSON and are left out" in write_report(path).read_text()


def test_a_run_that_goes_on_after_it_was_killed_in_a_line_loses_only_that_line(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout(f"r-{i}", 0, 1, [(0, 0)]) for i in range(2)], [an_update(1, 0.5)])
    for name in ("rollouts.jsonl", "updates.jsonl"):
        whole = (path / name).read_text()
        (path / name).write_text(whole[:-30])
    log = RolloutLog(path / "rollouts.jsonl", None)
    log.write_update("w0", an_update(2, 0.7))
    log.close()
    again = RolloutLog(path / "rollouts.jsonl", None)
    again.write_update("w0", an_update(3, 0.9))
    again.close()
    run = read_run(path)
    assert [row.rollout_id for row in run.rollouts] == ["r-0"]
    assert [update.version for update in run.updates] == [2, 3]
    assert run.num_torn == 2


GOOD = {
    "rollout_id": "r",
    "token_ids": [3, 4],
    "version_spans": [[0, 1]],
    "reward": 1.0,
    "step": 1,
    "trained_version": 1,
    "timings": {"submitted_at": 1.0, "started_at": 2.0, "finished_at": 3.0},
}
GOOD_UPDATE = {"version": 1, "wait_s": 0.1, "held_s": 0.1, "finished_at": 2.5}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_id": None}, "rollout_id is missing"),
        ({"step": "2"}, "step must be a whole number, got '2'"),
        ({"step": float("nan")}, "step must be a whole number, got nan"),
        ({"step": True}, "step must be a whole number, got True"),
        ({"trained_version": "3"}, "trained_version must be a whole number"),
        ({"text": 5}, "text must be text, got 5"),
        ({"prompt": 5}, "prompt must be text, got 5"),
        ({"worker_id": 5}, "worker_id must be text"),
        ({"group_id": 5}, "group_id must be text"),
        ({"error": {"a": 1}}, "error must be text"),
        ({"reward": "1"}, "reward must be a number"),
        ({"reward": 10**400}, "reward must be a number, got one of 401 digits"),
        ({"token_ids": None}, "token_ids is missing"),
        ({"token_ids": "ab"}, "token_ids must be a list"),
        ({"version_spans": [[0, 1], [2, 2]]}, "below the 2 tokens"),
        ({"version_spans": [[0, 1], [0, 2]]}, "begin at 0 and rise"),
        ({"version_spans": [[0, 1.5]]}, "pairs of whole numbers"),
        ({"token_ids": [], "version_spans": [[0, 1], [1, 2]]}, "below the 0 tokens"),
        ({"metadata": "abc"}, "metadata must be an object"),
        ({"timings": [1]}, "timings must be an object"),
        ({"timings": {"started_at": "x"}}, "started_at must be a number"),
        ({"timings": {"started_at": float("nan")}}, "started_at must be seconds"),
        ({"timings": {"started_at": 1.0, "finished_at": float("inf")}}, "finished_at must be seconds"),
    ],
)
def test_a_field_that_is_not_of_the_format_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, **changes})}\n")
    with pytest.raises(RunFolderError, match=r"rollouts\.jsonl:2: ") as refusal:
        write_report(tmp_path)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": None}, "version is missing"),
        ({"held_s": float("nan")}, "held_s must be seconds"),
        ({"wait_s": -1}, "wait_s must be seconds"),
        ({"finished_at": float("inf")}, "finished_at must be seconds"),
        ({"finished_at": 1e300}, "finished_at must be seconds"),
        ({"worker_id": 3}, "worker_id must be text"),
    ],
)
def test_a_field_of_an_update_that_is_not_of_the_format_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    (tmp_path / "rollouts.jsonl").write_text(f"{json.dumps(GOOD)}\n")
    (tmp_path / "updates.jsonl").write_text(f"{json.dumps({**GOOD_UPDATE, **changes})}\n")
    with pytest.raises(RunFolderError, match=r"updates\.jsonl:1: ") as refusal:
        write_report(tmp_path)
    assert says in str(refusal.value)


def test_rewards_near_the_largest_number_leave_a_page(tmp_path: Path) -> None:
    lines = [{**GOOD, "reward": reward} for reward in (1e308, -1e308, 0.5)]
    (tmp_path / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "step 1: 0.500 ± 0.000, 1 rollouts" in write_report(tmp_path).read_text()


def test_a_mark_at_the_beginning_of_a_file_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text(f"\ufeff{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n", encoding="utf-8")
    run = read_run(tmp_path)
    assert (len(run.rollouts), run.num_torn) == (2, 0)


def test_a_file_of_rollouts_alone_is_a_run(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 1, [(0, 0)])])
    for name in ("updates.jsonl", "metrics.jsonl"):
        (path / name).unlink()
    assert len(read_run(path / "rollouts.jsonl").rollouts) == 1
    assert write_report(path / "rollouts.jsonl") == path / "report.html"
    assert write_report(path, tmp_path / "elsewhere.html").read_text() == (path / "report.html").read_text()


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 1, [(0, 0)])])
    write_report(path)
    before = (path / "report.html").read_text()
    (path / "rollouts.jsonl").write_text("no JSON\n")
    with pytest.raises(RunFolderError):
        write_report(path)
    with pytest.raises(OSError, match="nowhere"):
        write_report(a_run(tmp_path / "other", []), tmp_path / "nowhere" / "page.html")
    assert (path / "report.html").read_text() == before
    assert sorted(file.name for file in path.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "rollouts.jsonl",
        "updates.jsonl",
    ]


def test_a_folder_without_a_run_says_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no .*rollouts\.jsonl: give the folder of a run"):
        read_run(tmp_path)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = read_run(a_run(tmp_path, [a_rollout("r", 0, 2, [(0, 0), (4, 1)])], [an_update(1, 1.0)]))
    assert render(run) == render(run)


def test_metadata_is_in_the_lines_and_what_json_cannot_say_is_its_repr(tmp_path: Path) -> None:
    path = a_run(tmp_path, [a_rollout("r", 0, 1, [(0, 0)], metadata={"answer": 7, "odd": {1}})])
    (line,) = map(json.loads, (path / "rollouts.jsonl").read_text().splitlines())
    assert line["metadata"] == {"answer": 7, "odd": "{1}"}


def test_of_many_pngs_the_first_are_in_the_page_and_no_other_is_read(tmp_path: Path) -> None:
    size = 2**18
    for number in range(5 * MAX_PICTURES):
        (tmp_path / f"{number:02}.png").write_bytes(SIGNATURE + bytes(size))
    tracemalloc.start()
    try:
        pictures = read_pictures(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [picture.name for picture in pictures] == [f"{number:02}.png" for number in range(MAX_PICTURES)]
    assert most < 2 * MAX_PICTURES * size * 4 / 3, "as much as twice those that are kept, in base64"


def test_the_pngs_of_the_folder_are_in_the_page_and_nothing_else_is(tmp_path: Path) -> None:
    folder = a_run(tmp_path, [a_rollout("a-0", 0, 1, [(0, 0)])])
    png = SIGNATURE + b"curves"
    (folder / "curves.png").write_bytes(png)
    (folder / "no picture.png").write_text("<script>alert(1)</script>")
    (folder / "large.png").write_bytes(SIGNATURE + bytes(MAX_BYTES))
    html = write_report(folder).read_text()
    assert re.findall(r'src="([^"]*)"', html) == [f"data:image/png;base64,{base64.b64encode(png).decode()}"]


def test_a_pipe_among_the_files_of_a_run_is_not_waited_for(tmp_path: Path) -> None:
    folder = a_run(tmp_path, [a_rollout("r-0", 0, 1, [(0, 0)])])
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(folder / "pipe.png")
    assert read_run(folder).pictures == []
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl is no file; remove it"):
        read_run(folder)


def test_a_page_does_not_take_the_place_of_what_is_no_file(tmp_path: Path) -> None:
    folder = a_run(tmp_path, [a_rollout("r-0", 0, 1, [(0, 0)])])
    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for out in (pipe, link, tmp_path, "", "/"):
        with pytest.raises(CommandError, match="it is no file"):
            write_report(folder, out)
    assert pipe.is_fifo()
    assert link.is_symlink()

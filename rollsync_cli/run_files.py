"""Reads a run's folder as `rollout.RunLog` and `RolloutConfig.rollouts_jsonl` write it, without torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollsync_cli.errors import RunFolderError

ROLLOUTS, UPDATES, METRICS = "rollouts.jsonl", "updates.jsonl", "metrics.jsonl"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """One line of `rollouts.jsonl`. Times are in seconds since the epoch."""

    rollout_id: str
    group_id: str | None
    sample_index: int
    worker_id: str | None
    step: int | None
    """The batch it was trained in; None: in none."""
    trained_version: int | None
    ending: str | None
    prompt: str | None
    text: str | None
    num_tokens: int
    reward: float | None
    finish_reason: str | None
    """None: it was in flight when it was written."""
    error: str | None
    spans: tuple[tuple[int, int], ...]
    """(first token, version) of each."""
    submitted_at: float | None
    started_at: float | None
    finished_at: float | None

    @property
    def staleness(self) -> int | None:
        """Versions from its oldest token to the trainer's when it was handed out."""
        if self.trained_version is None or not self.spans:
            return None
        return self.trained_version - self.spans[0][1]


@dataclass(frozen=True, kw_only=True)
class Update:
    """One line of `updates.jsonl`: a live update of one engine."""

    version: int
    worker_id: str | None
    wait_s: float
    held_s: float
    straddlers: int
    finished_at: float

    @property
    def entered_at(self) -> float:
        """When generation stood still."""
        return self.finished_at - self.held_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left behind."""

    name: str
    rollouts: list[RolloutRow]
    updates: list[Update]  # by time
    metrics: list[Mapping[str, Any]]

    @property
    def duration_s(self) -> float:
        """From the first start of a request to the last end that is known."""
        starts = [row.started_at for row in self.rollouts if row.started_at is not None]
        ends = [row.finished_at for row in self.rollouts if row.finished_at is not None]
        return max(max(ends) - min(starts), 0.0) if starts and ends else 0.0

    def steps(self) -> dict[int, list[RolloutRow]]:
        """What was trained on, by step."""
        steps: dict[int, list[RolloutRow]] = {}
        for row in self.rollouts:
            if row.step is not None:
                steps.setdefault(row.step, []).append(row)
        return dict(sorted(steps.items()))


def read_run(path: Path) -> Run:
    """`path`: the folder, or the file of rollouts in it. A last line that was cut short is left out, as are the files of
    updates and metrics where there are none. Raises RunFolderError."""
    rollouts = path / ROLLOUTS if path.is_dir() else path
    if not rollouts.is_file():
        raise RunFolderError(
            f"there is no {rollouts}: give the folder of a run, as the demo's --out, rollout.RunLog or "
            "RolloutConfig(rollouts_jsonl=...) write one"
        )
    folder = rollouts.parent
    return Run(
        name=folder.resolve().name,
        rollouts=[_parsed(_rollout_row, line, where) for where, line in _lines(rollouts)],
        updates=sorted(
            (_parsed(_update, line, where) for where, line in _lines(folder / UPDATES)),
            key=lambda update: update.finished_at,
        ),
        metrics=[line for _, line in _lines(folder / METRICS)],
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is, and what it says."""
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                except ValueError as error:
                    if not text.endswith("\n"):
                        return  # the run was killed as it wrote it
                    raise RunFolderError(f"{path}:{number}: no JSON ({error}); remove the line") from None
                if not isinstance(line, dict):
                    raise RunFolderError(f"{path}:{number}: must be a JSON object, got {text!r:.60}; remove the line")
                yield f"{path}:{number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None


def _parsed(parse: Callable[[dict[str, Any]], T], line: dict[str, Any], where: str) -> T:
    try:
        return parse(line)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{where}: {type(error).__name__}: {error}; it is no line of this release's format"
        ) from None


def _rollout_row(line: dict[str, Any]) -> RolloutRow:
    timings, metadata = line.get("timings") or {}, line.get("metadata") or {}
    prompt = metadata.get("prompt")
    return RolloutRow(
        rollout_id=str(line["rollout_id"]),
        group_id=line.get("group_id"),
        sample_index=int(line.get("sample_index", 0)),
        worker_id=line.get("worker_id"),
        step=line.get("step"),
        trained_version=line.get("trained_version"),
        ending=line.get("ending"),
        prompt=None if prompt is None else str(prompt),
        text=line.get("text"),
        num_tokens=len(line["token_ids"]),
        reward=None if line.get("reward") is None else float(line["reward"]),
        finish_reason=line.get("finish_reason"),
        error=line.get("error"),
        spans=tuple((int(start), int(version)) for start, version in line["version_spans"]),
        submitted_at=timings.get("submitted_at"),
        started_at=timings.get("started_at"),
        finished_at=timings.get("finished_at"),
    )


def _update(line: dict[str, Any]) -> Update:
    return Update(
        version=int(line["version"]),
        worker_id=line.get("worker_id"),
        wait_s=float(line["wait_s"]),
        held_s=float(line["held_s"]),
        straddlers=int(line.get("straddlers", 0)),
        finished_at=float(line["finished_at"]),
    )

"""Reads a run's folder as `rollout.RunLog` and `RolloutConfig.rollouts_jsonl` write it, without torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollsync_cli.errors import RunFolderError
from rollsync_cli.fields import Fields, is_whole
from rollsync_cli.pictures import Picture, read_pictures

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
    prefill_version: int | None
    submitted_at: float | None
    started_at: float | None
    finished_at: float | None

    @property
    def spans_update(self) -> bool:
        """Its KV cache and its tokens are of more than one version."""
        versions = {version for _, version in self.spans}
        return len(versions if self.prefill_version is None else versions | {self.prefill_version}) > 1

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
    pictures: list[Picture] = field(default_factory=list)
    num_torn: int = 0
    """Lines of its files that are no JSON."""

    @property
    def started_at(self) -> float | None:
        """The first start of a request; None if none is known."""
        return min((row.started_at for row in self.rollouts if row.started_at is not None), default=None)

    @property
    def ended_at(self) -> float | None:
        """The last start or end of a request, or end of an update, that is known."""
        moments = [
            moment for row in self.rollouts for moment in (row.started_at, row.finished_at) if moment is not None
        ]
        return max([*moments, *(update.finished_at for update in self.updates)], default=None)

    @property
    def duration_s(self) -> float:
        """As long as the timeline is, unless that leaves out old requests."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        return max(self.ended_at - self.started_at, 0.0)


def read_run(path: Path) -> Run:
    """`path`: the folder, or the file of rollouts in it. Lines that are no JSON are left out and counted: a run that was
    killed tears the line that it writes, and may have gone on in the same file. So are the files of updates and metrics where
    there are none. Raises RunFolderError for what is no run, and for JSON that is not of the format."""
    try:
        path = path / ROLLOUTS if path.is_dir() else path
        is_there = path.is_file()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}; give a run that you may read") from None
    if not is_there:
        raise RunFolderError(
            f"there is no {path}: give the folder of a run, as the demo's --out, rollout.RunLog or "
            "RolloutConfig(rollouts_jsonl=...) write one"
        )
    folder = path.parent
    files = [JsonLines(path), JsonLines(folder / UPDATES), JsonLines(folder / METRICS)]
    rollouts = [_parsed(_rollout_row, line, where) for where, line in files[0]]
    updates = [_parsed(_update, line, where) for where, line in files[1]]
    metrics: list[Mapping[str, Any]] = [line for _, line in files[2]]
    if files[0].num_torn and not rollouts:
        raise RunFolderError(f"{path}: none of its {files[0].num_torn} lines is JSON; give the file of a run")
    return Run(
        name=folder.resolve().name,
        rollouts=rollouts,
        updates=sorted(updates, key=lambda update: update.finished_at),
        metrics=metrics,
        pictures=read_pictures(folder),
        num_torn=sum(file.num_torn for file in files),
    )


class JsonLines:
    """Iterates over (where it is, what it says) of each line; of none where there is no file. Raises RunFolderError for
    a line of JSON that is no object, and for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_torn = 0
        """Lines so far that are no JSON."""

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            if not self._path.exists():
                return
            if not self._path.is_file():  # a pipe's open waits for a writer, for ever
                raise RunFolderError(f"{self._path} is no file; remove it, or give another run")
            # a line may be torn inside a character
            with self._path.open(encoding="utf-8-sig", errors="replace") as file:
                for number, text in enumerate(file, 1):
                    if text.isspace():
                        continue
                    try:
                        line = json.loads(text)
                    except (ValueError, RecursionError):
                        self.num_torn += 1
                        continue
                    where = f"{self._path}:{number}"
                    if not isinstance(line, dict):
                        raise RunFolderError(f"{where}: must be a JSON object, got {text!r:.60}; remove the line")
                    yield where, line
        except OSError as error:
            raise RunFolderError(
                f"{self._path} cannot be read: {error.strerror}; give a run that you may read"
            ) from None


def _parsed(parse: Callable[[Fields], T], line: dict[str, Any], where: str) -> T:
    try:
        return parse(Fields(line))
    except ValueError as error:
        raise RunFolderError(f"{where}: {error}; it is no line of this release's format") from None


def _rollout_row(line: Fields) -> RolloutRow:
    timings, num_tokens = line.fields("timings"), len(line.items("token_ids"))
    # a column of that name is what the user calls the prompt; next best is what the model read
    written = (line.fields("metadata").anything("prompt"), line.text("prompt"), line.anything("prompt_ids"))
    prompt = next((prompt for prompt in written if prompt is not None), None)
    return RolloutRow(
        rollout_id=str(line.required("rollout_id")),
        group_id=line.text("group_id"),
        sample_index=line.whole("sample_index") or 0,
        worker_id=line.text("worker_id"),
        step=line.whole("step"),
        trained_version=line.whole("trained_version"),
        ending=line.text("ending"),
        prompt=None if prompt is None else str(prompt),
        text=line.text("text"),
        num_tokens=num_tokens,
        reward=line.number("reward"),
        finish_reason=line.text("finish_reason"),
        error=line.text("error"),
        spans=_spans(line.items("version_spans"), num_tokens),
        prefill_version=line.whole("prefill_version"),
        submitted_at=timings.seconds("submitted_at"),
        started_at=timings.seconds("started_at"),
        finished_at=timings.seconds("finished_at"),
    )


def _spans(found: list[Any], num_tokens: int) -> tuple[tuple[int, int], ...]:
    if not all(isinstance(span, list) and len(span) == 2 and all(map(is_whole, span)) for span in found):
        raise ValueError(f"version_spans must be pairs of whole numbers, got {found!r:.60}")
    starts = [start for start, _ in found]
    if starts != sorted(set(starts)) or starts[:1] not in ([], [0]) or starts[-1:] >= [max(num_tokens, 1)]:
        raise ValueError(f"version_spans must begin at 0 and rise below the {num_tokens} tokens, got {found!r:.60}")
    return tuple((start, version) for start, version in found)


def _update(line: Fields) -> Update:
    for name in ("version", "wait_s", "held_s", "finished_at"):
        line.required(name)
    return Update(
        version=line.whole("version") or 0,
        worker_id=line.text("worker_id"),
        wait_s=line.seconds("wait_s") or 0.0,
        held_s=line.seconds("held_s") or 0.0,
        straddlers=line.whole("straddlers") or 0,
        finished_at=line.seconds("finished_at") or 0.0,
    )

"""What a run leaves behind, a line at a time: `rollsync report` makes a page of it."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rollout.batches.records import rollout_lines
from rollout.status import UpdateRecord
from rollout.types import Decoder, Rollout

ROLLOUTS, UPDATES, METRICS = "rollouts.jsonl", "updates.jsonl", "metrics.jsonl"


class RunLog:
    """A run's folder, for a loop of your own; a RolloutController writes the same by itself.

        log = RunLog("runs/first", tokenizer=tokenizer)
        ...
        log.write_rollouts(rollouts, step=step, trained_version=engine.version)
        with engine.update():
            optimizer.step()
        log.write_update(engine.last_update)

    `rollouts.jsonl` has a line a rollout (`rollout.batches.records.rollout_lines`), `updates.jsonl` one an update of an engine,
    `metrics.jsonl` one a step. Each line is written at once, so that a run that is cut short leaves whole lines.
    """

    def __init__(self, path: Path | str, *, tokenizer: Decoder | None = None) -> None:
        """`tokenizer`: each rollout is written with its text and its prompt's too. Raises FileExistsError if the folder holds
        a run already, other OSErrors if it cannot be written."""
        self.path = Path(path)
        self._tokenizer = tokenizer
        if (self.path / ROLLOUTS).exists():
            raise FileExistsError(f"{self.path} holds a run already; give another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (ROLLOUTS, UPDATES, METRICS):
            (self.path / name).touch()

    def write_rollouts(
        self, rollouts: Sequence[Rollout], *, step: int | None = None, trained_version: int | None = None
    ) -> None:
        """When they are handed to the trainer, for its `step`, at its version `trained_version`. Without a step: nothing
        trains on them."""
        lines = rollout_lines(rollouts, step=step, trained_version=trained_version, tokenizer=self._tokenizer)
        append(self.path / ROLLOUTS, lines)

    def write_update(self, record: UpdateRecord | None, *, worker_id: str | None = None) -> None:
        """An engine's `last_update`, after each. `worker_id`: as in the rollouts of that engine; None where there is one
        engine. None for a record, as of an engine that has had no update, writes nothing."""
        if record is not None:
            append(self.path / UPDATES, update_line(record, worker_id))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """The numbers of one step, by name."""
        append(self.path / METRICS, json.dumps(dict(metrics), default=repr) + "\n")


def update_line(record: UpdateRecord, worker_id: str | None) -> str:
    """One line of an `updates.jsonl`, the newline included."""
    return json.dumps({"worker_id": worker_id, **asdict(record)}) + "\n"


def open_to_append(path: Path) -> TextIO:
    """The file, made if there is none, at the beginning of a line: one that a killed run has torn stays by itself and takes
    none of this run's with it."""
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def append(path: Path, lines: str) -> None:
    """In one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)

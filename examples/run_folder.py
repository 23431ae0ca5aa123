"""What a run leaves behind: `rollouts.jsonl`, `metrics.jsonl`, the lines on the screen and the table at the end."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout import Rollout


class RunFolder:
    """Writes each line at once, so that a run that is cut short leaves whole lines.

    Raises FileExistsError if the folder holds a run already, other OSErrors if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps: list[dict[str, Any]] = []
        self._num_rollouts = 0
        self._num_spanning = 0
        if (path / "rollouts.jsonl").exists():
            raise FileExistsError(f"{path} holds a run already; give another folder")
        path.mkdir(parents=True, exist_ok=True)
        for name in ("rollouts.jsonl", "metrics.jsonl"):
            (path / name).touch()

    def write_rollouts(self, rollouts: Sequence[Rollout], *, step: int, trained_version: int) -> None:
        """One line a rollout, when it is handed to the trainer, whose weights then are `trained_version`."""
        for rollout in rollouts:
            _append(self.path / "rollouts.jsonl", _rollout_line(rollout, step, trained_version))
            self._num_rollouts += 1
            self._num_spanning += len(rollout.version_spans) > 1

    def write_step(self, metrics: dict[str, Any]) -> None:
        """One line in the file and one on the screen; the columns are those of the table."""
        _append(self.path / "metrics.jsonl", metrics)
        self._steps.append(metrics)
        print(
            "step {step:>3}  reward {reward:.3f}  {tokens_per_s:.0f} tokens/s  staleness {staleness}  "
            "pause wait {pause_wait_ms:.0f} ms, held {pause_held_ms:.0f} ms  spanning {spanning}  version {version}  "
            "({seconds:.1f} s)".format(**metrics),
            flush=True,
        )

    def print_summary(self) -> None:
        """The table, how many rollouts span an update, and where the files are."""
        print("\n" + "".join(heading.rjust(9) for heading in _COLUMNS))
        for step in self._steps:
            print("".join(format(step[key], spec).rjust(9) for key, spec in _COLUMNS.values()))
        print()
        if self._num_rollouts:
            share = self._num_spanning / self._num_rollouts
            print(f"{self._num_spanning} of {self._num_rollouts} rollouts span an update ({share:.0%})")
        if len(self._steps) >= 6:
            first, last = (sum(step["reward"] for step in part) / 3 for part in (self._steps[:3], self._steps[-3:]))
            print(f"mean reward: {first:.2f} in the first three steps, {last:.2f} in the last three")
        print(f"results: {self.path}", flush=True)


_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "tokens/s": ("tokens_per_s", ".0f"),
    "stale": ("staleness", "d"),
    "spanning": ("spanning", "d"),
    "wait ms": ("pause_wait_ms", ".0f"),
    "held ms": ("pause_held_ms", ".0f"),
    "version": ("version", "d"),
    "s": ("seconds", ".1f"),
}
"""Heading, key in the metrics, format."""


def _append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def _rollout_line(rollout: Rollout, step: int, trained_version: int) -> dict[str, Any]:
    timings = rollout.timings
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "step": step,
        "trained_version": trained_version,
        **rollout.metadata,  # prompt, solution, text, answer
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "version_spans": [[span.start, span.version] for span in rollout.version_spans],
        "prefill_version": rollout.prefill_version,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "submitted_at": timings.submitted_at if timings else None,
        "started_at": timings.started_at if timings else None,
        "finished_at": timings.finished_at if timings else None,
    }

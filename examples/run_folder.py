"""The run's folder, with a line a step on the screen, a summary at the end, and the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout import Rollout, RunLog
from rollsync_cli.report import write_report


class RunFolder(RunLog):
    """A RunLog that also tells how it goes."""

    def __init__(self, path: Path, *, tokenizer: Any) -> None:
        super().__init__(path, tokenizer=tokenizer)
        self._rewards: list[float] = []
        self._num_rollouts = 0
        self._num_spanning = 0

    def write_rollouts(
        self, rollouts: Sequence[Rollout], *, step: int | None = None, trained_version: int | None = None
    ) -> None:
        """As RunLog's."""
        super().write_rollouts(rollouts, step=step, trained_version=trained_version)
        self.count(rollouts)

    def count(self, rollouts: Sequence[Rollout]) -> None:
        """For the summary: rollouts that somebody else has written, as a controller does."""
        self._num_rollouts += len(rollouts)
        self._num_spanning += sum(rollout.spans_update for rollout in rollouts)

    def write_step(self, metrics: dict[str, Any]) -> None:
        """One line in the file and one on the screen."""
        self.write_metrics(metrics)
        self._rewards.append(metrics["reward"])
        print(
            "step {step:>3}  reward {reward:.3f}  {tokens_per_s:.0f} tokens/s  staleness {staleness}  "
            "pause wait {pause_wait_ms:.0f} ms, held {pause_held_ms:.0f} ms  spanning {spanning}  version {version}  "
            "({seconds:.1f} s)".format(**metrics),
            flush=True,
        )

    def print_summary(self) -> None:
        """How many rollouts span an update, the reward, and where the report and the files are."""
        print()
        if self._num_rollouts:
            share = self._num_spanning / self._num_rollouts
            print(f"{self._num_spanning} of {self._num_rollouts} rollouts span an update ({share:.0%})")
        if len(self._rewards) >= 6:
            first, last = (sum(rewards) / 3 for rewards in (self._rewards[:3], self._rewards[-3:]))
            print(f"mean reward: {first:.2f} in the first three steps, {last:.2f} in the last three")
        print(f"report: {write_report(self.path)}")
        print(f"results: {self.path}", flush=True)

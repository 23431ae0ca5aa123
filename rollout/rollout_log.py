"""The file that a run leaves behind: a line for each rollout that has ended."""

import json
from pathlib import Path

from rollout.collection import GroupWork
from rollout.entries import Ending
from rollout.records import rollout_to_json


class RolloutLog:
    """Appends JSON lines: the rollout, how its group ended, and its columns as far as JSON can say them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, work: GroupWork, ending: Ending) -> None:
        """A group has ended."""
        for rollout in work.ordered():
            line = {**rollout_to_json(rollout), "ending": str(ending), "metadata": dict(rollout.metadata)}
            self._file.write(json.dumps(line, default=repr) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()

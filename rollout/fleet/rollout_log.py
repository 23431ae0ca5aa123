"""What a controller writes while it runs, in the format of `rollout.run_log`."""

from pathlib import Path

from rollout.batches.collection import GroupWork
from rollout.batches.entries import Ending
from rollout.batches.records import rollout_line
from rollout.run_log import UPDATES, open_to_append, update_line
from rollout.status import UpdateRecord
from rollout.types import Decoder


class RolloutLog:
    """Appends a line for each rollout of each group that ends, and beside it, in `updates.jsonl`, one for each update of an
    engine. A run that goes on from a checkpoint goes on in the same files."""

    def __init__(self, path: Path, tokenizer: Decoder | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rollouts = open_to_append(path)
        self._updates = open_to_append(path.with_name(UPDATES))
        self._tokenizer = tokenizer

    def write(self, work: GroupWork, ending: Ending) -> None:
        """A group has ended."""
        trained = ending is Ending.CONSUMED
        for rollout in work.ordered():
            line = rollout_line(
                rollout,
                step=work.lease_number if trained else None,
                trained_version=work.lease_version if trained else None,
                ending=str(ending),
                tokenizer=self._tokenizer,
            )
            self._rollouts.write(line)
        self._rollouts.flush()

    def write_update(self, worker_id: str, record: UpdateRecord) -> None:
        """An engine has taken a version."""
        self._updates.write(update_line(record, worker_id))
        self._updates.flush()

    def close(self) -> None:
        """Nothing more will be written."""
        self._rollouts.close()
        self._updates.close()

"""What a controller writes while it runs, in the format of `rollout.run_log`."""

import logging
from pathlib import Path
from typing import TextIO

from rollout.batches.entries import Ending
from rollout.batches.group_work import GroupWork
from rollout.batches.records import rollout_lines
from rollout.run_log import UPDATES, open_to_append, update_line
from rollout.status import UpdateRecord
from rollout.types import Decoder

log = logging.getLogger("rollsync")


class RolloutLog:
    """Appends a line for each rollout of each group that ends, and beside it, in `updates.jsonl`, one for each update of an
    engine. A run that goes on from a checkpoint goes on in the same files. It never ends a run: what cannot be written is
    named in the log, and after a file that takes no more nothing else is tried."""

    def __init__(self, path: Path, tokenizer: Decoder | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rollouts = open_to_append(path)
        self._updates = open_to_append(path.with_name(UPDATES))
        self._tokenizer = tokenizer
        self._is_given_up = False

    def write(self, work: GroupWork, ending: Ending) -> None:
        """A group has ended."""
        trained = ending is Ending.CONSUMED
        try:
            lines = rollout_lines(
                work.ordered(),
                step=work.step,
                trained_version=work.lease_version if trained else None,
                ending=str(ending),
                tokenizer=self._tokenizer,
            )
        except Exception:  # of the user's: a tokenizer, or the repr of a column
            log.exception("group %s is not in %s: it cannot be written", work.entry.group_id, self._rollouts.name)
        else:
            self._append(self._rollouts, lines)

    def write_update(self, worker_id: str, record: UpdateRecord) -> None:
        """An engine has taken a version."""
        self._append(self._updates, update_line(record, worker_id))

    def close(self) -> None:
        """Nothing more will be written."""
        for file in (self._rollouts, self._updates):
            try:
                file.close()
            except OSError as error:  # what it still had is flushed here
                self._give_up(file, error)

    def _append(self, file: TextIO, text: str) -> None:
        if self._is_given_up:
            return
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            self._give_up(file, error)

    def _give_up(self, file: TextIO, error: OSError) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            log.error("%s takes no more (%s): the run goes on without it", file.name, error)

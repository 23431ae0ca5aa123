"""Settings of a weight sync."""

import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.requests.checks import LONGEST_LIMIT_S
from sync.errors import SyncError

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Checked at construction; a value that cannot work raises SyncError."""

    update_timeout_s: float = 30.0
    """Upper bound, in seconds, on one engine's update: waiting for the pause, and the copies inside it. The rest of
    `publish`'s own limit bounds it too. A step of generation, which the pause waits for, takes well under a second."""

    open_timeout_s: float = 10.0
    """Upper bound on asking a new target what it holds; one that does not answer in time is left out. One that has
    answered before is given a second; then its part is queued, and reported as late if it stays so."""

    bucket_bytes: int = 256 * MIB
    """Weights are verified, and sent between machines, in pieces of this size; two are in flight at once."""

    run_id: str | None = None
    """Names the training run, for engines that outlive a trainer. An engine of another run is refused. None: take over
    the run that the engines belong to, else a random name."""

    run_folder: Path | None = None
    """Keeps run id, epoch and newest version on disk, so that a restarted trainer goes on above them although every
    engine was lost as well. None: only the engines remember."""

    def __post_init__(self) -> None:
        check_seconds("update_timeout_s", self.update_timeout_s)
        check_seconds("open_timeout_s", self.open_timeout_s)
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise SyncError(f"bucket_bytes must be a positive number of bytes, got {self.bucket_bytes!r}")
        if self.run_id is not None and (not isinstance(self.run_id, str) or not self.run_id):
            raise SyncError(f"run_id must be a non-empty string, or None for the engines' own, got {self.run_id!r}")
        if self.run_folder is not None:
            object.__setattr__(self, "run_folder", Path(self.run_folder))


def check_seconds(name: str, value: Any) -> None:
    """SyncError unless `value` is a positive number of seconds that a clock can wait."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_LIMIT_S:
        raise SyncError(f"{name} must be a positive, finite number of seconds, got {value!r}")

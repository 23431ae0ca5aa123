"""Settings of a weight sync."""

import math
from dataclasses import dataclass

from sync.errors import SyncError


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Checked at construction; a value that cannot work raises SyncError."""

    update_timeout_s: float = 30.0
    """Upper bound, in seconds, on one engine's update: waiting for the pause, and the copies inside it. The rest of
    `publish`'s own limit bounds it too. A step of generation, which the pause waits for, takes well under a second."""

    def __post_init__(self) -> None:
        if not (0 < self.update_timeout_s < math.inf):
            raise SyncError(f"update_timeout_s must be a finite number of seconds above 0, got {self.update_timeout_s}")

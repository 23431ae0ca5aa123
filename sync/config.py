"""Settings of a weight sync."""

import numbers
from dataclasses import dataclass
from typing import Any

from rollout.requests import LONGEST_LIMIT_S
from sync.errors import SyncError


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Checked at construction; a value that cannot work raises SyncError."""

    update_timeout_s: float = 30.0
    """Upper bound, in seconds, on one engine's update: waiting for the pause, and the copies inside it. The rest of
    `publish`'s own limit bounds it too. A step of generation, which the pause waits for, takes well under a second."""

    def __post_init__(self) -> None:
        check_seconds("update_timeout_s", self.update_timeout_s)


def check_seconds(name: str, value: Any) -> None:
    """SyncError unless `value` is a positive number of seconds that a clock can wait."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_LIMIT_S:
        raise SyncError(f"{name} must be a positive, finite number of seconds, got {value!r}")

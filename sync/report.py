"""What one publish did."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One publish, over all its targets."""

    version: int
    num_bytes: int
    """What was staged for one engine."""
    num_tensors: int
    """Tensors staged for one engine; tied ones count once."""
    stage_s: float
    """Seconds of checking and copying into the staging, while generation went on."""
    pause_wait_s: float
    """Seconds from asking for the pause until it held (the rest of a step), the longest among the targets."""
    commit_s: float
    """Seconds that the pause was held, the longest among the targets."""
    straddlers: int
    """Requests in flight that had tokens of an older version, over all targets."""
    fenced: tuple[str, ...]
    """Names of the targets that did not take this version; the cause of each is in the log. The next publish, or this
    version again, rolls them forward."""
    transport: str
    """How the bytes came to the engines: "in_process", by a copy in this process's memory."""

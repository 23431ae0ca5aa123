"""What one publish did."""

from dataclasses import dataclass, field


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
    """Names of the targets that did not take this version; the cause of each is in the log and in `failures`. The next
    publish, or this version again, rolls them forward; one that is fenced serves nothing until then."""
    transport: str
    """How the bytes came to the engines: the transport's name, or several with "+" between them."""
    send_s: float = 0.0
    """Seconds from the staging until the last target had verified its bytes, while generation went on; what runs beside
    the commits of other targets included."""
    failures: dict[str, str] = field(default_factory=dict)
    """The cause, by the name of each target in `fenced`."""
    overtaken: tuple[str, ...] = ()
    """Names of the targets that had not begun to take this version when a newer publish came; they get the newer one, or, if
    that fails before it is staged, this one after all."""

"""What goes wrong, to order."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Faults:
    """All off by default. Rates are of samples, and depend on their seeds alone; times are in seconds of the loop."""

    deaths: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When which worker dies."""
    seconds_between_deaths: float | None = None
    """Random deaths, this far apart in the mean over the whole fleet; None: none."""
    freezes: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """(when, for how long) a worker stands still, as a stopped process does."""
    error_rate: float = 0.0
    """First attempts that the engine fails halfway (ERROR, with what they had)."""
    duplicate_rate: float = 0.0
    """Results that come twice."""
    late_rate: float = 0.0
    """Results that come again long after."""

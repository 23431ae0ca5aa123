"""What is said of rewards that cannot be computed: the first of each kind in full, the others as a count."""

import logging
from collections import Counter

from rollout.batches.rewards import REMEDIES, RewardError

log = logging.getLogger("rollsync")


class RewardWarnings:
    """Of one reward function. Not thread-safe."""

    def __init__(self, function: object, consequence: str) -> None:
        """`consequence`: what becomes of the sample, or the group, in a sentence."""
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._consequence = consequence
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, error: RewardError) -> None:
        """Logs the first of its kind (with the traceback of what the function raised), the 10th, the 100th and so on."""
        cause = error.__cause__
        kind = error.kind if cause is None else type(cause).__name__
        self._counts[error.kind, kind] += 1
        count = self._counts[error.kind, kind]
        if count == 1:
            log.warning(
                "reward function %s: %s. %s; %s. Those that follow are counted: reward/errors_%s in controller.metrics()",
                self._name,
                error,
                self._consequence,
                REMEDIES[error.kind],
                error.kind,
                exc_info=cause,
            )
        elif str(count).strip("0") == "1":
            log.warning("reward function %s has failed %d times in this way (%s)", self._name, count, kind)

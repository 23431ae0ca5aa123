"""A worker's engine whose loop died is restarted in place, with the weights that it has: the one rule of when."""

import logging
import threading

from rollout.engine import GenerationEngine
from rollout.status import EngineState
from rollout.types import Rollout

log = logging.getLogger("rollsync")


class EngineRevival:
    """Restarts one engine at most `max_in_a_row` times with no rollout that ends well in between. From any thread."""

    def __init__(self, engine: GenerationEngine, max_in_a_row: int, *, name: str) -> None:
        """`name`: the worker's, for the log."""
        self._engine = engine
        self._max_in_a_row = max_in_a_row
        self._name = name
        self._lock = threading.Lock()  # one restart at a time; the others wait for it
        # of its own: a restart waits for the thread on which rollouts end
        self._counting = threading.Lock()
        self._is_reviving = False
        self.num_deaths = 0
        """In a row."""

    @property
    def is_due(self) -> bool:
        """Whether the engine is dead and may be restarted."""
        return self._engine.state is EngineState.DEAD and self.num_deaths < self._max_in_a_row

    @property
    def is_over(self) -> bool:
        """Whether the engine is dead and stays so."""
        is_spent = self.num_deaths >= self._max_in_a_row and not self._is_reviving
        return is_spent and self._engine.state is EngineState.DEAD

    def saw(self, rollout: Rollout) -> None:
        """A rollout of the engine's has ended; one that ends well ends the row of deaths."""
        if rollout.has_ended_well:
            with self._counting:
                self.num_deaths = 0

    def revive(self) -> bool:
        """Restarts the engine if that is due, which is returned, and waits for whoever does so already. What keeps it from
        starting is logged, and counts as another death."""
        with self._lock:
            if not self.is_due:
                return False
            self._is_reviving = True  # first: the last restart that there may be is not over while it lasts
            with self._counting:
                self.num_deaths += 1
            try:
                self._engine.restart()
            except Exception:  # as a device without memory: the thread that keeps the engine must try again
                log.exception("worker %s could not restart its engine", self._name)
            else:
                log.warning("worker %s restarted its engine, whose loop had died", self._name)
            finally:
                self._is_reviving = False
            return True

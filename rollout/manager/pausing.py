"""Pauses: entered with a limit, never parking the loop for nobody."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers.generation.continuous_batching import continuous_api as upstream

from rollout.errors import EngineDeadError, PauseTimeoutError


class RolloutThreadStatus(upstream.BackgroundThreadStatus):  # type: ignore[misc]
    """Never parks for nobody, nor with tokens that are not booked."""

    before_pause: Callable[[], None]

    @contextmanager
    def pause_within(
        self, timeout_s: float, wake_up: Callable[[], None], entered: Callable[[], None]
    ) -> Iterator[None]:
        """Upstream's pause with a limit on the wait for it: `wake_up` makes an idle loop look, `entered` is called once it is
        parked. PauseTimeoutError if the step in progress does not end in time, EngineDeadError if the loop is gone. Must be
        entered and left on one thread."""
        with self._condition:
            self._pauses_requested += 1
            self._local_pauses_requested.value += 1
            wake_up()
            try:
                ended = self._condition.wait_for(self._pause_predicate, timeout_s)
            except BaseException:
                # an interrupt, or a limit beyond the clock's range: a request left behind would park the loop for ever
                self._drop_pause_request()
                raise
            if not ended:
                self._drop_pause_request()
                raise PauseTimeoutError(
                    f"the step in progress did not end within {timeout_s:.3g} s, so the pause was not entered; allow "
                    "more time, or lower max_batch_tokens so that steps are shorter"
                )
            if not self._paused:
                self._drop_pause_request()
                raise EngineDeadError(
                    "the generation loop is not running"
                    if self.fatal_error is None
                    else f"the generation loop died: {self.fatal_error!r}; engine.restart() brings it back"
                ) from self.fatal_error
        entered()
        try:
            yield
        finally:
            self.release_pause()

    def pause_and_wait(self) -> None:
        self.before_pause()
        with self._condition:
            # Whoever asked may have given up between the loop's look and this moment: parked now, the loop would wait
            # for ever.
            if self._pauses_requested:
                super().pause_and_wait()

"""The generation loop of one engine: how it is made, started, fenced, ended and brought back."""

import atexit
import logging
import weakref
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, PreTrainedModel

from rollout.config import EngineConfig
from rollout.control import ControlThread
from rollout.errors import EngineStateError
from rollout.lifecycle import Lifecycle
from rollout.manager import RolloutManager, host
from rollout.meters import Meters
from rollout.model.shell import WeightWatch
from rollout.requests import checks
from rollout.requests.tracker import RequestTracker
from rollout.sizing import upstream_settings
from rollout.status import EngineState, UpdateRecord
from rollout.types import FinishReason
from rollout.update import Updater

log = logging.getLogger("rollsync")

STOP_TIMEOUT_S = 30.0
UPSTREAM_MAX_REQUESTS = 1024


class EngineLoop:
    """The manager of a model, the requests it is given, and the one thread that pauses it, as one thing that starts and ends.

    It is the manager's `Owner`. Its state changes under the tracker's lock.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, tokenizer: Any) -> None:
        self.life = Lifecycle()
        self.meters = Meters()
        self.control = ControlThread()
        self.num_updates = 0
        self.last_update: UpdateRecord | None = None
        self._model, self._config, self._tokenizer = model, config, tokenizer
        self._watch = WeightWatch(model)
        self._was_started = False
        upstream_config, paged = upstream_settings(config, model)
        # The listener exists before the manager that it listens to, which exists before the sizes are known.
        self.tracker = RequestTracker(
            max_running=upstream_config.max_requests_per_batch or UPSTREAM_MAX_REQUESTS,
            max_waiting=config.max_waiting,
            weights_changed=self._outside_change,
            on_loss=partial(self._lose, is_outside_change=True),
            on_death=self._on_death,
            on_exit=self._on_exit,
        )
        if tokenizer is not None:
            self.tracker.decode = self._decode
        self._num_blocks = upstream_config.num_blocks
        self.manager = self._make_manager(upstream_config, paged)
        self.tracker.runner = self.manager
        self.updater = Updater(
            model=model,
            manager=self.manager,
            tracker=self.tracker,
            watch=self._watch,
            control=self.control,
            check=lambda: self.life.check(EngineState.RUNNING, EngineState.FENCED),
            fence=self._fence,
            is_fenced=lambda: self.life.state == EngineState.FENCED,
            lose=self._lose,
            unfence=self._unfence,
            refresh_kv=config.kv_at_update == "refresh",
        )

    # ------------------------------------------------------------------------------------------- what the engine asks

    def start(self) -> None:
        """See GenerationEngine.start."""
        with self.tracker.lock:  # a stop or update on another thread finds it started, or not
            self.life.check(EngineState.CREATED)
            if not self._was_started:
                # later, what has changed since the last session is a change outside update()
                self._watch.record()
                self.control.start()
                self.tracker.start()
            self.manager.launch()
            self._was_started, self.tracker.stopping = True, False
            self.life.start()
        _running.add(self)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See GenerationEngine.stop."""
        self.updater.refuse_inside("stop()")
        timeout_s = checks.check_limit(timeout_s)
        with self.tracker.lock:
            again = self.life.state == EngineState.STOPPED
            self.life.stop()
            self.tracker.stopping = True
        if again and (self.control.is_current() or self.tracker.is_delivering()):
            return  # the stop under way waits for this very thread
        _running.discard(self)
        self.tracker.wake_waiting()
        # nothing more is run, so that an update that is still in progress cannot let mixed weights loose
        self.manager.hold()
        if not self.control.stop(timeout_s):
            log.warning("an update or call was still running %.3g s after stop(); its thread is left behind", timeout_s)
        if not self.manager.shutdown(timeout_s):
            log.warning("the generation loop did not end within %.3g s of stop(); its thread is left behind", timeout_s)
        self.tracker.end_all(FinishReason.ABORT, "the engine was stopped", {})
        self.tracker.close(timeout_s)

    def restart(self) -> None:
        """See GenerationEngine.restart."""
        self.life.check(EngineState.DEAD)
        # not under the lock, which the dying loop needs for its last words
        if not self.manager.shutdown(STOP_TIMEOUT_S):
            raise EngineStateError("the dead loop's thread has not ended yet; try again")
        with self.tracker.lock:
            self.life.check(EngineState.DEAD)  # nobody else has restarted or stopped it in the meantime
            self.manager.free()  # two caches at once may be more memory than there is
            config, paged = upstream_settings(self._config, self._model)
            # sized once: what was accepted before must fit again, however much memory is left now
            config.num_blocks = self._num_blocks
            self.manager = self.updater.manager = self._make_manager(config, paged)
            self.tracker.runner = self.manager
            if self.life.is_fenced:
                self.manager.hold()
            self.manager.launch()
            self.life.start()

    # ------------------------------------------------------------------------------------- what the manager tells, asks

    def refuse_inside_update(self, what: str) -> None:
        """See Owner."""
        self.updater.refuse_inside(what)

    def stopping(self, *, again: bool, abort: bool) -> None:
        """See Owner."""
        with self.tracker.lock:
            if self.life.is_serving:
                self.tracker.stopping = abort or self.life.state == EngineState.FENCED
            self.life.end_session(again=again)
        self.tracker.wake_waiting()

    # ------------------------------------------------------------------------------------------------------ inside

    def _make_manager(self, config: ContinuousBatchingConfig, paged: bool) -> RolloutManager:
        return host(
            self._model,
            config,
            self.tracker,
            self,
            self.meters,
            paged_attention=paged,
            autocast_dtype=self._config.autocast_dtype,
            num_threads=self._config.num_threads,
            decode=None if self._tokenizer is None else self._decode,
        )

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _outside_change(self) -> str | None:
        name = self._watch.changed()
        if name is None:
            return None
        return (
            f"{name} was changed outside update() while requests were running on it. Change shared weights only inside "
            "`with engine.update(): optimizer.step()`, or give the engine weights of its own (copy_weights=True) and "
            "publish to it with sync.WeightSync"
        )

    def _fence(self, reason: str, *, is_outside_change: bool = False) -> None:
        with self.tracker.lock:
            self.life.fence(reason, is_outside_change=is_outside_change)
            self.manager.hold()
        log.error("the engine is fenced: %s", reason)
        self.tracker.wake_waiting()

    def _lose(self, reason: str, *, is_outside_change: bool = False) -> None:
        # on the loop's own thread, or while it is parked: the outputs hold still
        self._fence(reason, is_outside_change=is_outside_change)
        self.tracker.end_all(FinishReason.ERROR, f"the engine was fenced: {reason}", self.manager.outputs())

    def _unfence(self, record: UpdateRecord) -> None:
        with self.tracker.lock:
            self.last_update = record
            self.num_updates += 1
            if self.life.unfence():
                self.manager.release()

    def _on_death(self, error: BaseException | None) -> None:
        # the loop's thread, before any request resolves: whoever sees its ERROR sees the engine's state too
        with self.tracker.lock:
            self.life.die(error)

    def _on_exit(self, error: BaseException | None) -> None:
        # the loop's thread, its last act
        with self.tracker.lock:
            self.life.die(error)
            stopped = self.tracker.stopping or self.life.state in (EngineState.CREATED, EngineState.STOPPED)
        reason = FinishReason.ABORT if stopped else FinishReason.ERROR
        # what it died of first, not what its own error handling then raised
        why = "the engine was stopped" if stopped else f"the generation loop died: {self.life.death!r}"
        self.tracker.end_all(reason, why, self.manager.outputs())
        self.tracker.wake_waiting()


_running: "weakref.WeakSet[EngineLoop]" = weakref.WeakSet()


@atexit.register
def _stop_running() -> None:
    # A script that forgets to stop: its daemon threads would otherwise be cut off inside native code.
    for loop in list(_running):
        loop.stop()

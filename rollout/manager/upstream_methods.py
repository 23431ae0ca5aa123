"""Upstream's own methods of its manager: the same names and arguments, without the ways to kill or stall the loop."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching.requests import GenerationOutput

from rollout.errors import EngineDeadError, EngineStateError
from rollout.manager.router import ListenerRouter
from rollout.meters import Meters
from rollout.requests.results import RequestQueue
from rollout.requests.upstream_api import UpstreamRequests


class HardenedManager(UpstreamRequests, upstream.ContinuousBatchingManager):  # type: ignore[misc]
    """What upstream documents, except for the constructor."""

    meters: Meters
    input_queue: RequestQueue

    def start(self) -> None:
        """Upstream's: starts the engine."""
        if not self.is_running():
            self._owner.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Upstream's: what is queued or in flight runs to its end, then the loop ends; with `hard_stop`, and where the
        engine is fenced, it ends at once with what it has. The engine takes no more requests and is STOPPED or, with
        `keep_for_next_session`, CREATED: it can be started again, at the same version and with an empty KV cache.
        `engine.stop()` is to be called all the same: it ends the engine's other threads."""
        self._refuse_on_loop("stop()")
        self._owner.refuse_inside_update("manager.stop()")
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise EngineStateError("stop() inside a pause would wait for itself; leave the pause first")
        if self._generation_thread is None:
            return
        self._owner.stopping(again=keep_for_next_session, abort=hard_stop)
        status.request_stop(
            status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP, self.distributed_helper.global_rank
        )
        self._wake_up_loop.set()
        self.input_queue.wake()
        if block:
            self.join(time.perf_counter(), timeout)

    def destroy(self) -> None:
        """Upstream's: a stop after which nothing can be started any more."""
        self._owner.refuse_inside_update("manager.destroy()")
        self._owner.stopping(again=False, abort=False)
        super().destroy()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Upstream's. Weights that are changed inside it fence the engine: that is what `engine.update()` is for."""
        self._refuse_on_loop("pause()")
        asked_at = time.perf_counter()
        with super().pause():
            self.meters.pause(time.perf_counter() - asked_at)
            yield

    def warmup(self) -> None:
        """Upstream's, before the start. Its made-up batches take the whole cache, so there is none beside requests."""
        if not self.is_running():
            super().warmup()
        elif self.batch_processor.model_runner.pad_inputs:
            raise EngineStateError("warmup() needs the cache for itself; call it before engine.start()")

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Upstream's; the engine's own model has its attention already."""
        if getattr(self, "model", None) is not model:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Upstream's; what has been delivered already is handed over too. Should the handler's event loop be closed when a
        result comes, it is for `get_result`."""
        router: ListenerRouter = self.output_router
        with router.delivering:
            super().register_result_handler(request_id, callback)
            handler, loop = router.result_handlers[request_id]
            while (output := self.results.get_for(request_id, 0, lambda: False)) is not None:
                loop.call_soon(handler, output)

    def _refuse_on_loop(self, what: str) -> None:
        if threading.current_thread() is self._generation_thread:
            raise EngineStateError(f"{what} on the generation loop's own thread would wait for itself")

    def check_open(self) -> None:
        """EngineDeadError or EngineStateError if no request is taken any more."""
        status = self.background_thread_status
        if status.fatal_error is not None:
            raise EngineDeadError(
                f"the generation loop died: {status.fatal_error!r}; engine.restart() brings it back"
            ) from status.fatal_error
        if status.local_status != status.DONT_STOP:
            raise EngineStateError("the generation loop is stopping or has stopped; it takes no more requests")

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until `max_queue_size` lets another request in; False if that takes longer. Raises as `check_open` does."""
        if not self.max_queue_size:
            self.check_open()
            return True
        return self.input_queue.wait_for_room(self.max_queue_size, timeout_s, self.check_open)

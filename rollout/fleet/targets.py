"""A fleet's workers as a weight sync sees them: an update waits for the evaluation that it would cut in two."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout.errors import EngineStateError
from rollout.fleet.coordinator import Coordinator
from rollout.fleet.protocols import FleetWorker
from rollout.fleet.questions import Questions


class FleetTarget:
    """One worker. Evaluations hold up nothing but its updates."""

    def __init__(self, worker: FleetWorker, coordinator: Coordinator, questions: Questions) -> None:
        self.worker = worker
        self._coordinator = coordinator
        self._questions = questions

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """`fn(engine, *args)` where the engine lives, on its control thread."""
        return self.worker.call(fn, *args)

    def call_update(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """`call`, for a function that updates the engine: once the worker evaluates nothing, or `evaluation_wait_s` later.
        It can be cancelled until then. After the controller's stop the future has an EngineStateError."""
        outer: Future[Any] = Future()
        loop = self._coordinator.loop

        def go() -> None:
            # cancelled later, it would run over there all the same, and its caller would think that it had not
            if not outer.set_running_or_notify_cancel():
                after()
                return
            try:
                inner = self.worker.call(fn, *args)
            except Exception as error:
                after()
                outer.set_exception(error)
                return
            inner.add_done_callback(end)

        def end(inner: "Future[Any]") -> None:
            after()
            error = inner.exception() if not inner.cancelled() else EngineStateError("the engine was stopped")
            if error is not None:
                outer.set_exception(error)
            else:
                outer.set_result(inner.result())

        def after() -> None:
            loop.call_soon(partial(self._coordinator.commit_ends, self.worker_id))

        def cleared(clear: "Future[None]") -> None:
            error = clear.exception()
            if error is None:
                go()
            elif outer.set_running_or_notify_cancel():
                outer.set_exception(error)

        def begin(clear: "Future[None]") -> None:
            self._coordinator.commit_begins(self.worker_id, lambda: clear.set_result(None))

        try:
            self._questions.put(begin).add_done_callback(cleared)
        except EngineStateError as error:
            outer.set_exception(error)
        return outer

    def on_join(self, callback: Callable[[Any], None]) -> None:
        """Calls it with each new incarnation of the worker, before that serves anything."""
        self.worker.on_join(lambda _: callback(self))

    def require_version(self, version: int) -> None:
        """It takes nothing below this version from now on."""
        self.worker.require_version(version)

"""`Worker`: the driver's handle of one engine in a Ray actor.

    worker = Worker.start("w0", WorkerConfig(model="path/or/name"))
    refusals = worker.submit([WorkItem(request_id="r0", prompt_ids=[1, 2, 3])])
    for finished in worker.poll(timeout_s=10):
        ...finished.rollout...
    worker.call(publish_something).result()
    worker.stop()

The handle outlives its worker's incarnations: `restart()` puts a new process in place of one that died, and every
answer says which incarnation gave it. Every wait has a limit; an error names the worker and the phase.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollout.engine import GenerationEngine
from rollout.errors import (
    InvalidRequestError,
    RolloutError,
    WorkerDiedError,
    WorkerUnreachableError,
)
from rollout.requests import checks
from rollout.worker_config import WorkerConfig
from rollout.workers.calls import PendingCalls
from rollout.workers.function_call import call_in_worker
from rollout.workers.incarnation import Incarnation
from rollout.workers.joins import JoinCallbacks
from rollout.workers.remote import RemoteHost
from rollout.workers.wire import Finished, Refusal, WorkerHealth, WorkerState, WorkItem
from rollout.workers.worker_requests import WorkerRequests

__all__ = ["Finished", "Refusal", "WorkItem", "Worker", "WorkerConfig", "WorkerHealth", "WorkerState"]

log = logging.getLogger("rollsync")

P = ParamSpec("P")
R = TypeVar("R")

KILL_TIMEOUT_S = 20.0
"""How long the end of a killed process may take."""
LARGEST_BATCH = 4096
LEFTOVERS_S = 2.0
"""How long `stop` waits for another thread's poll to end."""
JOIN_S = 5.0
"""How long `stop` waits for each thread of the handle."""


class Worker(WorkerRequests):
    """One engine in another process. Methods may be called from several threads. A pickled copy reaches the same
    incarnation from another process, knows of no restart, and ends nothing: `stop` and `restart` are the first handle's.
    One handle polls.
    """

    def __init__(
        self, worker_id: str, config: WorkerConfig, host: RemoteHost, *, incarnation: int, serve_from: int
    ) -> None:
        """Use `Worker.start`."""
        self.worker_id = worker_id
        self.config = config
        self._serve_from = serve_from
        self._is_owner = True
        self._is_stopped = False
        self._is_restarting = False
        self._changed = threading.Condition()  # guards and tells of what is heard
        self._life = threading.RLock()  # one restart or stop at a time
        self._polling = threading.Lock()  # one thread at a time
        self._calls = PendingCalls()
        self._joins = JoinCallbacks(self, worker_id)
        self._begin(incarnation, host)

    @classmethod
    def start(
        cls, worker_id: str, config: WorkerConfig, *, incarnation: int = 0, serve_from_version: int = 0
    ) -> "Worker":
        """A process with an engine in it; returns once the engine runs. `serve_from_version` above 0: it is STALE and takes
        no request until a publish has brought it there. Raises InvalidRequestError for a model or settings that cannot
        work, WorkerUnreachableError when it takes too long (as where no node has room), WorkerDiedError."""
        if checks.check_label("worker_id", worker_id) is None:
            raise InvalidRequestError("worker_id must be a non-empty string, got None")
        for name, value in (("incarnation", incarnation), ("serve_from_version", serve_from_version)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidRequestError(f"{name} must be an integer of at least 0, got {value!r}")
        host, report = RemoteHost.start(
            worker_id, config, incarnation=incarnation, serve_from_version=serve_from_version
        )
        worker = cls(worker_id, config, host, incarnation=incarnation, serve_from=serve_from_version)
        worker._now.hear(report)
        worker._now.watch()
        _owned.add(worker)
        return worker

    # -------------------------------------------------------------------------------------------- weights and state

    def call(self, fn: Callable[Concatenate[GenerationEngine, P], R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """`fn(engine, *args)` on the engine's control thread, in the worker; never behind a submit or a poll. The future has
        its result or its error, or WorkerDiedError, or WorkerUnreachableError after `call_timeout_s`: it always resolves,
        on a thread of this handle, where a callback must not wait for another call. `fn` must be importable there."""
        with self._changed:
            now = self._now
        return call_in_worker(self._calls, now, fn, args, kwargs)

    def require_version(self, version: int) -> None:
        """It takes no request below `version` from now on, in this incarnation and the next: for a worker that missed a
        publish. What is in flight goes on."""
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise InvalidRequestError(f"version must be an integer of at least 0, got {version!r}")
        with self._changed:
            self._serve_from = max(self._serve_from, version)
        self._now.ask("require_version", version, limit_s=self.config.submit_timeout_s)

    def health(self) -> WorkerHealth:
        """How it stands, from its last heartbeat. Asks nobody and never waits."""
        with self._changed:
            now = self._now
            now.watch()
            return WorkerHealth(
                worker_id=self.worker_id,
                state=self._state(),
                incarnation=now.number,
                version=now.version,
                serve_from_version=self._serve_from,
                pid=now.host.place.pid,
                node_id=now.host.place.node_id,
                engine=now.engine,
                heartbeat_age_s=time.monotonic() - now.heard_at,
                reason=now.death,
            )

    @property
    def version(self) -> int:
        """The newest version that this handle has heard of from this incarnation."""
        return self._now.version

    @property
    def serve_from_version(self) -> int:
        """It takes no request below this version: for it to serve, a publish must have brought it there."""
        return self._serve_from

    def wait_for(self, *states: WorkerState, timeout_s: float) -> WorkerHealth:
        """Waits until it is in one of these states. WorkerUnreachableError when it is not in time."""
        timeout_s = checks.check_limit(timeout_s)
        with self._changed:
            self._now.watch()
            if not self._changed.wait_for(lambda: self._state() in states, timeout_s):
                raise WorkerUnreachableError(
                    f"worker {self._now.host.name} is {self._state()}, not {' or '.join(states)}, after {timeout_s:g} s"
                )
            return self.health()

    def on_join(self, callback: Callable[["Worker"], None]) -> None:
        """Calls `callback(worker)` for each later incarnation, and now if this one is STALE, on a thread of this handle:
        there it may publish to the worker and wait for that. An error it raises is logged; the worker then stays STALE."""
        with self._changed:
            self._now.watch()
            self._joins.add(callback)
            is_stale = self._state() == WorkerState.STALE
        if is_stale:
            self._joins.tell(callback)

    # -------------------------------------------------------------------------------------------------- life cycle

    def restart(self, *, serve_from_version: int | None = None) -> None:
        """A new incarnation in a new process; the old one is ended first if it still lives, and what it had not handed over
        is lost (see `snapshot`). It serves from the newest version that this handle has heard of or requires, or from
        `serve_from_version` if that is newer. Returns once its engine runs; the `on_join` callbacks are then called."""
        self._check_owner("restart")
        with self._alone("restart", self.config.start_timeout_s):
            with self._changed:
                old = self._now
                if self._is_stopped:
                    raise WorkerDiedError(f"worker {self.worker_id} was stopped; start another")
                self._is_restarting = True
                self._serve_from = max(self._serve_from, old.version, serve_from_version or 0)
            old.end("it was restarted")
            try:
                old.host.kill(KILL_TIMEOUT_S)
                host, report = RemoteHost.start(
                    self.worker_id, self.config, incarnation=old.number + 1, serve_from_version=self._serve_from
                )
                with self._changed:
                    self._begin(old.number + 1, host)
                self._now.hear(report)
            except BaseException as error:
                old.death = f"its restart failed: {error}"
                raise
            finally:
                with self._changed:
                    self._is_restarting = False
                    self._changed.notify_all()
            old.join(JOIN_S)
            self._now.watch()
            self._joins.tell()

    def stop(self, timeout_s: float = 30.0) -> list[Finished]:
        """Ends the engine and the process, and the handle's threads. Returns the results nobody has read, those of requests
        that were in flight included (ABORT, with what they had): none of a worker that is dead or does not answer. Safe to
        call again. WorkerUnreachableError if the process is still there after `timeout_s`."""
        self._check_owner("stop")
        deadline = time.monotonic() + checks.check_limit(timeout_s)
        left: list[Finished] = []
        with self._alone("stop", timeout_s):
            if self._is_stopped:
                return left
            now = self._now
            if self._state() not in (WorkerState.DEAD, WorkerState.SUSPECT):
                try:
                    now.ask("close", timeout_s / 4, limit_s=timeout_s / 2)
                except RolloutError as error:
                    log.warning("worker %s does not end by itself: %s", now.host.name, error)
                with suppress(RolloutError):  # it does not answer, and is ended all the same
                    while more := self.poll(LARGEST_BATCH, LEFTOVERS_S):
                        left += more
            self._is_stopped = True
            now.end("it was stopped")
            try:
                now.host.kill(max(deadline - time.monotonic(), KILL_TIMEOUT_S / 4))
            finally:
                self._end_threads("it was stopped")
        return left

    def disconnect(self) -> None:
        """Ends the threads of a handle that is a copy; the worker goes on. What waits for a call through it fails."""
        if self._is_owner:
            raise RolloutError(
                f"disconnect() of worker {self.worker_id} is for copies of its handle; stop() ends this one"
            )
        self._end_threads("its handle was disconnected")

    def abandon(self) -> None:
        """Kills the process and waits for nothing, as when the driver exits."""
        self._now.end("its driver exits")
        self._is_stopped = True
        self._now.host.kill_later()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        with self._changed:
            return {
                "worker_id": self.worker_id,
                "config": self.config,
                "host": self._now.host,
                "incarnation": self._now.number,
                "serve_from": self._serve_from,
                "read_up_to": self._now.read_up_to,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        read_up_to = state.pop("read_up_to")
        self.__init__(**state)  # type: ignore[misc]
        self._now.read_up_to = read_up_to
        self._is_owner = False

    def __repr__(self) -> str:
        return f"Worker({self.worker_id!r}, incarnation={self._now.number}, {self._state()})"

    # ------------------------------------------------------------------------------------------------------ inside

    def _begin(self, incarnation: int, host: RemoteHost) -> None:
        self._now = Incarnation(incarnation, host, self.config, self._changed)

    def _end_threads(self, reason: str) -> None:
        self._now.end(reason)
        self._calls.fail_all(WorkerDiedError(f"a call of worker {self._now.host.name} is not waited for: {reason}"))
        self._calls.stop(JOIN_S)
        self._now.join(JOIN_S)
        self._joins.join(JOIN_S)

    @contextmanager
    def _alone(self, what: str, timeout_s: float) -> Iterator[None]:
        if not self._life.acquire(timeout=timeout_s):
            raise WorkerUnreachableError(
                f"{what}() of worker {self.worker_id} waited {timeout_s:g} s for another restart or stop of it"
            )
        try:
            yield
        finally:
            self._life.release()

    def _state(self) -> WorkerState:
        with self._changed:
            return WorkerState.RESTARTING if self._is_restarting else self._now.state(self._serve_from)

    def _check_owner(self, what: str) -> None:
        if not self._is_owner:
            raise RolloutError(
                f"{what}() of worker {self.worker_id} belongs to the handle that started it, this is a copy"
            )


_owned: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _stop_owned() -> None:
    # before Ray's own exit, which would find heartbeats still asking
    for worker in list(_owned):
        worker.abandon()

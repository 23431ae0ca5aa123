"""What a controller needs of the world: workers, something that makes them, and a loop to run on.

A worker in this process, one behind Ray and one of `rollout.simulate` are the same to the controller.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rollout.status import EngineStats
from rollout.types import Rollout
from rollout.workers.wire import Finished, Refusal, WorkerState, WorkItem

T = TypeVar("T")


class Health(Protocol):
    """How a worker stands, as far as is known without asking it."""

    @property
    def state(self) -> WorkerState: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def engine(self) -> EngineStats | None: ...
    @property
    def reason(self) -> str | None: ...


class FleetWorker(Protocol):
    """One engine, wherever it lives. Every accepted item ends in exactly one `Finished` a sample, unless the worker
    dies; then each method raises WorkerDiedError until `restart`, which raises WorkerIrreplaceableError where no try can
    ever help."""

    @property
    def worker_id(self) -> str: ...
    def submit(self, items: Sequence[WorkItem]) -> list[Refusal]: ...
    def poll(self, max_items: int, timeout_s: float) -> list[Finished]: ...
    def cancel(self, request_ids: Sequence[str]) -> list[str]: ...
    def call(self, fn: Callable[..., T], *args: Any) -> "Future[T]": ...
    def snapshot(self) -> list[Rollout]: ...
    def health(self) -> Health: ...
    def on_join(self, callback: Callable[[Any], None]) -> None: ...
    def require_version(self, version: int) -> None: ...
    def restart(self, *, serve_from_version: int | None = None) -> None: ...
    def stop(self, timeout_s: float) -> list[Finished]: ...


class Fleet(Protocol):
    """Makes workers."""

    def start(self, serve_from_version: int) -> Sequence[FleetWorker]:
        """The workers to begin with, running. They serve nothing below that version."""

    def add_worker(self, serve_from_version: int) -> FleetWorker:
        """One more."""

    def stop(self, timeout_s: float) -> None:
        """Ends whatever workers do not end themselves."""


class WorkerEvents(Protocol):
    """What a link tells its owner, on the loop."""

    def on_results(self, worker_id: str, results: Sequence[Finished]) -> None:
        """Results came. May be empty: the worker changed, in its version say."""

    def on_refused(self, worker_id: str, refused: Sequence[tuple[WorkItem, Exception]]) -> None:
        """Items were not taken."""

    def on_lost(self, worker_id: str, error: Exception) -> None:
        """The worker died, or cannot be talked to."""

    def on_restart_failed(self, worker_id: str, error: Exception) -> None:
        """No new incarnation came of a restart that was asked for."""

    def on_restarted(self, worker_id: str) -> None:
        """A new incarnation is there."""

    def on_snapshot(self, worker_id: str, rollouts: Sequence[Rollout]) -> None:
        """The partial rollouts that were asked for."""


class Link(Protocol):
    """A worker's methods without their waiting: what comes of them is told to the WorkerEvents."""

    def submit(self, items: Sequence[WorkItem]) -> None: ...
    def cancel(self, request_ids: Sequence[str]) -> None: ...
    def snapshot(self) -> None: ...
    def restart(self, serve_from_version: int) -> None: ...
    def close(self) -> None: ...


class Loop(Protocol):
    """A clock, and one place where callbacks run, one at a time."""

    @property
    def tick_s(self) -> float:
        """How often to look at what nobody tells of: versions, time limits, watchdogs."""

    def now(self) -> float:
        """Seconds; only differences mean anything."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs it on the loop, after what is waiting there. From any thread."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Runs it on the loop after a delay."""

    def wait(self, future: "Future[T]", timeout_s: float) -> T:
        """The future's result; TimeoutError after `timeout_s`. Not from the loop itself."""

    def link(self, worker: FleetWorker, events: WorkerEvents) -> Link:
        """Begins to listen to a worker."""

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        """Begins to run. `on_error`: a callback raised; called on the loop."""

    def stop(self, timeout_s: float) -> None:
        """Ends, and closes every link."""

    def join(self, timeout_s: float) -> None:
        """After the stop, and after that of the workers: waits for the links' threads."""

"""What runs in a worker's process: one engine, the requests it holds, and the results that wait to be read.

Nothing here knows of Ray. Results are kept until the reader says that it has them, so that an answer lost on its way
loses no result; what is held, in flight or unread, is bounded by refusing requests.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from rollout.engine import GenerationEngine
from rollout.errors import (
    InvalidRequestError,
    RolloutError,
    WorkerBusyError,
    WorkerDiedError,
    WorkerStaleError,
    WorkerUnreachableError,
)
from rollout.requests.delivery import RolloutFuture
from rollout.status import EngineState
from rollout.types import Rollout
from rollout.worker_config import WorkerConfig, call_factory, is_factory
from rollout.workers.revival import EngineRevival
from rollout.workers.start_item import start_item
from rollout.workers.wire import Batch, Finished, Kept, Parcel, Refusal, Report, WorkerState, from_parcel, pack

log = logging.getLogger("rollsync")

PULSE_S = 1.0
"""How often an engine is looked at that has no request whose end would tell of its death."""


class WorkerHost:
    """One engine and its requests. `open` first; every method may be called from any thread."""

    def __init__(self, worker_id: str, config: WorkerConfig, *, incarnation: int, serve_from_version: int) -> None:
        self._worker_id = worker_id
        self._config = config
        self._incarnation = incarnation
        self._floor = serve_from_version
        self._changed = threading.Condition()  # guards and tells of all that follows
        self._held: dict[tuple[str, int], _Held] = {}
        self._results: deque[_Result] = deque()
        self._numbers = itertools.count(1)
        self._outstanding = 0
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="rollsync-keeper", daemon=True)

    def open(self) -> None:
        """Loads the model and starts the engine. InvalidRequestError for what cannot work."""
        self._engine = load_engine(self._config)
        self._revival = EngineRevival(self._engine, self._config.max_engine_restarts, name=self._worker_id)
        self._engine.start()
        self._keeper.start()

    def close(self, timeout_s: float) -> None:
        """Stops the engine. What was in flight ends with what it had (ABORT). Results can still be polled, and no poll
        waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._engine.stop(timeout_s)
        self._keeper.join(timeout_s)

    # ---------------------------------------------------------------------------------------------------- requests

    def submit(self, parcels: Sequence[Parcel], read_up_to: int) -> list[Refusal]:
        """Takes each item or refuses it alone. `read_up_to`: see `poll`."""
        self._revive()
        refusals = []
        with self._changed:
            self._forget(read_up_to)
        for parcel in parcels:
            try:
                self._take(parcel)
            except RolloutError as error:
                refusals.append(Refusal(position=parcel.position, request_id=parcel.request_id, error=error))
            except Exception as error:  # what nobody thought of must not stop the items behind it
                log.exception("worker %s could not take request %s", self._worker_id, parcel.request_id)
                unforeseen = RolloutError(f"{type(error).__name__}: {error}")
                refusals.append(Refusal(position=parcel.position, request_id=parcel.request_id, error=unforeseen))
        return refusals

    def cancel(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests (ABORT, with what they had). A group's id stands for each of its samples. Returns the ids of which
        nothing was in flight."""
        missed = []
        for request_id in request_ids:
            with self._changed:
                futures = [
                    future
                    for (name, _), held in self._held.items()
                    for future in held.futures
                    if request_id in (name, future.request_id)
                ]
            if sum(future.cancel() for future in futures) == 0:
                missed.append(request_id)
        return missed

    def poll(self, read_up_to: int, max_items: int, timeout_s: float) -> tuple[Batch, int]:
        """The oldest results, up to `max_items`, and the number of the last of them; waits up to `timeout_s` for the first.
        Results up to number `read_up_to` have reached the reader and are dropped; the others stay."""
        with self._changed:
            self._forget(read_up_to)
            self._changed.wait_for(lambda: self._results or self._closed, timeout_s)
            results = list(itertools.islice(self._results, max_items))
        return pack([result.kept for result in results]), results[-1].number if results else read_up_to

    # -------------------------------------------------------------------------------------------- weights and state

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float) -> Any:
        """`fn(engine, *args, **kwargs)` on the engine's control thread. WorkerUnreachableError if it has not ended in
        time; it is not run at all if it has not begun by then."""
        self._revive()  # a publish between a death and the return would find no engine
        future = self._engine.call(fn, *args, **kwargs)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                return future.result()  # its own TimeoutError, or it ended at this very moment
            begun = "is still running there" if not future.cancel() else "had not begun and will not"
            raise WorkerUnreachableError(
                f"call({_name(fn)}) to worker {self._worker_id} took longer than {timeout_s:g} s; it {begun}"
            ) from error
        finally:
            with self._changed:
                self._changed.notify_all()  # it may have moved the version

    def snapshot(self) -> Batch:
        """The partial rollouts in flight, oldest first."""
        rollouts = self._engine.snapshot()
        with self._changed:
            owners = {future.request_id: held for held in self._held.values() for future in held.futures}
        return pack([self._kept(owners[r.rollout_id], r) for r in rollouts if r.rollout_id in owners])

    def require_version(self, version: int) -> None:
        """From now on it serves nothing new below `version`. What is in flight goes on."""
        with self._changed:
            self._floor = max(self._floor, version)
            self._changed.notify_all()

    def report(self) -> Report:
        """How it stands."""
        stats = self._engine.stats()
        return Report(state=self._state(stats.state, stats.version), version=stats.version, engine=stats)

    def beat(self, seen: tuple[WorkerState, int] | None, wait_s: float) -> Report:
        """The report, as soon as state and version are not as `seen`, after `wait_s` at the latest."""

        def moved() -> bool:
            return (self._state(self._engine.state, self._engine.version), self._engine.version) != seen

        with self._changed:
            self._changed.wait_for(moved, wait_s)
        return self.report()

    # ------------------------------------------------------------------------------------------------------ inside

    def _take(self, parcel: Parcel) -> None:
        key = (parcel.request_id, parcel.attempt)
        with self._changed:
            if key in self._held:
                return  # the sender did not hear that it was taken
            self._check_serving()
            if self._outstanding + parcel.size > self._config.max_outstanding:
                raise WorkerBusyError(
                    f"worker {self._worker_id} holds {self._outstanding} requests and unread results, its limit is "
                    f"max_outstanding={self._config.max_outstanding}: poll() its results, then submit again"
                )
            held = self._held[key] = _Held(metadata=parcel.metadata, attempt=parcel.attempt, unread=parcel.size)
            self._outstanding += parcel.size
        try:
            futures = start_item(self._engine, from_parcel(parcel))
        except BaseException:
            with self._changed:
                del self._held[key]
                self._outstanding -= parcel.size
            raise
        with self._changed:
            held.futures = list(futures)
        for future in futures:
            future.add_done_callback(lambda done: self._on_done(key, held, done))

    def _check_serving(self) -> None:
        if self._closed:
            raise WorkerDiedError(f"worker {self._worker_id} is being stopped")
        version = self._engine.version
        if version < self._floor:
            raise WorkerStaleError(
                f"worker {self._worker_id} (incarnation {self._incarnation}) is at version {version} and may serve from "
                f"{self._floor} on; publish to it (sync.WeightSync does when it joins)"
            )

    def _on_done(self, key: tuple[str, int], held: "_Held", future: "Future[Rollout]") -> None:
        # the engine's delivery thread
        rollout = future.result()
        with self._changed:
            held.futures = [other for other in held.futures if other is not future]
            self._revival.saw(rollout)
            self._results.append(_Result(next(self._numbers), key, self._kept(held, rollout)))
            self._changed.notify_all()

    def _kept(self, held: "_Held", rollout: Rollout) -> Kept:
        labelled = replace(rollout, attempt=held.attempt, worker_id=self._worker_id)
        finished = Finished(rollout=labelled, attempt=held.attempt, incarnation=self._incarnation)
        return Kept(finished=finished, metadata=held.metadata)

    def _forget(self, read_up_to: int) -> None:
        while self._results and self._results[0].number <= read_up_to:
            key = self._results.popleft().key
            self._outstanding -= 1
            self._held[key].unread -= 1
            if not self._held[key].unread:
                del self._held[key]

    def _state(self, engine: EngineState, version: int) -> WorkerState:
        if engine == EngineState.DEAD and not self._closed:
            return WorkerState.DEAD if self._revival.is_over else WorkerState.RESTARTING
        if engine == EngineState.FENCED or (engine == EngineState.RUNNING and version < self._floor):
            return WorkerState.STALE
        return WorkerState.HEALTHY if engine == EngineState.RUNNING else WorkerState.DEAD

    def _keep(self) -> None:
        """The keeper's thread: brings the engine back when its loop has died."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed or self._revival.is_due, PULSE_S) and self._closed:
                    return
            self._revive()

    def _revive(self) -> None:
        with self._changed:
            if self._closed:
                return
        if self._revival.revive():
            with self._changed:
                self._changed.notify_all()


def load_engine(config: WorkerConfig) -> GenerationEngine:
    """The engine that `config` describes, not started, with weights of its own."""
    threads = config.num_threads
    if threads is None and config.num_cpus >= 1:
        threads = int(config.num_cpus)
    settings = replace(config.engine, num_threads=config.engine.num_threads or threads)
    device = "cuda" if config.num_gpus else "cpu"
    tokenizer: Any = config.tokenizer
    if tokenizer is not None:
        assert isinstance(tokenizer, str)
        tokenizer = call_factory(tokenizer) if is_factory(tokenizer) else AutoTokenizer.from_pretrained(tokenizer)
    assert isinstance(config.model, str)
    try:
        if not is_factory(config.model):
            return GenerationEngine.from_pretrained(
                config.model, settings, dtype=config.dtype, device=device, tokenizer=tokenizer
            )
        model = call_factory(config.model)
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(
                f"the factory {config.model!r} must return a transformers PreTrainedModel, got {type(model).__name__}"
            )
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the model {config.model!r} cannot be loaded: {error}") from error
    # Nobody else holds this model, but a factory may have mapped a file, in which the first write is slow.
    return GenerationEngine(
        model.to(device=device, dtype=config.dtype), settings, copy_weights=True, tokenizer=tokenizer
    )


@dataclass(kw_only=True, eq=False)
class _Held:
    """An accepted item, until all its results have been read."""

    metadata: bytes
    attempt: int
    unread: int  # results, those yet to come included
    futures: list[RolloutFuture] = field(default_factory=list)  # of what is in flight


@dataclass(frozen=True)
class _Result:
    number: int
    key: tuple[str, int]
    kept: Kept


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))

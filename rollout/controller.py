"""`RolloutController`: batches of complete, rewarded groups from a fleet that never stops."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from rollout.batches.collection import GroupWork
from rollout.batches.entries import Ending
from rollout.batches.groups import KeepGroup, rewards_differ
from rollout.batches.lease import Lease
from rollout.batches.prompts import Prompt, Prompts, Rows, encode_prompt
from rollout.batches.rewards import GroupRewardFn, RewardFn, RewardPool, RewardRunner
from rollout.config import EngineConfig
from rollout.engine import GenerationEngine
from rollout.errors import EngineStateError, InvalidRequestError, RolloutStalledError
from rollout.fleet import checkpoint
from rollout.fleet.checkpoint import HighestVersion
from rollout.fleet.coordinator import Coordinator
from rollout.fleet.fleets import fleet_for
from rollout.fleet.local_fleet import LocalFleet
from rollout.fleet.loop import ThreadLoop
from rollout.fleet.protocols import Fleet, FleetWorker, Loop
from rollout.fleet.report import Status, metrics_of
from rollout.fleet.rollout_log import RolloutLog
from rollout.fleet.scoring import Scoring
from rollout.fleet.targets import FleetTarget
from rollout.requests.checks import check_limit
from rollout.rollout_config import RolloutConfig
from rollout.status import UpdateRecord
from rollout.types import Rollout, SamplingParams

if TYPE_CHECKING:
    from rollout.worker_config import WorkerConfig

log = logging.getLogger("rollsync")

T = TypeVar("T")

STOP_TIMEOUT_S = 30.0
SNAPSHOTS_AT_ONCE = 16
ASK_TIMEOUT_S = 60.0
"""How long the loop may take to answer what it answers at once."""


class RolloutController:
    """Keeps a fleet generating, and hands out what it made.

        with RolloutController(model, prompts, reward_fn, tokenizer=tokenizer) as controller:
            for step in range(num_steps):
                with controller.next_batch(timeout_s=600) as lease:
                    ...train on lease.groups...
                with controller.update():
                    optimizer.step()

    `model`: with `num_workers=0` a module, which one engine in this process shares; else a path or an importable factory.
    A prompt is token ids, text, chat messages, or a dict with "prompt" and columns that become metadata; see
    `rollout.batches.prompts`. `reward_fn(rollout, text)` returns a number or a RewardResult, or is a coroutine function;
    `group_reward_fn(rollouts)` returns a list of them instead; without either, rewards are the trainer's.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Callable[[], PreTrainedModel],
        prompts: "Iterable[Any] | Rows",
        reward_fn: RewardFn | None = None,
        *,
        tokenizer: Any = None,
        engine: EngineConfig | None = None,
        config: RolloutConfig | None = None,
        workers: "WorkerConfig | None" = None,
        group_reward_fn: GroupRewardFn | None = None,
        keep_group: KeepGroup | None = None,
    ) -> None:
        """`workers`: CPUs, GPUs, threads and limits of each Ray worker; its model and engine are replaced by those given
        here. `keep_group(rollouts)`: the dynamic filter, for rules beyond `RolloutConfig.drop_equal_rewards`."""
        config = config if config is not None else RolloutConfig()
        self._set_up(
            fleet_for(model, engine if engine is not None else EngineConfig(), config, workers, tokenizer),
            prompts,
            reward_fn,
            group_reward_fn=group_reward_fn,
            keep_group=keep_group,
            config=config,
            tokenizer=tokenizer,
            loop=None,
            rewards=None,
        )

    @classmethod
    def over(
        cls,
        fleet: Fleet,
        prompts: "Iterable[Any] | Rows",
        reward_fn: RewardFn | None = None,
        *,
        tokenizer: Any = None,
        config: RolloutConfig | None = None,
        group_reward_fn: GroupRewardFn | None = None,
        keep_group: KeepGroup | None = None,
        loop: Loop | None = None,
        rewards: RewardRunner | None = None,
    ) -> Self:
        """A controller over workers of another kind, as those of `rollout.simulate`."""
        controller = cls.__new__(cls)
        controller._set_up(
            fleet,
            prompts,
            reward_fn,
            group_reward_fn=group_reward_fn,
            keep_group=keep_group,
            config=config if config is not None else RolloutConfig(),
            tokenizer=tokenizer,
            loop=loop,
            rewards=rewards,
        )
        return controller

    def _set_up(
        self,
        fleet: Fleet,
        prompts: "Iterable[Any] | Rows",
        reward_fn: RewardFn | None,
        *,
        group_reward_fn: GroupRewardFn | None,
        keep_group: KeepGroup | None,
        config: RolloutConfig,
        tokenizer: Any,
        loop: Loop | None,
        rewards: RewardRunner | None,
    ) -> None:
        if keep_group is None and config.drop_equal_rewards:
            keep_group = rewards_differ
        self.config = config
        self.fleet = fleet
        self._tokenizer = tokenizer
        self._loop = loop if loop is not None else ThreadLoop()
        if rewards is None:
            rewards = RewardPool(config.reward_concurrency, config.reward_timeout_s)
        self._rewards = rewards
        scoring = Scoring(self._rewards, self._loop, reward_fn, group_reward_fn, tokenizer)
        self._prompts = Prompts(
            prompts,
            tokenizer,
            num_epochs=config.num_epochs,
            shuffle_seed=config.seed if config.shuffle else None,
        )
        self._log = None if config.rollouts_jsonl is None else RolloutLog(Path(config.rollouts_jsonl), tokenizer)
        self._highest = HighestVersion(None if config.versions_file is None else Path(config.versions_file))
        self._coordinator = Coordinator(
            self._loop,
            self._prompts,
            scoring,
            config,
            keep_group=keep_group,
            on_end=self._group_ended,
            on_version=self._highest.saw,
            on_update=self._updated,
        )
        self._bar = tqdm(desc="rollouts", unit="rollout") if config.progress_bar else None
        self._life = threading.Lock()
        self._is_running = False
        self._has_stopped = False
        self._join_callbacks: list[Callable[[FleetTarget], None]] = []
        self._pending_state: Mapping[str, Any] | None = None

    # -------------------------------------------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Starts the workers and begins to generate. `with controller:` does this and the stop."""
        with self._life:
            if self._is_running or self._has_stopped:
                raise EngineStateError("the controller is running already, or was stopped; make a new one")
            try:
                serve_from = self._highest.next
                if self._pending_state is not None:
                    serve_from = checkpoint.load(self._coordinator, self._pending_state, self._highest)
                workers = self.fleet.start(serve_from)
            except BaseException:
                # `with` does not leave what it could not enter
                self._has_stopped = True
                self._release(STOP_TIMEOUT_S)
                raise
            self._loop.start(self._coordinator.fail)
            self._is_running = True
        self._ask(lambda: self._begin(workers))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends generation. What is outstanding is lost unless `state_dict()` was taken. Safe to call again."""
        with self._life:
            was_running, self._is_running, self._has_stopped = self._is_running, False, True
        if was_running:
            self._loop.stop(timeout_s)
            self._coordinator.fail(EngineStateError("the controller was stopped"))
        self._release(timeout_s)
        if was_running:
            self._loop.join(timeout_s)

    def _release(self, timeout_s: float) -> None:
        self._rewards.stop(timeout_s)
        self.fleet.stop(timeout_s)
        if self._log is not None:
            self._log.close()
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ----------------------------------------------------------------------------------------------------- batches

    def next_batch(self, timeout_s: float = 600.0) -> Lease:
        """The next `prompts_per_step` complete groups. Raises RolloutStalledError, with a `status`, after `timeout_s` or as
        soon as a watchdog sees that nothing will come; PromptsExhaustedError at the end; whatever is fatal to the fleet.
        At the end of the prompts the last batch may be short."""
        timeout_s = check_limit(timeout_s)
        self._check_running()
        future: Future[Lease] = Future()
        began_at = self._loop.now()
        self._loop.call_soon(lambda: self._coordinator.next_batch(future))
        try:
            lease = self._loop.wait(future, timeout_s)
        except TimeoutError as error:
            if isinstance(error, RolloutStalledError):
                raise
            if not future.cancel():
                lease = future.result()  # it came at that very moment
            else:
                status = self.status()
                why = "; ".join(status["waits_for"]) or "nothing is known to be missing"
                raise RolloutStalledError(f"no batch within {timeout_s:g} s: {why}", status) from None
        except BaseException:
            # an interrupted caller gets no batch: one that came meanwhile goes back
            if not future.cancel() and future.exception() is None:
                future.result().give_back()
            raise
        self._coordinator.metrics.waited_s += self._loop.now() - began_at
        self._show(lease)
        return lease

    def drain(self, timeout_s: float = 600.0) -> None:
        """Admits no new prompt, and returns when nothing is left to generate or reward. Ready groups can still be handed
        out; the last batch may be short. `resume()` goes on. RolloutStalledError after `timeout_s`."""
        self._wait(self._coordinator.drain, check_limit(timeout_s), "draining")

    def resume(self) -> None:
        """Admits prompts again after `drain()`."""

        def go_on() -> None:
            self._coordinator.is_draining = False
            self._coordinator.changed()

        self._ask(go_on)

    def cancel(self, group_id: str) -> None:
        """Ends a group that has not been handed out: its samples count as cancelled. InvalidRequestError if there is none."""
        self._ask(lambda: self._coordinator.cancel(group_id))

    def evaluate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        timeout_s: float = 600.0,
    ) -> list[Rollout]:
        """Rollouts of other prompts on the same fleet, between those of training: `num_samples` for each prompt, in order,
        rewarded by the same function; one that failed (ERROR, after its retries) or cannot be rewarded says why in `error`. They are in no batch and in no
        account. An update through `update()` or a publish waits for them, up to `evaluation_wait_s`."""
        timeout_s = check_limit(timeout_s)
        params = params if params is not None else self.config.sampling
        ready: list[Prompt] = []
        for number, row in enumerate(prompts):
            try:
                ids, metadata = encode_prompt(row, self._tokenizer)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"evaluation prompt {number}: {error}") from None
            ready.append(Prompt(number=number, prompt_id=f"e{number}", prompt_ids=ids, metadata=metadata))

        def begin(future: "Future[list[Rollout]]") -> None:
            self._coordinator.evaluations.begin(ready, params, num_samples, future)
            self._coordinator.changed()

        return self._wait(begin, timeout_s, "evaluating")

    # ----------------------------------------------------------------------------------------------------- workers

    @property
    def version(self) -> int:
        """The fleet's policy version: the newest that any worker has confirmed."""
        return self._coordinator.version

    @property
    def engine(self) -> GenerationEngine:
        """The engine of `num_workers=0`."""
        if isinstance(self.fleet, LocalFleet):
            return self.fleet.engine
        raise EngineStateError("the engines of this fleet are in other processes; see workers()")

    @contextmanager
    def update(self, version: int | None = None, timeout_s: float = 30.0) -> Iterator[nn.Module]:
        """The live update of `num_workers=0`, as `engine.update`: after the evaluations that are under way, up to
        `evaluation_wait_s`, so that each result is of one version."""
        engine = self.engine
        coordinator = self._coordinator
        (worker_id,) = coordinator.roster.seats
        clear: Future[None] = Future()

        def go() -> None:
            clear.set_result(None)

        self._ask(lambda: coordinator.evaluations.before_commit(worker_id, go))
        try:
            try:
                self._loop.wait(clear, self.config.evaluation_wait_s)
            except TimeoutError:
                self._ask(lambda: coordinator.evaluations.stop_waiting(go))
            with engine.update(version, timeout_s) as model:
                yield model
        finally:
            self._ask(lambda: coordinator.evaluations.after_commit(worker_id))
        self._ask(coordinator.refresh)

    def targets(self) -> list[FleetTarget]:
        """The workers, for `sync.WeightSync`."""
        return [FleetTarget(worker, self._coordinator) for worker in self.workers()]

    def workers(self) -> list[FleetWorker]:
        """Those of the fleet at the moment."""
        return self._ask(lambda: [seat.worker for seat in self._coordinator.roster.seats.values()])

    def add_worker(self) -> str:
        """One more worker; returns its id. It serves once it holds the fleet's version."""
        self._check_running()
        worker = self.fleet.add_worker(self._ask(self._coordinator.look))
        for callback in self._join_callbacks:
            self._call_on_join(worker, callback)
        self._ask(lambda: self._coordinator.add_worker(worker))
        return worker.worker_id

    def remove_worker(self, worker_id: str, *, timeout_s: float = 60.0) -> None:
        """Takes a worker out of the fleet and stops it. What it runs goes on elsewhere, from where it is; from its last
        snapshot if it does not answer."""
        timeout_s = check_limit(timeout_s)
        seat = self._ask(lambda: self._coordinator.remove_worker(worker_id, migrate=False))
        self._note_snapshots([seat.worker], timeout_s)
        self._ask(lambda: self._coordinator.remove_worker(worker_id, migrate=True))
        seat.worker.stop(timeout_s)

    def on_join(self, callback: Callable[[FleetTarget], None]) -> None:
        """Calls it with each worker that comes without the fleet's weights: a new incarnation, or one that was added. On a
        thread of the worker's; there it may publish to the target and wait for that."""
        self._join_callbacks.append(callback)
        for worker in self.workers():
            self._call_on_join(worker, callback)

    def _call_on_join(self, worker: FleetWorker, callback: Callable[[FleetTarget], None]) -> None:
        worker.on_join(lambda joined: callback(FleetTarget(joined, self._coordinator)))

    # ---------------------------------------------------------------------------------------------------- accounts

    def status(self) -> Status:
        """Who waits for what. JSON-safe."""
        if not self._is_running:
            return self._coordinator.status()
        return self._ask(self._coordinator.status)

    def metrics(self) -> dict[str, float]:
        """Numbers by the field's names: `rollout/...`, `reward/...`, `engine/...`, `trainer/...`."""
        return self._ask(lambda: metrics_of(self._coordinator))

    def state_dict(self, *, snapshot_timeout_s: float = 30.0) -> dict[str, Any]:
        """JSON-safe: everything that a run needs to go on elsewhere with no prompt lost and none trained twice: the prompt
        cursor, what is outstanding with its partial rollouts, ready groups, versions, and the seed. Leases that are out
        count as not trained: acknowledge, then save this together with the weights. A worker that does not answer within
        `snapshot_timeout_s` is saved as it was at its last snapshot."""
        self._check_running()
        self._note_snapshots(self.workers(), check_limit(snapshot_timeout_s))
        return self._ask(lambda: checkpoint.save(self._coordinator, self._highest))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, in a controller that has not started: over the same prompts, with the same seed. The
        weights must be those that were saved with it; they are called by a version above the highest ever published, and
        workers serve nothing until they hold it."""
        if self._is_running or self._has_stopped:
            raise EngineStateError("load_state_dict() comes before the start: make a new controller, load, then start")
        checkpoint.check(self._coordinator, state)
        self._pending_state = state

    # ------------------------------------------------------------------------------------------------------- inside

    def _note_snapshots(self, workers: Sequence[FleetWorker], timeout_s: float) -> None:
        pool = ThreadPoolExecutor(SNAPSHOTS_AT_ONCE, thread_name_prefix="rollsync-snapshot")
        asked = {worker.worker_id: pool.submit(worker.snapshot) for worker in workers}
        wait(asked.values(), timeout_s)
        pool.shutdown(wait=False)  # whoever does not answer has a limit of its own
        for worker_id, future in asked.items():
            if future.cancel() or not future.done():
                log.warning("no snapshot of worker %s within %.3g s", worker_id, timeout_s)
            elif (error := future.exception()) is not None:
                log.warning("no snapshot of worker %s: %s", worker_id, error)
            else:
                self._ask(partial(self._coordinator.on_snapshot, worker_id, future.result()))

    def _begin(self, workers: Sequence[FleetWorker]) -> None:
        # in one callback: the first worker alone would get all the work there is
        for worker in workers:
            self._coordinator.add_worker(worker)
        self._coordinator.begin()

    def _show(self, lease: Lease) -> None:
        if self._bar is not None:
            self._bar.set_postfix(version=lease.version, staleness=lease.staleness, refresh=False)
            self._bar.update(len(lease.rollouts))

    def _group_ended(self, work: GroupWork, ending: Ending) -> None:
        if self._log is not None:
            self._log.write(work, ending)

    def _updated(self, worker_id: str, record: UpdateRecord) -> None:
        if self._log is not None:
            self._log.write_update(worker_id, record)

    def _check_running(self) -> None:
        if not self._is_running:
            raise EngineStateError("the controller is not running; use `with controller:` or controller.start()")

    def _ask(self, function: Callable[[], T]) -> T:
        """Runs it on the loop."""

        def begin(future: "Future[T]") -> None:
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        return self._wait(begin, ASK_TIMEOUT_S, "asking the controller's loop")

    def _wait(self, begin: "Callable[[Future[T]], None]", timeout_s: float, doing: str) -> T:
        self._check_running()
        if self._coordinator.fatal is not None and doing != "asking the controller's loop":
            raise self._coordinator.fatal
        future: Future[T] = Future()
        self._loop.call_soon(lambda: begin(future))
        try:
            return self._loop.wait(future, timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            future.cancel()
            raise RolloutStalledError(f"{doing} took longer than {timeout_s:g} s", self._coordinator.status()) from None

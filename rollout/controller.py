"""`RolloutController`: batches of complete, rewarded groups from a fleet that never stops."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from rollout.batches.collection import GroupWork
from rollout.batches.entries import Ending
from rollout.batches.groups import KeepGroup, rewards_differ
from rollout.batches.lease import Lease
from rollout.batches.prompts import Prompts, Rows
from rollout.batches.rewards import GroupRewardFn, RewardFn, RewardPool, RewardRunner
from rollout.config import EngineConfig
from rollout.engine import GenerationEngine
from rollout.errors import EngineStateError, RolloutStalledError
from rollout.fleet import checkpoint
from rollout.fleet.checkpoint import HighestVersion
from rollout.fleet.coordinator import Coordinator
from rollout.fleet.evaluation import evaluation_prompts
from rollout.fleet.fleets import fleet_for
from rollout.fleet.local_fleet import LocalFleet
from rollout.fleet.loop import ThreadLoop
from rollout.fleet.protocols import Fleet, FleetWorker, Loop
from rollout.fleet.questions import Questions
from rollout.fleet.report import Status, metrics_of
from rollout.fleet.rollout_log import RolloutLog
from rollout.fleet.scoring import Scoring
from rollout.fleet.snapshots import note_snapshots
from rollout.fleet.targets import FleetTarget
from rollout.requests.checks import check_limit
from rollout.rollout_config import RolloutConfig
from rollout.status import UpdateRecord
from rollout.types import Rollout, SamplingParams

if TYPE_CHECKING:
    from rollout.worker_config import WorkerConfig

STOP_TIMEOUT_S = 30.0
STOPPED = "the controller was stopped"
ANSWER_GRACE_S = 60.0
"""How much longer than the limit that the loop keeps itself a caller waits for it to do so."""


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
        self._questions = Questions(self._coordinator)
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
            self._questions.open()
        self._questions.ask(lambda: self._begin(workers))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends generation. What is outstanding is lost unless `state_dict()` was taken. Whoever waits for a batch or another
        answer gets an EngineStateError at once. Safe to call again."""
        with self._life:
            was_running, self._is_running, self._has_stopped = self._is_running, False, True
        if was_running:
            self._loop.stop(timeout_s)
            self._coordinator.fail(EngineStateError(STOPPED))
            self._questions.close(STOPPED)
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
        began_at = self._loop.now()
        future = self._questions.put(self._coordinator.next_batch)
        try:
            lease = self._loop.wait(future, timeout_s)
        except TimeoutError:
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
        self._questions.wait(self._coordinator.drain, check_limit(timeout_s), "draining")

    def resume(self) -> None:
        """Admits prompts again after `drain()`."""

        def go_on() -> None:
            self._coordinator.is_draining = False
            self._coordinator.changed()

        self._questions.ask(go_on)

    def cancel(self, group_id: str) -> None:
        """Ends a group that has not been handed out: its samples count as cancelled. InvalidRequestError if there is none."""
        self._questions.ask(lambda: self._coordinator.cancel(group_id))

    def evaluate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        timeout_s: float = 600.0,
    ) -> list[Rollout]:
        """Rollouts of other prompts on the same fleet, between those of training: `num_samples` for each prompt, in order,
        rewarded by the same function; one that failed (ERROR: after its retries, or refused by the engine) or cannot be
        rewarded says why in `error`. They are in no batch and in no account, go before what waits of training, and an
        update through `update()` or a publish waits for them; see `rollout.fleet.evaluation`. Raises
        InvalidRequestError for a prompt that cannot be read, or if the engines refused every sample; RolloutStalledError
        after `timeout_s`, and then nothing of it goes on."""
        timeout_s = check_limit(timeout_s)
        params = params if params is not None else self.config.sampling
        ready = evaluation_prompts(prompts, self._tokenizer)

        def begin(future: "Future[list[Rollout]]") -> None:
            self._coordinator.evaluate(ready, params, num_samples, future)

        return self._questions.wait(begin, timeout_s, "evaluating")

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
        coordinator, questions = self._coordinator, self._questions
        (worker_id,) = coordinator.roster.seats

        def begin(clear: "Future[None]") -> None:
            coordinator.commit_begins(worker_id, lambda: clear.set_result(None))

        questions.wait(begin, self.config.evaluation_wait_s + ANSWER_GRACE_S, "waiting for evaluations")
        try:
            with engine.update(version, timeout_s) as model:
                yield model
        finally:
            questions.ask(lambda: coordinator.commit_ends(worker_id))

    def targets(self) -> list[FleetTarget]:
        """The workers, for `sync.WeightSync`."""
        return [FleetTarget(worker, self._coordinator) for worker in self.workers()]

    def workers(self) -> list[FleetWorker]:
        """Those of the fleet at the moment."""
        return self._questions.ask(lambda: [seat.worker for seat in self._coordinator.roster.seats.values()])

    def add_worker(self) -> str:
        """One more worker; returns its id. It serves once it holds the fleet's version."""
        worker = self.fleet.add_worker(self._questions.ask(self._coordinator.look))
        for callback in self._join_callbacks:
            self._call_on_join(worker, callback)
        self._questions.ask(lambda: self._coordinator.add_worker(worker))
        return worker.worker_id

    def remove_worker(self, worker_id: str, *, timeout_s: float = 60.0) -> None:
        """Takes a worker out of the fleet and stops it. What it runs goes on elsewhere, from where it is; from its last
        snapshot if it does not answer."""
        timeout_s = check_limit(timeout_s)
        seat = self._questions.ask(lambda: self._coordinator.remove_worker(worker_id, migrate=False))
        note_snapshots([seat.worker], self._coordinator, self._questions, timeout_s)
        self._questions.ask(lambda: self._coordinator.remove_worker(worker_id, migrate=True))
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
        return self._questions.ask(self._coordinator.status)

    def metrics(self) -> dict[str, float]:
        """Numbers by the field's names: `rollout/...`, `reward/...`, `engine/...`, `sync/...`, `trainer/...`. Each one is
        explained in docs/metrics.md."""
        return self._questions.ask(lambda: metrics_of(self._coordinator))

    def state_dict(self, *, snapshot_timeout_s: float = 30.0) -> dict[str, Any]:
        """JSON-safe: everything that a run needs to go on elsewhere with no prompt lost and none trained twice: the prompt
        cursor, what is outstanding with its partial rollouts, ready groups, versions, and the seed. Leases that are out
        count as not trained: acknowledge, then save this together with the weights. A worker that does not answer within
        `snapshot_timeout_s` is saved as it was at its last snapshot."""
        timeout_s = check_limit(snapshot_timeout_s)
        note_snapshots(self.workers(), self._coordinator, self._questions, timeout_s)
        return self._questions.ask(lambda: checkpoint.save(self._coordinator, self._highest))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, in a controller that has not started: over the same prompts, with the same seed. The
        weights must be those that were saved with it; they are called by a version above the highest ever published, and
        workers serve nothing until they hold it."""
        if self._is_running or self._has_stopped:
            raise EngineStateError("load_state_dict() comes before the start: make a new controller, load, then start")
        checkpoint.check(self._coordinator, state)
        self._pending_state = state

    # ------------------------------------------------------------------------------------------------------- inside

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

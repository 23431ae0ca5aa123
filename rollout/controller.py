"""`RolloutController`: batches of complete, rewarded groups from a fleet that never stops."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from transformers import PreTrainedModel

from rollout.batches.groups import KeepGroup
from rollout.batches.lease import Lease
from rollout.batches.prompts import Rows
from rollout.batches.rewards import GroupRewardFn, RewardFn, RewardRunner
from rollout.config import EngineConfig
from rollout.engine import GenerationEngine
from rollout.errors import EngineStateError, InvalidRequestError, RolloutStalledError
from rollout.fleet import checkpoint
from rollout.fleet.evaluation import check_evaluation, evaluation_prompts
from rollout.fleet.fleets import fleet_for
from rollout.fleet.local_fleet import OneEngine
from rollout.fleet.protocols import Fleet, FleetWorker, Loop
from rollout.fleet.report import Status, metrics_of
from rollout.fleet.run import STOP_TIMEOUT_S, FleetRun
from rollout.fleet.snapshots import note_snapshots
from rollout.fleet.targets import FleetTarget
from rollout.requests.checks import check_limit
from rollout.rollout_config import RolloutConfig
from rollout.types import Rollout, SamplingParams

if TYPE_CHECKING:
    from rollout.worker_config import WorkerConfig

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
    `group_reward_fn(rollouts)` returns a list of them instead; without either, rewards are the trainer's. A sample without a
    reward (it raised, took too long, returned None or nan) is drawn again, by default once, and then left out of its group:
    batches then hold more of what the function can judge than the policy makes; see `rollout.batches.rewards.RewardFn`.
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
        run = FleetRun(
            fleet_for(model, engine if engine is not None else EngineConfig(), config, workers, tokenizer),
            prompts,
            reward_fn,
            group_reward_fn=group_reward_fn,
            keep_group=keep_group,
            config=config,
            tokenizer=tokenizer,
        )
        self._take(run)

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
        run = FleetRun(
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
        controller._take(run)
        return controller

    def _take(self, run: FleetRun) -> None:
        self._run = run
        self.config, self.fleet = run.config, run.fleet
        self._loop, self._coordinator, self._questions = run.loop, run.coordinator, run.questions
        self._join_callbacks: list[Callable[[FleetTarget], None]] = []

    # -------------------------------------------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Starts the workers and begins to generate. `with controller:` does this and the stop."""
        self._run.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends generation. What is outstanding is lost unless `state_dict()` was taken. Whoever waits for a batch or another
        answer gets an EngineStateError at once. Safe to call again."""
        self._run.stop(timeout_s)

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
        soon as a watchdog sees that nothing will come; PromptsExhaustedError at the end; EngineFencedError, at once, where
        the weights of a fleet of one were changed outside `update()`, after which it goes on; whatever is fatal to the fleet.
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
                status = self._questions.status()
                why = "; ".join(status["waits_for"]) or "nothing is known to be missing"
                raise RolloutStalledError(f"no batch within {timeout_s:g} s: {why}", status) from None
        except BaseException:
            # an interrupted caller gets no batch: one that came meanwhile goes back
            if not future.cancel() and future.exception() is None:
                future.result().give_back()
            raise
        self._coordinator.metrics.waited_s += self._loop.now() - began_at
        self._run.show(lease)
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
        check_evaluation(prompts, params, num_samples)
        ready = evaluation_prompts(prompts, self._run.tokenizer)

        def begin(future: "Future[list[Rollout]]") -> None:
            self._coordinator.evaluate(ready, params, num_samples, future)

        return self._questions.wait(begin, timeout_s, "evaluating")

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        timeout_s: float = 600.0,
    ) -> list[Rollout]:
        """`num_samples` rollouts for each prompt of token ids, in order, as `evaluate` makes them but without a reward: no
        reward function is asked."""
        timeout_s = check_limit(timeout_s)
        wanted = params if params is not None else self.config.sampling
        check_evaluation(prompts, wanted, num_samples)
        ready = evaluation_prompts(prompts, None)

        def begin(future: "Future[list[Rollout]]") -> None:
            self._coordinator.evaluate(ready, wanted, num_samples, future, is_scored=False)

        return self._questions.wait(begin, timeout_s, "generating")

    # ----------------------------------------------------------------------------------------------------- workers

    @property
    def version(self) -> int:
        """The fleet's policy version: the newest that any worker has confirmed."""
        return self._coordinator.version

    @property
    def highest_version(self) -> int | None:
        """The highest version that was ever published in this run, also before the checkpoint that it goes on from, as far
        as that or `versions_file` knows; None: none was. A publish without a number goes on above it."""
        return self._run.highest.value

    @property
    def engine(self) -> GenerationEngine:
        """That of a fleet of one: `num_workers=0`, or a RunningEngine."""
        if isinstance(self.fleet, OneEngine):
            return self.fleet.engine
        raise EngineStateError("the engines of this fleet are in other processes; see workers()")

    @contextmanager
    def update(self, version: int | None = None, timeout_s: float = 30.0) -> Iterator[nn.Module]:
        """The live update of a fleet of one, as `engine.update`: after the evaluations that are under way, up to
        `evaluation_wait_s`, so that each result is of one version."""
        engine = self.engine
        coordinator, questions = self._coordinator, self._questions
        (worker_id,) = coordinator.roster.seats

        has_begun = False

        def begin(clear: "Future[None]") -> None:
            nonlocal has_begun
            has_begun = True
            coordinator.commit_begins(worker_id, lambda: clear.set_result(None))

        def end() -> None:
            if has_begun:
                coordinator.commit_ends(worker_id)

        try:
            # an interrupted wait has an end too: without one the worker would evaluate nothing any more
            questions.wait(begin, self.config.evaluation_wait_s + ANSWER_GRACE_S, "waiting for evaluations")
            with engine.update(version, timeout_s) as model:
                yield model
        finally:
            questions.ask(end)

    def targets(self) -> list[FleetTarget]:
        """The workers, for `sync.WeightSync`."""
        return [FleetTarget(worker, self._coordinator, self._questions) for worker in self.workers()]

    def workers(self) -> list[FleetWorker]:
        """Those of the fleet at the moment."""
        return self._questions.ask(lambda: [seat.worker for seat in self._coordinator.roster.seats.values()])

    def add_worker(self) -> str:
        """One more worker; returns its id. It serves once it holds the fleet's version."""
        worker = self.fleet.add_worker(self._questions.ask(self._coordinator.look))
        for callback in self._join_callbacks:
            self._call_on_join(worker, callback)
        self._questions.ask(lambda: self._coordinator.workforce.add_worker(worker))
        return worker.worker_id

    def remove_worker(self, worker_id: str, *, timeout_s: float = 60.0) -> None:
        """Takes a worker out of the fleet and stops it. What it runs goes on elsewhere, from where it is; from its last
        snapshot if it does not answer."""
        timeout_s = check_limit(timeout_s)
        if isinstance(self.fleet, OneEngine):
            raise InvalidRequestError("this fleet is one engine and cannot lose it; stop the controller")
        seat = self._questions.ask(lambda: self._coordinator.workforce.remove_worker(worker_id, migrate=False))
        note_snapshots([seat.worker], self._coordinator, self._questions, timeout_s)
        self._questions.ask(lambda: self._coordinator.workforce.remove_worker(worker_id, migrate=True))
        seat.worker.stop(timeout_s)

    def on_join(self, callback: Callable[[FleetTarget], None]) -> None:
        """Calls it with each worker that comes without the fleet's weights: a new incarnation, or one that was added. On a
        thread of the worker's; there it may publish to the target and wait for that."""
        self._join_callbacks.append(callback)
        for worker in self.workers():
            self._call_on_join(worker, callback)

    def _call_on_join(self, worker: FleetWorker, callback: Callable[[FleetTarget], None]) -> None:
        worker.on_join(lambda joined: callback(FleetTarget(joined, self._coordinator, self._questions)))

    # ---------------------------------------------------------------------------------------------------- accounts

    def status(self) -> Status:
        """Who waits for what. JSON-safe."""
        if not self._run.is_running:
            return self._coordinator.status()
        return self._questions.status()

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
        return self._questions.ask(lambda: checkpoint.save(self._coordinator, self._run.highest))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, in a controller that has not started: over the same prompts, with the same seed. The
        weights must be those that were saved with it; they are called by a version above the highest ever published, and
        workers serve nothing until they hold it."""
        self._run.load(state)

"""The parts of one controller, and their life: made together, started and stopped in order."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rollout.batches.entries import Ending
from rollout.batches.group_work import GroupWork
from rollout.batches.groups import KeepGroup, rewards_differ
from rollout.batches.lease import Lease
from rollout.batches.prompts import Prompts, Rows
from rollout.batches.rewards import GroupRewardFn, RewardFn, RewardPool, RewardRunner
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.fleet import checkpoint
from rollout.fleet.checkpoint import HighestVersion
from rollout.fleet.coordinator import Coordinator
from rollout.fleet.loop import ThreadLoop
from rollout.fleet.protocols import Fleet, FleetWorker, Loop
from rollout.fleet.questions import Questions
from rollout.fleet.rollout_log import RolloutLog
from rollout.fleet.scoring import Scoring
from rollout.rollout_config import RolloutConfig
from rollout.status import UpdateRecord

STOP_TIMEOUT_S = 30.0
STOPPED = "the controller was stopped"


class FleetRun:
    """Starts once, and stops once."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: "Iterable[Any] | Rows",
        reward_fn: RewardFn | None,
        *,
        group_reward_fn: GroupRewardFn | None,
        keep_group: KeepGroup | None,
        config: RolloutConfig,
        tokenizer: Any,
        loop: Loop | None = None,
        rewards: RewardRunner | None = None,
    ) -> None:
        """`loop` and `rewards`: None for those of real time."""
        if not isinstance(config, RolloutConfig):
            raise InvalidRequestError(f"config must be a RolloutConfig, got {config!r:.60}")
        if keep_group is not None and not callable(keep_group):
            raise InvalidRequestError(f"keep_group must be a function, got {keep_group!r:.60}")
        if config.drop_equal_rewards and reward_fn is None and group_reward_fn is None:
            raise InvalidRequestError(
                "drop_equal_rewards=True filters every group where there are no rewards; pass reward_fn"
            )
        if keep_group is None and config.drop_equal_rewards:
            keep_group = rewards_differ
        self.fleet = fleet
        self.config = config
        self.tokenizer = tokenizer
        self.loop = loop if loop is not None else ThreadLoop()
        if rewards is None:
            rewards = RewardPool(config.reward_concurrency, config.reward_timeout_s)
        self._rewards = rewards
        self._log = None if config.rollouts_jsonl is None else RolloutLog(Path(config.rollouts_jsonl), tokenizer)
        self.highest = HighestVersion(None if config.versions_file is None else Path(config.versions_file))
        self.coordinator = Coordinator(
            self.loop,
            Prompts(
                prompts,
                tokenizer,
                num_epochs=config.num_epochs,
                shuffle_seed=config.seed if config.shuffle else None,
            ),
            Scoring(rewards, self.loop, reward_fn, group_reward_fn, tokenizer),
            config,
            keep_group=keep_group,
            on_end=self._group_ended,
            on_version=self.highest.saw,
            on_update=self._updated,
        )
        self.questions = Questions(self.coordinator)
        self._bar = tqdm(desc="rollouts", unit="rollout") if config.progress_bar else None
        self._life = threading.Lock()
        self.is_running = False
        self._has_stopped = False
        self._state: Mapping[str, Any] | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        """It will go on from this checkpoint. EngineStateError once it has started."""
        if self.is_running or self._has_stopped:
            raise EngineStateError("load_state_dict() comes before the start: make a new controller, load, then start")
        checkpoint.check(self.coordinator, state)
        self._state = state

    def start(self) -> None:
        """Workers first; then the loop, and the first turn."""
        with self._life:
            if self.is_running or self._has_stopped:
                raise EngineStateError("the controller is running already, or was stopped; make a new one")
            try:
                serve_from = self.highest.next
                if self._state is not None:
                    serve_from = checkpoint.load(self.coordinator, self._state, self.highest)
                workers = self.fleet.start(serve_from)
            except BaseException:
                # `with` does not leave what it could not enter
                self._has_stopped = True
                self._release(STOP_TIMEOUT_S)
                raise
            self.loop.start(self.coordinator.fail)
            self.is_running = True
            self.questions.open()
        self.questions.ask(lambda: self._begin(workers))

    def stop(self, timeout_s: float) -> None:
        """The loop first: nothing is answered after it. Safe to call again."""
        with self._life:
            was_running, self.is_running, self._has_stopped = self.is_running, False, True
        if was_running:
            self.loop.stop(timeout_s)
            self.coordinator.fail(EngineStateError(STOPPED))
            self.questions.close(STOPPED)
        try:
            if was_running:
                self.highest.saw(self.coordinator.look())  # a publish may have come since the last turn
        finally:
            self._release(timeout_s)
            if was_running:
                self.loop.join(timeout_s)

    def show(self, lease: Lease) -> None:
        """A batch has been handed out: the live line says so."""
        if self._bar is not None:
            self._bar.set_postfix(version=lease.version, staleness=lease.staleness, refresh=False)
            self._bar.update(len(lease.rollouts))

    def _begin(self, workers: Sequence[FleetWorker]) -> None:
        # in one callback: the first worker alone would get all the work there is
        for worker in workers:
            self.coordinator.workforce.add_worker(worker)
        self.coordinator.begin()

    def _release(self, timeout_s: float) -> None:
        self._rewards.stop(timeout_s)
        self.fleet.stop(timeout_s)
        if self._log is not None:
            self._log.close()
        if self._bar is not None:
            self._bar.close()

    def _group_ended(self, work: GroupWork, ending: Ending) -> None:
        if self._log is not None:
            self._log.write(work, ending)

    def _updated(self, worker_id: str, record: UpdateRecord) -> None:
        if self._log is not None:
            self._log.write_update(worker_id, record)

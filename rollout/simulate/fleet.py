"""Simulated workers together, with a publisher and with what goes wrong."""

import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rollout.batches.groups import KeepGroup
from rollout.batches.prompts import Rows
from rollout.batches.rewards import GroupRewardFn, RewardFn
from rollout.controller import RolloutController
from rollout.errors import InvalidRequestError
from rollout.rollout_config import RolloutConfig
from rollout.simulate.clock import VirtualLoop
from rollout.simulate.faults import Faults
from rollout.simulate.lengths import ConstantLengths, Lengths
from rollout.simulate.rewards import SimulatedRewards
from rollout.simulate.worker import SimulatedWorker


class SimulatedFleet:
    """`num_workers` of them on one virtual clock, and the publishes that reach them."""

    def __init__(
        self,
        num_workers: int = 1,
        *,
        lengths: Lengths | None = None,
        slots: int = 64,
        max_outstanding: int = 4096,
        tokens_per_s: float = 50.0,
        prefill_s: float = 0.1,
        restart_s: float = 30.0,
        join_s: float = 2.0,
        stagger_s: float = 0.0,
        faults: Faults | None = None,
        seed: int = 0,
        loop: VirtualLoop | None = None,
    ) -> None:
        """`slots`: samples at once on one worker, which refuses more than `max_outstanding`. `restart_s`: from a death to the next incarnation, and `join_s` from there
        to its weights. `stagger_s`: commits of one publish reach the workers up to this much apart."""
        if num_workers < 1:
            raise InvalidRequestError(f"num_workers must be at least 1, got {num_workers}")
        self.loop = loop if loop is not None else VirtualLoop()
        self.version = 0
        """The newest that was published."""
        self.workers: dict[str, SimulatedWorker] = {}
        self._num_workers = num_workers
        self._settings: dict[str, Any] = {
            "slots": slots,
            "max_outstanding": max_outstanding,
            "tokens_per_s": tokens_per_s,
            "prefill_s": prefill_s,
            "restart_s": restart_s,
        }
        self._lengths = lengths if lengths is not None else ConstantLengths(tokens=100)
        self._join_s = join_s
        self._stagger_s = stagger_s
        self._faults = faults if faults is not None else Faults()
        self._seed = seed
        self._random = random.Random(seed)

    def controller(
        self,
        prompts: "Iterable[Any] | Rows",
        reward_fn: RewardFn | None = None,
        *,
        group_reward_fn: GroupRewardFn | None = None,
        keep_group: KeepGroup | None = None,
        reward_delay_s: float = 0.0,
        config: RolloutConfig | None = None,
    ) -> RolloutController:
        """The real controller over this fleet, on its clock."""
        return RolloutController.over(
            self,
            prompts,
            reward_fn,
            group_reward_fn=group_reward_fn,
            keep_group=keep_group,
            config=config,
            loop=self.loop,
            rewards=SimulatedRewards(self.loop, reward_delay_s),
        )

    def publish(self, version: int | None = None) -> int:
        """New weights for every worker; None: the next version. Returns it."""
        self.version = self.version + 1 if version is None else version
        for worker in self.workers.values():
            if self._stagger_s:
                delay_s = self._random.random() * self._stagger_s
                self.loop.call_later(delay_s, partial(worker.commit, self.version))
            else:
                worker.commit(self.version)
        return self.version

    # ---------------------------------------------------------------------------------- what every fleet has

    def start(self, serve_from_version: int) -> Sequence[SimulatedWorker]:
        self.version = max(self.version, serve_from_version)
        workers = [self._make() for _ in range(self._num_workers)]
        for worker_id, times in self._faults.deaths.items():
            for at in times:
                self.loop.call_later(at, self.workers[worker_id].die)
        for worker_id, spans in self._faults.freezes.items():
            for at, seconds in spans:
                self.loop.call_later(at, partial(self.workers[worker_id].freeze, seconds))
        if self._faults.seconds_between_deaths is not None:
            self._die_later(self._faults.seconds_between_deaths)
        return workers

    def add_worker(self, serve_from_version: int) -> SimulatedWorker:
        self.version = max(self.version, serve_from_version)
        return self._make()

    def stop(self, timeout_s: float) -> None:
        for worker in self.workers.values():
            worker.stop(timeout_s)

    def _make(self) -> SimulatedWorker:
        worker = SimulatedWorker(
            f"w{len(self.workers)}",
            self.loop,
            self._lengths,
            faults=self._faults,
            seed=self._seed,
            version=self.version,
            **self._settings,
        )
        self.workers[worker.worker_id] = worker
        worker.on_join(lambda worker: self.loop.call_later(self._join_s, lambda: worker.commit(self.version)))
        return worker

    def _die_later(self, mean_s: float) -> None:
        def die() -> None:
            self._random.choice(list(self.workers.values())).die()
            self._die_later(mean_s)

        self.loop.call_later(self._random.expovariate(1 / mean_s), die)

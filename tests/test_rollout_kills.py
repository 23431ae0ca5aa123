"""Two real workers, killed at random while new weights come each second: nobody lost, nobody doubled, no version wrong."""

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import worker_jobs
from fakes import VOCAB_SIZE, mark, marker_llama, wait_until

from rollout import EngineConfig, PromptsExhaustedError, RolloutConfig, RolloutController, SamplingParams
from rollout.fleet.targets import FleetTarget
from rollout.worker import WorkerConfig
from sync import SyncError, WeightSync

pytestmark = pytest.mark.ray

LIMIT_S = 240.0
NEW_TOKENS = 40
LATE_S = 2.0
PROBE = SamplingParams(max_new_tokens=3, stop_token_ids=())


def prompts() -> Iterator[list[int]]:
    return ([2 + n % 50, 3 + n % 7] for n in itertools.count())


class LateTarget:
    """A worker whose weights are late when it comes back: time enough to serve its old ones, if it would."""

    def __init__(self, target: FleetTarget) -> None:
        self.worker_id = target.worker_id
        self.call, self.require_version = target.call, target.require_version
        self._target = target

    def on_join(self, callback: Callable[["LateTarget"], None]) -> None:
        def later(_: FleetTarget) -> None:
            threading.Event().wait(LATE_S)
            callback(self)

        self._target.on_join(later)


class LateTargets:
    """Those of a controller."""

    def __init__(self, controller: RolloutController) -> None:
        self._controller = controller

    def targets(self) -> list[LateTarget]:
        return [LateTarget(target) for target in self._controller.targets()]


class Chaos:
    """Trains, asks, kills and publishes beside each other, on threads of their own, until `over`."""

    def __init__(self, controller: RolloutController, weight_sync: WeightSync, *, kill_every_s: tuple[float, float]):
        self.controller = controller
        self.weight_sync = weight_sync
        self.trained: Counter[str] = Counter()
        self.pids: set[int] = set()
        self.num_confirmed = 0
        self.returned: set[tuple[str, int]] = set()
        """(worker, incarnation) of those that were killed, came back and have answered."""
        self.confirmed = 0
        """The newest version that a publish has returned with."""
        self._kill_every_s = kill_every_s
        self._over = threading.Event()
        self._end = threading.Event()

    def run(self, seconds: float) -> None:
        """For so long, and until workers have come back and answered twice; then every prompt that was begun is finished."""
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(job) for job in (self._train, self._ask, self._kill, self._publish)]
            try:
                wait_until(lambda: self._is_enough(until) or any(job.done() for job in jobs), LIMIT_S)
                self._over.set()
                for job in jobs[1:]:
                    job.result(LIMIT_S)
                self.controller.drain(LIMIT_S)
                jobs[0].result(LIMIT_S)
            finally:
                self._over.set()
                self._end.set()

    def _is_enough(self, until: float) -> bool:
        has_happened = min(self.num_confirmed, len(self.returned), len(self.trained)) >= 2
        return has_happened and time.monotonic() > until

    def _train(self) -> None:
        while not self._end.is_set():
            try:
                lease = self.controller.next_batch(LIMIT_S)
            except PromptsExhaustedError:
                return  # it was drained
            with lease:
                for group, entry in zip(lease.groups, lease.entries, strict=True):
                    assert len(group) == 2
                    for rollout in group:
                        assert len(rollout.token_ids) == NEW_TOKENS
                        assert rollout.token_ids == [said(version) for version in rollout.versions]
                        assert (rollout.min_version or 0) >= entry.start_version, "older than when it was admitted"
                self.trained.update(group.prompt_id for group in lease.groups)
            assert self.controller.metrics()["rollout/imbalance"] == 0

    def _ask(self) -> None:
        """Whatever is begun after a publish has returned is of that version, or of a newer one, on whichever worker."""
        while not self._over.wait(0.2):
            confirmed = self.confirmed
            wait_until(lambda confirmed=confirmed: self.controller.version >= confirmed)
            before = self._incarnations()
            for rollout in self.controller.evaluate([[5, 6]], PROBE, num_samples=4, timeout_s=LIMIT_S):
                assert rollout.error is None
                assert rollout.token_ids == [said(version) for version in rollout.versions]
                assert (rollout.min_version or 0) >= confirmed
                incarnation = before[rollout.worker_id or ""]
                if incarnation and incarnation == self._incarnations()[rollout.worker_id or ""]:
                    self.returned.add((rollout.worker_id or "", incarnation))

    def _incarnations(self) -> dict[str, int]:
        return {worker.worker_id: worker.health().incarnation for worker in self.controller.workers()}

    def _kill(self) -> None:
        noise = random.Random(0)
        while True:
            pid = noise.choice(self.controller.workers()).health().pid
            self.pids.add(pid)
            with contextlib.suppress(psutil.NoSuchProcess):  # it is dead, and not yet replaced
                psutil.Process(pid).kill()
            if self._over.wait(noise.uniform(*self._kill_every_s)):
                return

    def _publish(self) -> None:
        trainer = marker_llama()
        for version in itertools.count(1):
            if self._over.wait(1.0):
                return
            mark(trainer, said(version))
            with contextlib.suppress(SyncError):  # both are dead: nobody took it, and it is confirmed to nobody
                self.confirmed = self.weight_sync.publish(trainer, version=version, timeout_s=30.0).version
                self.num_confirmed += 1


def said(version: int) -> int:
    """The token that a model of this version says."""
    return version % VOCAB_SIZE


def live_through(seconds: float, *, kill_every_s: tuple[float, float]) -> None:
    controller = RolloutController(
        worker_jobs.marker_llama,
        prompts(),
        lambda rollout, text: float(rollout.token_ids[0]),
        engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
        workers=WorkerConfig(model="replaced", num_cpus=0, num_threads=1, heartbeat_s=0.2, suspect_after_s=20.0),
        config=RolloutConfig(
            num_workers=2,
            group_size=2,
            prompts_per_step=2,
            max_staleness=8,  # versions come by the clock, not by the batch
            max_requeues=10**6,
            max_infra_retries=10**6,
            worker_restarts=10**6,
            evaluation_wait_s=2.0,
            snapshot_every_s=0.5,
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()),
        ),
    )
    with controller, WeightSync(LateTargets(controller)) as weight_sync:
        chaos = Chaos(controller, weight_sync, kill_every_s=kill_every_s)
        chaos.run(seconds)
        metrics, handed_out = controller.metrics(), controller.status()["prompts"]["handed_out"]
        pids = chaos.pids | {worker.health().pid for worker in controller.workers()}
    assert chaos.trained == Counter(f"p{n}" for n in range(handed_out))
    assert metrics["rollout/imbalance"] == metrics["rollout/samples_outstanding"] == 0
    assert metrics["rollout/samples_failed"] == metrics["rollout/samples_cancelled"] == 0
    assert metrics["rollout/samples_consumed"] == 2 * handed_out
    assert metrics["rollout/worker_deaths"] >= 1
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_twenty_seconds_of_kills_and_updates_lose_and_double_nothing(local_ray: str) -> None:
    live_through(20.0, kill_every_s=(2.0, 6.0))


@pytest.mark.slow
def test_two_minutes_of_kills_and_updates_lose_and_double_nothing(local_ray: str) -> None:
    live_through(120.0, kill_every_s=(2.0, 6.0))

"""The controller over real workers in processes of their own: they come, go and are placed; nobody is lost or doubled."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worker_jobs
from fakes import mark, marker_llama, tiny_llama, wait_until
from simulated_fleets import number_of

from rollout import (
    EngineConfig,
    InvalidRequestError,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    WorkerError,
    WorkerUnreachableError,
)
from rollout.batches.lease import Lease
from rollout.fleet.pool import RayFleet
from rollout.worker import WorkerConfig, WorkerState
from sync import WeightSync

pytestmark = pytest.mark.ray

ENGINE = EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
WORKERS = WorkerConfig(model="replaced", num_cpus=0, num_threads=1, heartbeat_s=0.2, suspect_after_s=20.0)
BATCH_S = 120.0
MAX_STALENESS = 2


def a_controller(num_prompts: int, workers: WorkerConfig = WORKERS, **settings: Any) -> RolloutController:
    defaults = {
        "num_workers": 2,
        "group_size": 2,
        "prompts_per_step": 3,
        "max_staleness": MAX_STALENESS,
        "max_infra_retries": 20,
        "snapshot_every_s": 0.5,
        "sampling": SamplingParams(max_new_tokens=60, stop_token_ids=()),
    }
    return RolloutController(
        worker_jobs.marker_llama,
        [[2 + n, 3] for n in range(num_prompts)],
        lambda rollout, text: float(rollout.token_ids[0]),
        engine=ENGINE,
        workers=workers,
        config=RolloutConfig(**{**defaults, **settings}),
    )


def check(lease: Lease) -> None:
    numbers = [number_of(group.group_id) for group in lease.groups]
    assert numbers == sorted(numbers), "the order of the prompts"
    for group in lease.groups:
        assert group.staleness <= MAX_STALENESS
        assert [rollout.sample_index for rollout in group] == [0, 1]
        for rollout in group:
            assert rollout.token_ids == rollout.versions, "the model says its version"
            assert len(rollout.token_ids) == 60


def publish(controller: RolloutController, version: int) -> None:
    """To every worker that can take it; at least one must."""
    took = []
    for target in controller.targets():
        with contextlib.suppress(WorkerError):  # it dies, or is dead
            took.append(target.call(worker_jobs.publish, version).result(60))
    assert took


def test_a_weight_sync_over_a_controller_reaches_whoever_is_there(local_ray: str) -> None:
    trainer = marker_llama()
    with a_controller(24) as controller, WeightSync(controller) as weight_sync:
        trained: Counter[str] = Counter()
        for step in range(8):
            with controller.next_batch(timeout_s=BATCH_S) as lease:
                check(lease)
                trained.update(group.prompt_id for group in lease.groups)
            if step == 2:
                os.kill(controller.workers()[0].health().pid, signal.SIGKILL)
            if step == 4:
                controller.add_worker()
            mark(trainer, step + 1)
            assert weight_sync.publish(trainer).version == step + 1
        wait_until(lambda: controller.version == 8)
        workers = controller.workers()
        assert len(workers) == 3
        wait_until(lambda: all(w.health().state is WorkerState.HEALTHY and w.version == 8 for w in workers), BATCH_S)
        assert controller.metrics()["rollout/imbalance"] == 0
    assert trained == Counter(f"p{n}" for n in range(24))


@pytest.mark.slow
def test_a_worker_whose_engine_is_given_up_is_replaced_though_its_process_lives(local_ray: str) -> None:
    workers = replace(WORKERS, max_engine_restarts=0)
    with a_controller(12, num_workers=1, workers=workers) as controller:
        (worker,) = controller.workers()
        first = worker.health().pid
        check(controller.next_batch(timeout_s=BATCH_S))
        controller.targets()[0].call(worker_jobs.kill_loop).result(60)
        for _ in range(3):
            with controller.next_batch(timeout_s=BATCH_S) as lease:
                check(lease)
        assert (worker.health().incarnation, worker.health().state) == (1, WorkerState.HEALTHY)
        assert worker.health().pid != first
        assert controller.metrics()["rollout/samples_failed"] == 0


def test_workers_join_and_leave_while_it_runs(local_ray: str) -> None:
    with a_controller(15, num_workers=1) as controller:
        (first,) = controller.workers()
        controller.next_batch(timeout_s=BATCH_S).acknowledge()
        publish(controller, 1)
        added = controller.add_worker()
        (second,) = [worker for worker in controller.workers() if worker.worker_id == added]
        assert second.health().state is WorkerState.STALE, "it does not hold version 1"
        second.call(worker_jobs.publish, 1).result(60)
        controller.remove_worker(first.worker_id)
        trained = 0
        while trained < 12:
            with controller.next_batch(timeout_s=BATCH_S) as lease:
                check(lease)
                trained += len(lease.groups)
        assert {rollout.worker_id for rollout in lease.rollouts} == {added}
        assert controller.metrics()["rollout/imbalance"] == 0


def test_workers_of_one_placement_group_run_in_their_bundles(local_ray: str) -> None:
    booked = replace(WORKERS, num_cpus=1)
    fleet = RayFleet(replace(booked, model=worker_jobs.marker_llama, engine=ENGINE), 2, placement="PACK")
    fleet.start(0)
    try:
        assert len({worker.health().pid for worker in fleet.workers}) == 2
        assert [worker.worker_id for worker in fleet.workers] == [f"{fleet.run_id}-w0", f"{fleet.run_id}-w1"]
        first = fleet.workers[0]
        os.kill(first.health().pid, signal.SIGKILL)
        first.wait_for(WorkerState.DEAD, timeout_s=60)
        first.restart()
        assert first.health().incarnation == 1, "its bundle was free again"
    finally:
        fleet.stop(60)
    impatient = replace(booked, num_cpus=64, start_timeout_s=1.0)
    with pytest.raises(WorkerUnreachableError, match="no room for 1 workers"):
        RayFleet(impatient, 1, placement="PACK").start(0)


def test_a_fleet_whose_model_cannot_be_hosted_says_so_and_leaves_nothing(local_ray: str) -> None:
    fleet = RayFleet(WorkerConfig(model=worker_jobs.failing_model, num_cpus=0), 2)
    with pytest.raises(InvalidRequestError, match="needs 3 heads"):
        fleet.start(0)
    assert fleet.workers == []


def test_settings_of_a_fleet_that_cannot_work_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        RayFleet(WorkerConfig(model=tiny_llama), 0)
    with pytest.raises(InvalidRequestError, match="book nothing"):
        RayFleet(WorkerConfig(model=tiny_llama, num_cpus=0), 1, placement="SPREAD")


@pytest.mark.slow
def test_a_fleet_on_two_nodes_trains_every_prompt_once_while_workers_come_go_and_die() -> None:
    """Spread over the nodes of a cluster, in a driver of its own."""
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(tests / "fleet_nodes.py")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every prompt once, on both nodes" in ran.stdout


class UnplacedFleet(RayFleet):
    """Its workers are made when both have been asked for."""

    def __init__(self) -> None:
        super().__init__(WORKERS, 1)
        self.both = threading.Barrier(2)
        self.numbers: list[int] = []

    def _make(self, number: int, serve_from_version: int) -> Any:
        self.numbers.append(number)
        self.both.wait(BATCH_S)
        return number


def test_workers_that_are_added_at_once_have_names_of_their_own() -> None:
    fleet = UnplacedFleet()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(fleet.add_worker, 0) for _ in range(2)]:
            future.result(BATCH_S)
    assert sorted(fleet.numbers) == [0, 1]


def test_workers_that_have_no_room_for_a_group_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_outstanding=4 has no room for a group of 8"):
        RolloutController(
            worker_jobs.marker_llama,
            [[1]],
            workers=replace(WORKERS, max_outstanding=4),
            config=RolloutConfig(num_workers=1, group_size=8),
        )

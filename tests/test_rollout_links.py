"""A controller's threads to its workers: a death counts once, and nothing of a dead incarnation stands in the next one's way."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fakes import wait_until
from threaded_fleet import LIMIT_S, ThreadedFleet, ThreadedWorker

from rollout import Rollout, RolloutConfig, RolloutController, RolloutStalledError
from rollout.workers.wire import Finished, Refusal, WorkerState, WorkItem

PROMPTS = [[n + 1] for n in range(40)]


def a_controller(*workers: ThreadedWorker, prompts: Any = PROMPTS, **config: Any) -> RolloutController:
    settings = {"group_size": 2, "prompts_per_step": 4, "suspect_limit_s": 0.05, **config}
    return RolloutController.over(ThreadedFleet(*workers), prompts, lambda r, t: 1.0, config=RolloutConfig(**settings))


def test_a_worker_that_stands_still_costs_one_restart() -> None:
    still = ThreadedWorker("w0")
    still.state, still.answers = WorkerState.SUSPECT, False
    with a_controller(still) as controller:
        for _ in range(5):
            with controller.next_batch(LIMIT_S):
                pass
        assert still.num_restarts == 1
        assert controller.metrics()["rollout/worker_deaths"] == 1
        assert controller.status()["workers"]["w0"]["restarts"] == 1


class BusyWorker(ThreadedWorker):
    """Its first snapshot takes until it is restarted."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.asked = threading.Event()

    def snapshot(self) -> list[Rollout]:
        self.asked.set()
        assert self.restarted.wait(LIMIT_S), "the restart waits for the snapshot"
        return []


def test_a_restart_waits_for_no_call_to_the_worker_it_replaces() -> None:
    busy = BusyWorker("w0")
    busy.answers = False
    with a_controller(busy, snapshot_every_s=0.05) as controller:
        assert busy.asked.wait(LIMIT_S)
        busy.state = WorkerState.SUSPECT
        assert busy.restarted.wait(LIMIT_S / 2)
        with controller.next_batch(LIMIT_S):
            pass


class BrokenWorker(ThreadedWorker):
    """Its first incarnation raises what no worker should."""

    def submit(self, items: Sequence[WorkItem]) -> list[Refusal]:
        if not self.num_restarts:
            raise ConnectionError("the node went away")
        return super().submit(items)


class UnpollableWorker(ThreadedWorker):
    """Likewise."""

    def poll(self, max_items: int, timeout_s: float) -> list[Finished]:
        if not self.num_restarts:
            raise ConnectionError("the node went away")
        return super().poll(max_items, timeout_s)


def test_a_worker_that_raises_anything_is_replaced() -> None:
    for worker in (BrokenWorker("w0"), UnpollableWorker("w0")):
        with a_controller(worker) as controller:
            with controller.next_batch(LIMIT_S):
                pass
            assert worker.num_restarts == 1


class UnstartableWorker(ThreadedWorker):
    """Its first restart fails, as of a node that has no room at the moment."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.num_tries = 0

    def restart(self, *, serve_from_version: int | None = None) -> None:
        self.num_tries += 1
        if self.num_tries == 1:
            raise ConnectionError("no room")
        super().restart(serve_from_version=serve_from_version)


def test_a_restart_that_fails_is_tried_again() -> None:
    worker = UnstartableWorker("w0")
    worker.state, worker.answers = WorkerState.SUSPECT, False
    with a_controller(worker) as controller:
        with controller.next_batch(LIMIT_S):
            pass
        assert worker.num_tries == 2
        assert controller.metrics()["rollout/worker_deaths"] == 1
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rollsync-") and "w0" in t.name])


def test_a_source_that_blocks_holds_up_no_limit_and_no_status() -> None:
    blocked, go = threading.Event(), threading.Event()

    def rows() -> Iterator[list[int]]:
        yield from PROMPTS[:2]
        blocked.set()
        assert go.wait(LIMIT_S)
        yield from PROMPTS[2:8]

    with a_controller(ThreadedWorker("w0"), prompts=rows()) as controller:
        assert blocked.wait(LIMIT_S)
        with pytest.raises(RolloutStalledError, match="no batch within") as caught:
            controller.next_batch(0.05)
        assert caught.value.status["prompts"] == {"handed_out": 2, "exhausted": False}
        go.set()
        assert len(controller.next_batch(LIMIT_S)) == 4

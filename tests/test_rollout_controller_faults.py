"""The real controller over simulated fleets that die, stand still and err: nobody lost, nobody doubled."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from fakes import tiny_llama
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, check_rollouts, number_of, reward

from rollout import (
    EngineState,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    RolloutStalledError,
    SamplingParams,
    UpdateRecord,
    VersionSpan,
    WorkerDiedError,
    WorkerIrreplaceableError,
    WorkerUnreachableError,
)
from rollout.batches.lease import Lease
from rollout.simulate import ConstantLengths, Faults, SimulatedTrainer, VirtualLoop
from rollout.workers.local_worker import LocalHealth
from rollout.workers.wire import Finished, WorkerState


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_is_lost_or_doubled_whatever_dies(seed: int) -> None:
    """verl#7938: budgets come from the ledger's states, so that nothing is counted twice."""
    faults = Faults(
        seconds_between_deaths=6.0,
        freezes={"w1": ((20.0, 5.0), (100.0, 90.0))},
        error_rate=0.05,
        duplicate_rate=0.1,
        late_rate=0.1,
    )
    fleet = a_fleet(faults=faults, restart_s=5.0, stagger_s=1.0, seed=seed)
    config = a_config(max_staleness=2, max_infra_retries=50, worker_restarts=500, snapshot_every_s=4.0)
    trained: Counter[int] = Counter()
    with fleet.controller(PROMPTS[:80], reward, config=config) as controller:

        def check(lease: Lease) -> None:
            check_rollouts(lease)
            check_books(controller)
            assert all(len(group) == 4 for group in lease.groups)
            trained.update(number_of(group.group_id) for group in lease.groups)

        records = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check).run(100)
        metrics = controller.metrics()
        check_books(controller)
    assert trained == Counter(range(80))
    assert max(record.staleness for record in records) <= 2
    assert metrics["rollout/worker_deaths"] > 0
    assert metrics["rollout/duplicate_results"] > 0
    assert metrics["rollout/late_results"] > 0
    assert metrics["rollout/attempts_lost"] > 0


def test_a_rollout_goes_on_from_the_last_snapshot_of_a_worker_that_died() -> None:
    def run(snapshot_every_s: float | None) -> tuple[list[Rollout], float]:
        fleet = a_fleet(2, lengths=ConstantLengths(tokens=900), faults=Faults(deaths={"w0": (15.0,)}))
        config = a_config(prompts_per_step=2, snapshot_every_s=snapshot_every_s)
        with fleet.controller(PROMPTS[:2], reward, config=config) as controller:
            fleet.loop.advance(8.0)
            fleet.publish()
            lease = controller.next_batch(timeout_s=1000)
            check_rollouts(lease)
            return lease.rollouts, fleet.loop.now()

    resumed, resumed_at = run(5.0)
    afresh, afresh_at = run(None)
    assert [len(rollout.token_ids) for rollout in resumed] == [900] * 8
    assert resumed_at < afresh_at - 5.0
    moved = [rollout for rollout in resumed if rollout.attempt == 1]
    assert len(moved) == 4
    assert all([span.version for span in rollout.version_spans] == [0, 1] for rollout in moved)
    assert all(rollout.versions == [1] * 900 for rollout in afresh if rollout.attempt == 1)


def test_a_worker_that_comes_back_serves_nothing_before_it_holds_the_fleets_version() -> None:
    fleet = a_fleet(2, faults=Faults(deaths={"w0": (10.0,)}), restart_s=5.0, join_s=30.0)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.loop.advance(5.0)
        fleet.publish()
        fleet.loop.advance(20.0)
        status = controller.status()
        assert status["workers"]["w0"]["state"] == "stale"
        assert status["workers"]["w0"]["samples"] == 0
        trainer = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check_rollouts)
        trainer.run(5)
        fleet.loop.advance(40.0)
        trainer.run(5)
        assert controller.status()["workers"]["w0"]["state"] == "healthy"


def test_a_worker_that_stands_still_is_replaced_and_its_work_goes_on_elsewhere() -> None:
    fleet = a_fleet(2, faults=Faults(freezes={"w0": ((2.0, 10_000.0),)}))
    config = a_config(suspect_limit_s=30.0, snapshot_every_s=1.0)
    with fleet.controller(PROMPTS[:8], reward, config=config) as controller:
        records = SimulatedTrainer(controller, fleet, step_s=1.0, on_batch=check_rollouts).run(10)
        assert sum(len(record.group_ids) for record in records) == 8
        fleet.loop.advance(60.0)
        assert controller.status()["workers"]["w0"]["incarnation"] == 1


def test_a_worker_that_was_given_up_is_given_nothing_even_if_it_moves_again() -> None:
    fleet = a_fleet(2, faults=Faults(freezes={"w0": ((2.0, 60.0),)}), restart_s=1000.0)
    with fleet.controller(PROMPTS, reward, config=a_config(suspect_limit_s=20.0)) as controller:
        fleet.loop.advance(200.0)
        assert fleet.workers["w0"].health().state is WorkerState.HEALTHY
        assert controller.status()["workers"]["w0"]["state"] == "restarting"
        SimulatedTrainer(controller, fleet, step_s=1.0).run(3)
        assert controller.status()["workers"]["w0"]["samples"] == 0


def test_no_worker_has_more_samples_than_it_may() -> None:
    fleet = a_fleet(2)
    most = 0
    config = a_config(max_samples_per_worker=8, max_staleness=3)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        for _ in range(200):
            fleet.loop.advance(0.5)
            most = max(most, *(len(worker._running) for worker in fleet.workers.values()))
        assert len(controller.next_batch(timeout_s=500).groups) == 4
    assert most == 8


def test_a_failed_sample_is_tried_again_alone_and_its_siblings_stay() -> None:
    """miles#2800, trl#7176: one failed sample does not discard the others."""
    fleet = a_fleet(faults=Faults(error_rate=0.3))
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        attempts: Counter[int] = Counter()
        SimulatedTrainer(
            controller, fleet, step_s=3.0, on_batch=lambda lease: attempts.update(r.attempt for r in lease.rollouts)
        ).run(10)
        metrics = controller.metrics()
    assert set(attempts) == {0, 1}
    assert metrics["rollout/samples_failed"] == 0
    assert metrics["rollout/failures_infra"] >= attempts[1]


def test_when_no_worker_is_left_next_batch_says_so() -> None:
    fleet = a_fleet(1, faults=Faults(deaths={"w0": (1.0, 3.0, 5.0)}), restart_s=0.5, join_s=0.1)
    with (
        fleet.controller(PROMPTS, reward, config=a_config(worker_restarts=1)) as controller,
        pytest.raises(WorkerDiedError, match="no worker is left"),
    ):
        controller.next_batch(timeout_s=100)


def test_a_fleet_whose_last_worker_died_for_good_offers_no_remedy_that_is_none() -> None:
    fleet = a_fleet(2, faults=Faults(deaths={"w1": (4.0,)}))
    with fleet.controller(PROMPTS, reward, config=a_config(worker_restarts=0)) as controller:
        fleet.loop.advance(1.0)
        controller.remove_worker("w0")
        fleet.loop.advance(10.0)
        with pytest.raises(WorkerDiedError, match="no worker is left; the last one, w1"):
            controller.next_batch(timeout_s=100)
        status = controller.status()
        assert "no worker is left" in status["fatal"]
        assert status["stalled"] is None, "controller.add_worker() would bring nothing"


def test_a_worker_whose_death_is_not_told_yet_is_not_counted_out() -> None:
    fleet = a_fleet(2, lengths=ConstantLengths(tokens=600), faults=Faults(deaths={"w0": (1.0, 21.0)}), restart_s=5.0)
    with fleet.controller(PROMPTS[:8], reward, config=a_config(worker_restarts=1)) as controller:
        other = fleet.workers["w1"]
        assert other.listener is not None
        fleet.loop.call_later(20.9, lambda: other.die(tell=False))  # its state says so from now on
        fleet.loop.call_later(20.95, controller._coordinator.refresh)
        fleet.loop.call_later(22.0, partial(other.listener.died, WorkerDiedError("its poll says so now")))
        records = SimulatedTrainer(controller, fleet, step_s=1.0, on_batch=check_rollouts).run(10)
        assert fleet.loop.now() > 22.0
        assert sum(len(record.group_ids) for record in records) == 8
        states = {name: worker["state"] for name, worker in controller.status()["workers"].items()}
    assert states == {"w0": "dead", "w1": "healthy"}


def test_a_worker_that_says_that_it_is_dead_is_replaced_though_its_polls_are_answered() -> None:
    """A process whose engine died too often."""
    fleet = a_fleet(2, restart_s=5.0)
    with fleet.controller(PROMPTS[:8], reward, config=a_config()) as controller:
        fleet.loop.call_later(2.0, lambda: fleet.workers["w0"].die(tell=False))
        fleet.loop.advance(20.0)
        status = controller.status()["workers"]["w0"]
        assert (status["state"], status["incarnation"]) == ("healthy", 1)
        records = SimulatedTrainer(controller, fleet, step_s=1.0, on_batch=check_rollouts).run(10)
        assert sum(len(record.group_ids) for record in records) == 8


def test_a_worker_that_dies_again_and_again_is_replaced_after_ever_longer_waits() -> None:
    deaths = (*range(1, 22), 300)
    fleet = a_fleet(2, lengths=ConstantLengths(tokens=2000), faults=Faults(deaths={"w0": deaths}), restart_s=0.1)
    config = a_config(sampling=SamplingParams(max_new_tokens=2000), max_infra_retries=50)
    with fleet.controller(PROMPTS, reward, config=config) as controller:

        def incarnation_at(seconds: float) -> int:
            fleet.loop.advance(seconds - fleet.loop.now())
            return controller.status()["workers"]["w0"]["incarnation"]

        # dead at 1, 2, 4, 7, 12 and 21; back after nothing, then 1, 2, 4, 8 and 10 seconds, and the restart itself
        assert [incarnation_at(at) for at in (1.5, 2.5, 3.5, 20.0, 30.0, 32.0)] == [1, 1, 2, 4, 5, 6]
        SimulatedTrainer(controller, fleet, step_s=1.0).run(3)
        assert fleet.loop.now() < 300
        assert incarnation_at(300.5) == 7, "what it gave in between ends the row"


def test_what_a_worker_brings_that_generates_nothing_does_not_end_its_row_of_deaths() -> None:
    """As one whose process lives, and whose engine has been given up."""
    fleet = a_fleet(2, faults=Faults(deaths={"w0": tuple(range(1, 9))}), restart_s=0.1)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        workforce = controller._coordinator.workforce
        resumed = Rollout(
            rollout_id="w0-nothing",
            prompt_ids=[2],
            token_ids=[0],
            logprobs=[-1.0],
            loss_mask=[1],
            version_spans=[VersionSpan(0, 0)],
            prefill_version=0,
            finish_reason=FinishReason.ERROR,
        )
        for at in range(1, 9):
            failed = Finished(rollout=resumed, attempt=0, incarnation=0)
            fleet.loop.call_later(at + 0.05, partial(workforce.on_results, "w0", [failed]))
            fleet.loop.call_later(at + 0.2, partial(workforce.on_snapshot, "w0", [resumed]))
            well = replace(failed, rollout=replace(resumed, finish_reason=FinishReason.STOP))
            fleet.loop.call_later(at + 0.05, partial(workforce.on_results, "w0", [well]))  # of one that is lost
        fleet.loop.advance(8.5)
        # dead at 1, 2, 4 and 7; back after nothing, then 1 and 2 seconds, and the restart itself; the next is at 11.1
        assert controller.status()["workers"]["w0"]["incarnation"] == 3


def test_a_restart_that_fails_again_and_again_is_tried_after_ever_longer_waits() -> None:
    """As where a node is gone for a while: a burst of tries would use up `worker_restarts` before it is back."""
    fleet = a_fleet(2, faults=Faults(deaths={"w0": (1.0,)}), restart_s=0.0)
    tried_at: list[float] = []

    def fail(*, serve_from_version: int | None = None) -> None:
        tried_at.append(fleet.loop.now())
        raise WorkerUnreachableError("no node has room")

    with fleet.controller(PROMPTS, reward, config=a_config(worker_restarts=5)) as controller:
        fleet.workers["w0"].restart = fail
        fleet.loop.advance(100.0)
        assert tried_at == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert controller.status()["workers"]["w0"]["state"] == "dead"


def test_a_worker_that_nobody_can_replace_is_out_at_once() -> None:
    fleet = a_fleet(1, faults=Faults(deaths={"w0": (1.0,)}), restart_s=0.0)

    def fail(*, serve_from_version: int | None = None) -> None:
        raise WorkerIrreplaceableError("it is this process's own engine")

    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.workers["w0"].restart = fail
        with pytest.raises(
            WorkerDiedError, match="no worker is left; the last one, w0: it is this process's own engine"
        ):
            controller.next_batch(timeout_s=100)
        assert fleet.loop.now() == 1.0


def test_a_stall_is_told_though_a_worker_that_was_given_up_is_not_as_it_was_last_seen() -> None:
    fleet = a_fleet(2, faults=Faults(freezes={"w0": ((2.0, 1e6),)}))
    config = a_config(suspect_limit_s=20.0, pause_stall_s=100.0, worker_restarts=0)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        for worker in fleet.workers.values():
            worker.require_version(1)
        with pytest.raises(RolloutStalledError, match="pause stall"):
            controller.next_batch(timeout_s=10_000)
        assert fleet.loop.now() < 120.0


class DueFirst(VirtualLoop):
    """As a real loop: what is due comes before what is to come soon."""

    def _run_one(self, deadline: float) -> bool:
        soon: deque[Callable[[], None]] = deque()
        if self._later and self._later[0][0] <= self._now:
            soon, self._soon = self._soon, soon
        try:
            return super()._run_one(deadline)
        finally:
            self._soon.extendleft(reversed(soon))


def test_a_stall_is_told_though_something_happens_at_every_tick() -> None:
    fleet = a_fleet(1, loop=DueFirst())
    with fleet.controller(PROMPTS, reward, config=a_config(pause_stall_s=100.0)) as controller:
        fleet.workers["w0"].require_version(1)
        for number in range(1, 1000):
            fleet.loop.call_later(number * fleet.loop.tick_s, controller._coordinator.changed)
        with pytest.raises(RolloutStalledError, match="pause stall"):
            controller.next_batch(timeout_s=4000)
        assert fleet.loop.now() < 120.0


def test_an_update_whose_record_comes_after_its_version_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = replace(GenerationEngine(tiny_llama()).stats(), state=EngineState.RUNNING)
    record = UpdateRecord(version=1, wait_s=0.0, held_s=0.0, straddlers=3)
    fleet = a_fleet(1)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        for last_update in (None, record, record):
            seen = replace(stats, version=1, last_update=last_update)
            health = LocalHealth(state=WorkerState.HEALTHY, incarnation=0, version=1, engine=seen, reason=None)
            monkeypatch.setattr(fleet.workers["w0"], "health", lambda health=health: health)
            fleet.loop.advance(2 * fleet.loop.tick_s)
        metrics = controller.metrics()
        assert (metrics["sync/updates"], metrics["sync/straddlers"]) == (1, 3)


def test_workers_come_and_go_while_it_runs() -> None:
    fleet = a_fleet(2)
    with fleet.controller(PROMPTS[:60], reward, config=a_config()) as controller:
        trainer = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check_rollouts)
        records = trainer.run(3)
        assert controller.add_worker() == "w2"
        records += trainer.run(3)
        assert controller.status()["workers"]["w2"]["samples"] > 0
        controller.remove_worker("w0")
        with pytest.raises(InvalidRequestError, match="no worker 'w0'"):
            controller.remove_worker("w0")
        records += trainer.run(100)
        assert sorted(controller.status()["workers"]) == ["w1", "w2"]
        check_books(controller)
    assert Counter(group for record in records for group in record.group_ids) == Counter(f"g{n}" for n in range(60))


def test_a_worker_that_is_full_is_left_alone_for_a_while_and_nothing_is_lost() -> None:
    fleet = a_fleet(2, max_outstanding=6)
    with fleet.controller(PROMPTS[:12], reward, config=a_config()) as controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check_rollouts).run(10)
        metrics = controller.metrics()
        check_books(controller)
    assert sum(len(record.group_ids) for record in records) == 12
    assert metrics["rollout/attempts_lost"] > 0, "it refused some"
    assert metrics["rollout/failures_infra"] == 0, "being full is no failure"
    assert metrics["rollout/attempts_lost"] < 20 * fleet.loop.now(), "it was not asked without end"


def test_whoever_brings_weights_hears_of_each_worker_that_lacks_them() -> None:
    fleet = a_fleet(2, faults=Faults(deaths={"w1": (5.0,)}), restart_s=2.0)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        joined: list[str] = []
        controller.on_join(lambda target: joined.append(target.worker_id))
        fleet.loop.advance(20.0)
        assert joined == ["w1"]


def test_a_worker_that_does_not_answer_can_be_removed_too() -> None:
    fleet = a_fleet(2, faults=Faults(deaths={"w0": (4.0,)}), restart_s=1e6)
    with fleet.controller(PROMPTS[:8], reward, config=a_config(snapshot_every_s=1.0)) as controller:
        fleet.loop.advance(10.0)
        controller.remove_worker("w0")
        records = SimulatedTrainer(controller, fleet, step_s=1.0, on_batch=check_rollouts).run(10)
        assert sum(len(record.group_ids) for record in records) == 8
        check_books(controller)

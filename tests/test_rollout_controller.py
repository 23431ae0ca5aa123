"""The real controller over simulated fleets: nobody lost, nobody doubled, nobody too old, nobody waiting for ever."""

import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from rollout import FinishReason, InvalidRequestError, Rollout, SamplingParams
from rollout.batches.lease import Lease
from rollout.batches.rewards import RewardResult
from rollout.controller import RolloutController
from rollout.errors import (
    EngineStateError,
    PromptsExhaustedError,
    RolloutStalledError,
    StaleRolloutsError,
    WorkerDiedError,
)
from rollout.rollout_config import RolloutConfig
from rollout.simulate import (
    ConstantLengths,
    Faults,
    LogNormalLengths,
    SimulatedFleet,
    SimulatedTrainer,
    SimulatedWorker,
)
from rollout.workers.wire import WorkerState

TAIL = LogNormalLengths(mean=100, sigma=1.0, longest=800)
PROMPTS = [[2 + n % 50, 3] for n in range(1000)]


def a_fleet(num_workers: int = 4, **settings: object) -> SimulatedFleet:
    return SimulatedFleet(num_workers, **{"lengths": TAIL, "slots": 8, **settings})


def a_config(**settings: object) -> RolloutConfig:
    defaults = {"group_size": 4, "prompts_per_step": 4, "sampling": SamplingParams(max_new_tokens=1000)}
    return RolloutConfig(**{**defaults, **settings})


def reward(rollout: Rollout, text: str) -> float:
    return float(len(rollout.token_ids) % 2)


def check_books(controller: RolloutController) -> None:
    controller._coordinator.collection.ledger.check()
    assert controller.metrics()["rollout/imbalance"] == 0


def check_rollouts(lease: Lease) -> None:
    """Each simulated token is the version that sampled it."""
    for group in lease.groups:
        assert [rollout.sample_index for rollout in group] == sorted(rollout.sample_index for rollout in group)
        for rollout in group:
            assert rollout.token_ids == rollout.versions
            assert rollout.group_id == group.group_id
            assert rollout.reward is not None
    numbers = [number_of(group.group_id) for group in lease.groups]
    assert numbers == sorted(numbers)


def number_of(group_id: str) -> int:
    return int(group_id[1:].split("r", maxsplit=1)[0])


# ------------------------------------------------------------------------------------------------- staleness, order


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_group_is_staler_than_it_may_be_and_none_is_dropped(max_staleness: int) -> None:
    """tinker-cookbook#822: admission is paced, oldest first; nothing is discarded by default."""
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS, reward, config=a_config(max_staleness=max_staleness))
    with controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check_rollouts).run(30)
        metrics = controller.metrics()
    assert max(record.staleness for record in records) == max_staleness
    assert metrics["rollout/samples_expired"] == metrics["rollout/samples_failed"] == 0
    assert metrics["rollout/samples_consumed"] == 30 * 16


def test_on_policy_no_rollout_spans_an_update() -> None:
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS, reward, config=a_config(max_staleness=0))
    spans: list[int] = []
    with controller:
        SimulatedTrainer(
            controller,
            fleet,
            step_s=3.0,
            on_batch=lambda lease: spans.extend(len(r.version_spans) for r in lease.rollouts),
        ).run(10)
    assert set(spans) == {1}


def test_a_run_replays_exactly_from_its_seed() -> None:
    def run(seed: int) -> tuple[object, ...]:
        fleet = a_fleet(faults=Faults(seconds_between_deaths=40, error_rate=0.1, late_rate=0.1), seed=seed)
        controller = fleet.controller(PROMPTS, reward, config=a_config(max_infra_retries=50))
        lengths: list[tuple[str, int, list[int]]] = []
        with controller:
            records = SimulatedTrainer(
                controller,
                fleet,
                step_s=3.0,
                on_batch=lambda lease: lengths.extend((r.rollout_id, r.attempt, r.versions) for r in lease.rollouts),
            ).run(15)
        return records, lengths, fleet.loop.num_events

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_more_publishes_than_one_a_batch_are_counted_and_what_is_too_old_is_generated_again() -> None:
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS[:60], reward, config=a_config(max_staleness=1, max_requeues=50))
    trained: Counter[int] = Counter()
    with controller:
        records = SimulatedTrainer(
            controller,
            fleet,
            step_s=3.0,
            publishes_per_step=3,
            on_batch=lambda lease: trained.update(number_of(group.group_id) for group in lease.groups),
        ).run(40)
        metrics = controller.metrics()
        check_books(controller)
    assert max(record.staleness for record in records) <= 1
    assert metrics["rollout/stale_groups"] > 0
    assert metrics["rollout/samples_expired"] > 0
    assert trained == Counter(range(60)), "every prompt is still trained on once"


def test_a_prompt_that_expires_too_often_is_given_up_and_counted() -> None:
    fleet = a_fleet(lengths=ConstantLengths(tokens=500))
    controller = fleet.controller(PROMPTS[:4], reward, config=a_config(max_staleness=0, max_requeues=1))
    with controller:
        for _ in range(8):
            fleet.loop.advance(5.0)
            fleet.publish()
            fleet.loop.advance(12.0)
        with pytest.raises(PromptsExhaustedError, match="4 expired"):
            controller.next_batch(timeout_s=100)
        assert controller.metrics()["rollout/samples_expired"] == 4 * 4 * 2
        check_books(controller)


def test_a_group_that_was_running_at_a_publish_is_not_handed_out_too_old() -> None:
    fleet = a_fleet(lengths=ConstantLengths(tokens=100))
    config = a_config(max_staleness=0, snapshot_every_s=None)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        fleet.loop.advance(1.0)
        fleet.publish()
        lease = controller.next_batch(timeout_s=500)
        assert lease.staleness == 0
        assert {version for rollout in lease.rollouts for version in rollout.versions} == {1}
        assert controller.metrics()["rollout/stale_groups"] == 4


def test_stale_groups_are_an_error_where_that_was_asked_for() -> None:
    """prime-rl#3009: the time in the queue counts."""
    fleet = a_fleet(lengths=ConstantLengths(tokens=50))
    controller = fleet.controller(PROMPTS, reward, config=a_config(max_staleness=0, on_stale="raise"))
    with controller:
        fleet.loop.advance(10.0)
        fleet.publish()
        with pytest.raises(StaleRolloutsError, match="Publish once a batch"):
            controller.next_batch(timeout_s=100)


def test_look_ahead_in_tokens_bounds_what_is_admitted() -> None:
    fleet = a_fleet()
    bound = a_config(max_staleness=3, max_tokens_ahead=6 * 4 * 1000)
    controller = fleet.controller(PROMPTS, reward, config=bound)
    with controller:
        fleet.loop.advance(0.5)
        assert controller.metrics()["rollout/samples_outstanding"] == 6 * 4
        SimulatedTrainer(controller, fleet, step_s=3.0).run(5)


def test_a_trainer_that_does_not_come_stops_generation_and_loses_nothing() -> None:
    """verl MessageQueue: a full buffer blocks, it never drops."""
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(max_staleness=1)) as controller:
        fleet.loop.advance(10_000.0)
        counts = controller.status()["samples"]
        assert counts["issued"] == counts["scored"] == 4 * 4 * 2
        records = SimulatedTrainer(controller, fleet, step_s=1.0, on_batch=check_rollouts).run(2)
        assert [group for record in records for group in record.group_ids] == [f"g{n}" for n in range(8)]


def test_versions_may_be_skipped_and_nobody_waits_for_the_missing_ones() -> None:
    """prime-rl#2912, prime-rl#1671: waits are for "at least"."""
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(max_staleness=0)) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
        fleet.publish(7)
        with controller.next_batch(timeout_s=500) as lease:
            assert lease.version == 7
            assert {version for rollout in lease.rollouts for version in rollout.versions} == {7}


def test_strict_fifo_hands_prompts_out_in_their_order() -> None:
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS, reward, config=a_config(max_staleness=2, admission="fifo"))
    with controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0).run(10)
    assert [group for record in records for group in record.group_ids] == [f"g{n}" for n in range(40)]


# ---------------------------------------------------------------------------------------------------- every prompt


def test_every_prompt_is_trained_on_once_and_the_last_batch_may_be_short() -> None:
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS[:30], reward, config=a_config())
    with controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0).run(100)
        with pytest.raises(PromptsExhaustedError, match="30 consumed"):
            controller.next_batch(timeout_s=10)
        check_books(controller)
    assert sorted(group for record in records for group in record.group_ids) == sorted(f"g{n}" for n in range(30))
    assert [len(record.group_ids) for record in records] == [4] * 7 + [2]


def test_a_sources_own_error_reaches_next_batch() -> None:
    """NVIDIA-NeMo/RL#3488: fatal errors reach whoever waits."""

    def rows() -> Iterator[list[int]]:
        yield from PROMPTS[:2]
        raise OSError("the disk is gone")

    fleet = a_fleet()
    with fleet.controller(rows(), reward, config=a_config()) as controller:
        with pytest.raises(OSError, match="disk is gone"):
            controller.next_batch(timeout_s=100)
        with pytest.raises(OSError, match="disk is gone"):
            controller.next_batch(timeout_s=100)


def test_a_prompt_that_cannot_be_generated_from_is_accounted_for_and_hurts_no_other() -> None:
    fleet = a_fleet()
    rows = [*PROMPTS[:3], [], "text without a tokenizer", *PROMPTS[3:6]]
    with fleet.controller(rows, reward, config=a_config()) as controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0).run(10)
        assert sum(len(record.group_ids) for record in records) == 6
        assert controller.metrics()["rollout/samples_failed"] == 8
        check_books(controller)


# ------------------------------------------------------------------------------------------------ deaths and faults


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


# --------------------------------------------------------------------------------------------------------- rewards


def test_a_reward_that_raises_is_never_a_reward_of_zero() -> None:
    """agentcore-rl-toolkit#122: failed samples never reach the batch."""

    def broken_for_some(rollout: Rollout, text: str) -> float:
        if rollout.sample_index == 2:
            raise KeyError("answer")
        return 1.0

    fleet = a_fleet()
    with fleet.controller(PROMPTS, broken_for_some, config=a_config()) as controller:
        lease = controller.next_batch(timeout_s=500)
        assert [[rollout.sample_index for rollout in group] for group in lease.groups] == [[0, 1, 3]] * 4
        assert {rollout.reward for rollout in lease.rollouts} == {1.0}
        assert [group.num_failed for group in lease.groups] == [1] * 4
        metrics = controller.metrics()
        assert metrics["reward/errors_raised"] >= 8, "each was tried again once"
        assert "KeyError" in controller.status()["last_failure"]
        check_books(controller)


@pytest.mark.parametrize("value", [None, float("nan"), "1.0", [1.0]])
def test_what_is_no_reward_is_refused_by_name(value: object) -> None:
    fleet = a_fleet()
    config = a_config(max_groups_without_output=4)
    with fleet.controller(PROMPTS, lambda rollout, text: value, config=config) as controller:
        with pytest.raises(RolloutStalledError, match="finite number"):
            controller.next_batch(timeout_s=500)
        assert controller.metrics()["reward/errors_invalid"] > 0


def test_by_policy_a_group_is_dropped_with_its_failed_sample_or_gets_another() -> None:
    def broken_for_some(rollout: Rollout, text: str) -> float:
        if rollout.group_id == "g1" and rollout.sample_index == 2:
            raise KeyError("answer")
        return 1.0

    def first_batch(policy: str) -> list[list[int]]:
        fleet = a_fleet()
        config = a_config(on_failed_sample=policy, max_data_retries=0)
        with fleet.controller(PROMPTS[:4], broken_for_some, config=config) as controller:
            lease = controller.next_batch(timeout_s=500)
            check_books(controller)
            return [[rollout.sample_index for rollout in group] for group in lease.groups]

    assert first_batch("drop") == [[0, 1, 2, 3]] * 3
    assert first_batch("refill") == [[0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert first_batch("shrink") == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_groups_rewards_come_together() -> None:
    def best_of(group: list[Rollout]) -> list[RewardResult]:
        longest = max(len(rollout.token_ids) for rollout in group)
        return [
            RewardResult(reward=float(len(rollout.token_ids) == longest), metrics={"longest": longest})
            for rollout in group
        ]

    fleet = a_fleet(faults=Faults(error_rate=0.2))
    with fleet.controller(PROMPTS, group_reward_fn=best_of, config=a_config()) as controller:
        records = SimulatedTrainer(
            controller,
            fleet,
            step_s=3.0,
            on_batch=lambda lease: [check_rollouts(lease), check_best(lease)],
        ).run(5)
        assert len(records) == 5
        assert controller.metrics()["reward/longest"] > 0


def check_best(lease: Lease) -> None:
    assert all(max(rollout.reward or 0 for rollout in group) == 1.0 for group in lease.groups)


def test_a_groups_rewards_do_not_wait_for_a_sample_that_has_failed() -> None:
    fleet = a_fleet(faults=Faults(error_rate=0.4))
    config = a_config(max_infra_retries=0, min_group_size=1)
    with fleet.controller(PROMPTS, group_reward_fn=lambda group: [1.0] * len(group), config=config) as controller:
        records = SimulatedTrainer(controller, fleet, step_s=1.0, timeout_s=500).run(20)
        assert len(records) == 20
        assert controller.metrics()["rollout/samples_failed"] > 0


def test_a_group_reward_of_the_wrong_length_fails_its_group() -> None:
    fleet = a_fleet()
    config = a_config(max_groups_without_output=2)
    with (
        fleet.controller(PROMPTS, group_reward_fn=lambda group: [1.0], config=config) as controller,
        pytest.raises(RolloutStalledError, match="a list of 4 rewards"),
    ):
        controller.next_batch(timeout_s=500)


def test_columns_reach_the_reward_and_the_rollout() -> None:
    fleet = a_fleet()
    rows = [{"prompt": [2, 3], "answer": n} for n in range(8)]
    seen: list[object] = []

    def answer(rollout: Rollout, text: str) -> RewardResult:
        seen.append(rollout.metadata["answer"])
        return RewardResult(reward=1.0, metadata={"graded": True})

    with fleet.controller(rows, answer, config=a_config()) as controller:
        lease = controller.next_batch(timeout_s=500)
    assert set(seen) >= {0, 1, 2, 3}
    assert all(
        rollout.metadata == {"answer": number_of(group.group_id), "graded": True}
        for group in lease.groups
        for rollout in group
    )


# ---------------------------------------------------------------------------------------------------------- filter


def test_a_filtered_group_makes_room_for_exactly_one_other() -> None:
    fleet = a_fleet()
    config = a_config(max_staleness=0)

    def even(group: list[Rollout]) -> bool:
        return number_of(group[0].group_id or "") % 2 == 0

    with fleet.controller(PROMPTS, reward, keep_group=even, config=config) as controller:
        lease = controller.next_batch(timeout_s=1000)
        assert all(number_of(group.group_id) % 2 == 0 for group in lease.groups)
        metrics = controller.metrics()
        filtered = metrics["rollout/samples_filtered"] / 4
        assert metrics["rollout/samples_issued"] / 4 == 4 + filtered
        check_books(controller)


def test_output_now_and_then_is_output() -> None:
    def every_fourth(group: list[Rollout]) -> bool:
        return number_of(group[0].group_id or "") % 4 == 0

    fleet = a_fleet(lengths=ConstantLengths(tokens=100))
    config = a_config(max_groups_without_output=12)
    with fleet.controller(PROMPTS, reward, keep_group=every_fourth, config=config) as controller:
        assert len(SimulatedTrainer(controller, fleet, step_s=1.0).run(10)) == 10


def test_a_run_whose_groups_are_all_filtered_ends_with_a_reason() -> None:
    """prime-rl#3015: a run without output does not look alive."""
    fleet = a_fleet()
    config = a_config(drop_equal_rewards=True, max_groups_without_output=12)
    with fleet.controller(PROMPTS, lambda rollout, text: 1.0, config=config) as controller:
        with pytest.raises(RolloutStalledError, match=r"zero output: the last \d+ groups were all filtered") as caught:
            controller.next_batch(timeout_s=10_000)
        assert caught.value.status["samples"]["filtered"] >= 48
        fleet.loop.advance(500.0)
        assert controller.status()["samples"]["outstanding"] == 0, "nothing more was begun"
        check_books(controller)


# ---------------------------------------------------------------------------------------------- leases, checkpoints


def test_an_exception_gives_the_batch_back_and_the_next_one_has_it_again() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        first: list[str] = []

        def train() -> None:
            with controller.next_batch(timeout_s=500) as lease:
                first.extend(group.group_id for group in lease.groups)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        with controller.next_batch(timeout_s=500) as lease:
            assert [group.group_id for group in lease.groups] == first
        assert controller.metrics()["rollout/samples_consumed"] == 16
        lease.give_back()
        assert controller.metrics()["rollout/samples_consumed"] == 16, "a lease ends once"
        check_books(controller)


def test_batches_can_be_out_together_and_end_in_any_order() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(max_staleness=2)) as controller:
        first, second = controller.next_batch(timeout_s=500), controller.next_batch(timeout_s=500)
        assert not {g.group_id for g in first.groups} & {g.group_id for g in second.groups}
        second.acknowledge()
        first.give_back()
        third = controller.next_batch(timeout_s=500)
        assert [g.group_id for g in third.groups] == [g.group_id for g in first.groups]
        check_books(controller)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_anywhere_goes_on_and_trains_every_prompt_once(seed: int) -> None:
    """NVIDIA-NeMo/RL#3594: the state holds the work in flight. The weights of the checkpoint, here the list of what was
    trained, are saved together with it."""
    noise = random.Random(seed)
    saved: tuple[list[int], str | None] = ([], None)
    highest = 0
    for life in range(40):
        trained = list(saved[0])
        fleet = a_fleet(faults=Faults(seconds_between_deaths=30.0), restart_s=5.0, seed=100 * seed + life)
        config = a_config(max_staleness=2, max_infra_retries=50, worker_restarts=99, snapshot_every_s=4.0)
        controller = fleet.controller(PROMPTS[:40], reward, config=config)
        if saved[1] is not None:
            controller.load_state_dict(json.loads(saved[1]))
        with controller:
            for _ in range(noise.randrange(1, 4)):
                fleet.loop.advance(noise.random() * 10)
                if noise.random() < 0.2:
                    break  # killed while it generates
                try:
                    lease = controller.next_batch(timeout_s=2000)
                except PromptsExhaustedError:
                    assert Counter(trained) == Counter(range(40))
                    return
                check_rollouts(lease)
                check_books(controller)
                assert all(len(group) == 4 for group in lease.groups)
                assert lease.version >= highest, "versions go on above the highest ever published"
                assert lease.staleness <= 2
                trained += [number_of(group.group_id) for group in lease.groups]
                if noise.random() < 0.2:
                    break  # killed while it trains
                lease.acknowledge()
                if noise.random() < 0.7:
                    saved = (list(trained), json.dumps(controller.state_dict()))
                fleet.publish()
                fleet.loop.advance(noise.random())
                highest = max(highest, json.loads(saved[1])["highest_version"] if saved[1] else 0)
    pytest.fail("forty lives were not enough")


def test_what_a_checkpoint_holds_goes_on_from_where_it_was_and_is_no_staler_than_it_was() -> None:
    def first_life() -> tuple[str, float]:
        fleet = a_fleet(lengths=ConstantLengths(tokens=800))
        with fleet.controller(PROMPTS[:12], reward, config=a_config(max_staleness=1)) as controller:
            SimulatedTrainer(controller, fleet, step_s=1.0).run(1)
            fleet.loop.advance(10.0)
            return json.dumps(controller.state_dict()), controller.metrics()["rollout/samples_consumed"]

    state, consumed = first_life()
    assert consumed == 16
    fleet = a_fleet(lengths=ConstantLengths(tokens=800))
    controller = fleet.controller(PROMPTS[:12], reward, config=a_config(max_staleness=1))
    controller.load_state_dict(json.loads(state))
    with controller:
        controller.next_batch(timeout_s=1).acknowledge()  # what was ready is ready
        lease = controller.next_batch(timeout_s=500)
        assert fleet.loop.now() < 8.0, "half of its 16 s was done"
        check_rollouts(lease)
        assert lease.version == 2, "the weights of version 1 by a new name"
        assert lease.staleness == 0
        assert all([span.version for span in rollout.version_spans] == [1, 2] for rollout in lease.rollouts)
        assert controller.metrics()["rollout/stale_groups"] == 0


def test_weights_that_were_trained_and_not_published_get_a_name_of_their_own() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.loop.advance(60.0)
        controller.next_batch(timeout_s=500).acknowledge()
        state = controller.state_dict()
    again = a_fleet()
    controller = again.controller(PROMPTS, reward, config=a_config())
    controller.load_state_dict(state)
    with controller:
        lease = controller.next_batch(timeout_s=500)
        assert lease.version == 1
        assert {version for rollout in lease.rollouts for version in rollout.versions} == {0}
        assert lease.staleness == 1


def test_rewards_that_were_pending_at_the_checkpoint_are_asked_for_once() -> None:
    calls: Counter[str] = Counter()

    def count(group: list[Rollout]) -> list[float]:
        calls[group[0].group_id or ""] += 1
        return [1.0] * len(group)

    fleet = a_fleet(lengths=ConstantLengths(tokens=50))
    config = a_config(max_staleness=0)
    with fleet.controller(PROMPTS, group_reward_fn=count, reward_delay_s=1e6, config=config) as controller:
        fleet.loop.advance(10.0)
        assert controller.metrics()["rollout/samples_rewarding"] == 16
        state = json.loads(json.dumps(controller.state_dict()))
    again = a_fleet(lengths=ConstantLengths(tokens=50))
    controller = again.controller(PROMPTS, group_reward_fn=count, config=config)
    controller.load_state_dict(state)
    with controller:
        assert len(controller.next_batch(timeout_s=10).groups) == 4
    assert calls == {"g0": 1, "g1": 1, "g2": 1, "g3": 1}


def test_while_the_last_batch_is_out_the_prompts_have_not_ended() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS[:4], reward, config=a_config()) as controller:
        lease = controller.next_batch(timeout_s=500)
        with pytest.raises(RolloutStalledError, match="lease 0 of 4 groups is out"):
            controller.next_batch(timeout_s=5)
        lease.give_back()
        controller.next_batch(timeout_s=5).acknowledge()
        with pytest.raises(PromptsExhaustedError):
            controller.next_batch(timeout_s=5)


def test_a_checkpoint_of_other_prompts_or_settings_is_refused() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS[:40], reward, config=a_config()) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
        state = controller.state_dict()
        with pytest.raises(EngineStateError, match="before the start"):
            controller.load_state_dict(state)
    with pytest.raises(InvalidRequestError, match="group_size: 4 then, 2 now"):
        a_fleet().controller(PROMPTS[:40], reward, config=a_config(group_size=2)).load_state_dict(state)
    others = a_fleet().controller([[9, 9, 9]] * 40, reward, config=a_config())
    others.load_state_dict(state)
    with pytest.raises(InvalidRequestError, match="not what it was"):
        others.start()
    with pytest.raises(InvalidRequestError, match="no state"):
        a_fleet().controller(PROMPTS, reward).load_state_dict({})


# ------------------------------------------------------------------------------------------ watchdogs, waits, others


def test_next_batch_never_waits_past_its_limit_and_says_what_is_missing() -> None:
    fleet = a_fleet(1, lengths=ConstantLengths(tokens=1000))
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        began_at = fleet.loop.now()
        with pytest.raises(RolloutStalledError, match=r"0 of 4 groups of a batch are ready.*g0 on w0") as caught:
            controller.next_batch(timeout_s=5)
        assert fleet.loop.now() - began_at <= 5.001
        assert caught.value.status["workers"]["w0"]["samples"] > 0
        assert len(controller.next_batch(timeout_s=1000).groups) == 4, "the one that gave up took nothing with it"
        check_books(controller)


def test_rewards_that_never_come_are_a_stall() -> None:
    fleet = a_fleet()
    config = a_config(reward_stall_s=50)
    with (
        fleet.controller(PROMPTS, reward, reward_delay_s=1e6, config=config) as controller,
        pytest.raises(RolloutStalledError, match=r"reward stall: .* wait for their rewards"),
    ):
        controller.next_batch(timeout_s=10_000)


def test_workers_that_are_all_stale_are_a_stall() -> None:
    fleet = a_fleet(1, faults=Faults(deaths={"w0": (3.0,)}), join_s=1e7)
    with fleet.controller(PROMPTS, reward, config=a_config(pause_stall_s=50)) as controller:
        fleet.loop.advance(2.0)
        fleet.publish()
        with pytest.raises(RolloutStalledError, match="pause stall: no worker could take work") as caught:
            controller.next_batch(timeout_s=10_000)
        assert "w0 is stale at version 0" in caught.value.status["waits_for"][0]


def test_no_progress_is_a_stall() -> None:
    """NVIDIA-NeMo/RL#3488: a silent fleet ends in an error with its status."""
    fleet = a_fleet(2, lengths=ConstantLengths(tokens=100), faults=Faults(freezes={"w0": ((1.0, 1e7),)}))
    config = a_config(no_progress_s=100, suspect_limit_s=1e6)
    with (
        fleet.controller(PROMPTS[:4], reward, config=config) as controller,
        pytest.raises(RolloutStalledError, match="no progress"),
    ):
        controller.next_batch(timeout_s=10_000)


def test_a_cancelled_group_is_accounted_for_and_another_id_is_refused() -> None:
    """prime-rl#2639, SkyRL#1250: one ending for each sample; an unknown id raises; the worker has really stopped."""
    fleet = a_fleet(lengths=ConstantLengths(tokens=500))
    with fleet.controller(PROMPTS[:8], reward, config=a_config()) as controller:
        fleet.loop.advance(2.0)
        controller.cancel("g1")
        with pytest.raises(InvalidRequestError, match="no group 'g1'"):
            controller.cancel("g1")
        fleet.loop.advance(1.0)
        assert controller.metrics()["rollout/samples_cancelled"] == 4
        assert all("g1-" not in name for worker in fleet.workers.values() for name in worker._running)
        records = SimulatedTrainer(controller, fleet, step_s=3.0).run(10)
        assert "g1" not in [group for record in records for group in record.group_ids]
        check_books(controller)


def test_draining_ends_what_runs_and_begins_nothing_new() -> None:
    """prime-rl#2912, prime-rl#1671: waits end at a drain."""
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.loop.advance(2.0)
        issued = controller.metrics()["rollout/samples_issued"]
        controller.drain()
        metrics = controller.metrics()
        assert metrics["rollout/samples_issued"] == issued
        assert metrics["rollout/samples_scored"] == issued
        for _ in range(2):
            controller.next_batch(timeout_s=10).acknowledge()
        controller.resume()
        assert len(controller.next_batch(timeout_s=1000).groups) == 4


def test_an_evaluation_runs_beside_training_and_is_in_no_account() -> None:
    fleet = a_fleet(faults=Faults(deaths={"w0": (4.0,)}))
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.loop.advance(3.0)
        issued = controller.metrics()["rollout/samples_issued"]
        results = controller.evaluate(
            [{"prompt": [5, 6], "answer": 1}, [7, 8, 9]], SamplingParams(max_new_tokens=50, seed=1), num_samples=2
        )
        assert [rollout.prompt_ids for rollout in results] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
        assert [rollout.sample_index for rollout in results] == [0, 1, 0, 1]
        assert all(rollout.reward is not None for rollout in results)
        assert results[0].metadata == {"answer": 1}
        assert controller.metrics()["rollout/samples_issued"] <= issued + 16
        with pytest.raises(InvalidRequestError, match="evaluation prompt 1"):
            controller.evaluate([[1], []])
        check_books(controller)


def test_an_evaluation_that_fails_for_good_has_a_result_that_says_so() -> None:
    fleet = a_fleet(1, lengths=ConstantLengths(tokens=500), faults=Faults(deaths={"w0": (2.0, 9.0)}), restart_s=1.0)
    with fleet.controller(PROMPTS, reward, config=a_config(max_infra_retries=1)) as controller:
        (result,) = controller.evaluate([{"prompt": [5, 6], "answer": 1}], SamplingParams(max_new_tokens=600))
        assert result.finish_reason is FinishReason.ERROR
        assert "w0: killed" in (result.error or "")
        assert (result.prompt_ids, result.metadata, result.reward) == ([5, 6], {"answer": 1}, None)


def test_a_commit_through_a_target_waits_for_the_evaluation_up_to_its_limit() -> None:
    def publish_during_an_evaluation(tokens: int) -> tuple[list[int], float]:
        fleet = a_fleet(1, lengths=ConstantLengths(tokens=tokens), slots=64)
        config = a_config(evaluation_wait_s=30.0)
        with fleet.controller(PROMPTS, reward, config=config) as controller:
            (target,) = controller.targets()
            committed_at: list[float] = []

            def publish() -> None:
                asked = target.call(lambda _: fleet.loop.now())
                assert asked.result(0) == pytest.approx(0.05), "a question waits for no evaluation"
                future = target.call_update(SimulatedWorker.commit, 1)
                future.add_done_callback(lambda _: committed_at.append(fleet.loop.now()))

            fleet.loop.call_later(0.05, publish)
            results = controller.evaluate([[5, 6]], SamplingParams(max_new_tokens=5000), timeout_s=1000)
            fleet.loop.advance(1.0)
            assert controller.version == 1
            return results[0].versions, committed_at[0]

    versions, committed_at = publish_during_an_evaluation(500)
    assert set(versions) == {0}
    assert committed_at > 10.0
    versions, committed_at = publish_during_an_evaluation(3000)
    assert set(versions) == {0, 1}
    assert committed_at == pytest.approx(30.05)


def test_a_worker_that_is_full_is_left_alone_for_a_while_and_nothing_is_lost() -> None:
    fleet = a_fleet(2, max_outstanding=6)
    with fleet.controller(PROMPTS[:12], reward, config=a_config()) as controller:
        records = SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=check_rollouts).run(10)
        metrics = controller.metrics()
        check_books(controller)
    assert sum(len(record.group_ids) for record in records) == 12
    assert metrics["rollout/attempts_lost"] > 0, "it refused some"
    assert "rollout/failures_infra" not in metrics, "being full is no failure"
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


def test_rollouts_are_written_as_they_end(tmp_path: object) -> None:
    fleet = a_fleet()
    path = f"{tmp_path}/run/rollouts.jsonl"
    with fleet.controller(PROMPTS, reward, config=a_config(rollouts_jsonl=path)) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
        controller.metrics()
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    assert len(lines) == 16
    assert {line["ending"] for line in lines} == {"consumed"}
    assert all(line["token_ids"] and line["reward"] is not None for line in lines)


def test_a_live_line_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(progress_bar=True)) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
    assert "16rollout" in capsys.readouterr().err


def test_a_new_run_labels_its_tokens_above_the_highest_version_ever_published(tmp_path: object) -> None:
    config = a_config(versions_file=f"{tmp_path}/versions.json")
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        SimulatedTrainer(controller, fleet, step_s=1.0).run(3)
        fleet.loop.advance(1.0)
    again = a_fleet()
    with again.controller(PROMPTS, reward, config=config) as controller:
        assert min(r.min_version or 0 for r in controller.next_batch(timeout_s=500).rollouts) == 4


def test_a_controller_that_does_not_run_says_so() -> None:
    controller = a_fleet().controller(PROMPTS, reward)
    with pytest.raises(EngineStateError, match="with controller"):
        controller.next_batch()
    with controller:
        pass
    with pytest.raises(EngineStateError, match="stopped"):
        controller.start()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"group_size": 0}, "group_size"),
        ({"max_samples_per_worker": 3, "group_size": 4}, "max_samples_per_worker"),
        ({"on_stale": "keep"}, "on_stale"),
        ({"reward_timeout_s": -1}, "reward_timeout_s"),
        ({"num_epochs": 0}, "num_epochs"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        a_fleet().controller(PROMPTS, reward, config=RolloutConfig(**settings))

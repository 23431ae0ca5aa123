"""The real controller over simulated fleets: no group too old, none dropped, batches in their order."""

from collections import Counter

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, check_rollouts, number_of, reward

from rollout import PromptsExhaustedError, StaleRolloutsError
from rollout.simulate import ConstantLengths, Faults, SimulatedTrainer


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

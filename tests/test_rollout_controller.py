"""The real controller over simulated fleets: every prompt once, no wait without end, and a reason for each stall."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, reward

from rollout import (
    EngineStateError,
    InvalidRequestError,
    PromptsExhaustedError,
    RolloutConfig,
    RolloutController,
    RolloutStalledError,
)
from rollout.batches.lease import Lease
from rollout.fleet.watchdogs import Outstanding, Signs, stall
from rollout.simulate import ConstantLengths, Faults, SimulatedTrainer


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


def test_a_stall_of_workers_that_do_not_serve_has_their_reason() -> None:
    signs = Signs(progress_at=400.0, reward_at=400.0, serving_at=0.0)
    outstanding = Outstanding(
        now=400.0,
        num_running=0,
        num_queued=0,
        num_rewarding=0,
        num_barren=0,
        last_failure=None,
        is_deserted=False,
        not_serving="w0: its engine is fenced: the update to version 3 failed",
    )
    why = stall(signs, outstanding, RolloutConfig())
    assert why is not None
    assert "pause stall" in why
    assert why.endswith("; w0: its engine is fenced: the update to version 3 failed")


def test_no_progress_is_a_stall() -> None:
    """NVIDIA-NeMo/RL#3488: a silent fleet ends in an error with its status."""
    fleet = a_fleet(2, lengths=ConstantLengths(tokens=100), faults=Faults(freezes={"w0": ((1.0, 1e7),)}))
    config = a_config(no_progress_s=100, suspect_limit_s=1e6)
    with (
        fleet.controller(PROMPTS[:4], reward, config=config) as controller,
        pytest.raises(RolloutStalledError, match="no progress"),
    ):
        controller.next_batch(timeout_s=10_000)


def test_work_that_no_worker_ever_takes_is_a_stall() -> None:
    fleet = a_fleet(1, max_outstanding=3)
    with (
        fleet.controller(PROMPTS, reward, config=a_config(no_progress_s=50)) as controller,
        pytest.raises(RolloutStalledError, match="wait for a worker that takes them") as caught,
    ):
        controller.next_batch(timeout_s=10_000)
    assert "may hold no more" in caught.value.status["workers"]["w0"]["reason"]


def test_a_fleet_without_workers_says_so_at_once_and_goes_on_with_another() -> None:
    fleet = a_fleet(1)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        controller.remove_worker("w0")
        with pytest.raises(RolloutStalledError, match="no worker is left") as caught:
            controller.next_batch(timeout_s=10_000)
        assert "the fleet has no workers; controller.add_worker()" in caught.value.status["waits_for"][0]
        for wait in (lambda: controller.evaluate([[4, 5]], timeout_s=10_000), lambda: controller.drain(10_000)):
            with pytest.raises(RolloutStalledError, match="no worker is left"):
                wait()
        assert fleet.loop.now() < 60, "nobody waits for who cannot come"
        controller.resume()
        controller.add_worker()
        assert len(controller.next_batch(timeout_s=1000)) == 4


def test_when_the_last_worker_that_lives_is_removed_nobody_waits_for_the_dead() -> None:
    fleet = a_fleet(2, faults=Faults(deaths={"w0": (0.2,)}))
    with fleet.controller(PROMPTS, reward, config=a_config(worker_restarts=0)) as controller:
        fleet.loop.advance(0.5)
        controller.remove_worker("w1")
        with pytest.raises(RolloutStalledError, match="no worker is left") as caught:
            controller.next_batch(timeout_s=10_000)
        assert fleet.loop.now() < 60
        assert caught.value.status["workers"]["w0"]["state"] == "dead"
        controller.add_worker()
        assert len(controller.next_batch(timeout_s=1000)) == 4


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_what_is_there_is_handed_out_although_no_worker_is_left(is_asked_first: bool) -> None:
    fleet = a_fleet(4)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        fleet.loop.advance(200.0)
        for worker_id in list(fleet.workers):
            controller.remove_worker(worker_id)
        batch: Future[Lease] = Future()
        if is_asked_first:
            controller._coordinator.next_batch(batch)
        else:
            controller._coordinator.changed()
            fleet.loop.call_soon(lambda: controller._coordinator.next_batch(batch))  # it comes behind that turn
        controller._coordinator._tick()  # as it may come in real time, before the turn in which batches are handed out
        fleet.loop.advance(1.0)
        assert len(batch.result(timeout=0)) == 4


def test_rewards_that_are_still_to_come_are_waited_for_although_no_worker_is_left() -> None:
    fleet = a_fleet(4)
    config = a_config(reward_stall_s=1000)
    with fleet.controller(PROMPTS[:4], reward, config=config, reward_delay_s=300.0) as controller:
        fleet.loop.advance(100.0)
        for worker_id in list(fleet.workers):
            controller.remove_worker(worker_id)
        assert len(controller.next_batch(timeout_s=1000)) == 4


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
        with pytest.raises(PromptsExhaustedError, match=r"the controller drains.*resume\(\) goes on"):
            controller.next_batch(timeout_s=10)
        controller.resume()
        assert len(controller.next_batch(timeout_s=1000).groups) == 4


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
        ({"num_epochs": "2"}, "num_epochs"),
        ({"num_epochs": 1.5}, "num_epochs"),
        ({"look_ahead": "a"}, "look_ahead"),
        ({"sampling": {}}, "sampling must be SamplingParams"),
        ({"placement": "X"}, "placement"),
        ({"shuffle": 3}, "shuffle"),
        ({"rollouts_jsonl": 3}, "rollouts_jsonl must be a path"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        a_fleet().controller(PROMPTS, reward, config=RolloutConfig(**settings))


def test_functions_that_cannot_work_are_refused_and_no_thread_stays() -> None:
    before = threading.active_count()
    for arguments, says in (
        ({"keep_group": 3}, "keep_group must be a function"),
        ({"reward_fn": None, "config": a_config(drop_equal_rewards=True)}, "drop_equal_rewards"),
        ({"config": {"group_size": 2}}, "config must be a RolloutConfig"),
        ({"prompts": []}, "at least one prompt"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            RolloutController.over(a_fleet(), **{"prompts": PROMPTS, "reward_fn": reward, **arguments})
    assert threading.active_count() == before

"""The real controller over simulated fleets: batches that come back, runs that are killed and go on."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, check_rollouts, number_of, reward

from rollout import (
    EngineStateError,
    InvalidRequestError,
    PromptsExhaustedError,
    Rollout,
    RolloutStalledError,
    SamplingParams,
)
from rollout.fleet.checkpoint import STATE_FORMAT
from rollout.simulate import ConstantLengths, Faults, SimulatedTrainer


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
                highest = max(highest, (json.loads(saved[1])["highest_version"] or 0) if saved[1] else 0)
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
    assert others._coordinator.handout.num_trained == 0
    with pytest.raises(InvalidRequestError, match="no state"):
        a_fleet().controller(PROMPTS, reward).load_state_dict({})


def test_a_new_run_labels_its_tokens_above_the_highest_version_ever_published(tmp_path: object) -> None:
    config = a_config(versions_file=f"{tmp_path}/versions.json")
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        SimulatedTrainer(controller, fleet, step_s=1.0).run(3)
        fleet.loop.advance(1.0)
    again = a_fleet()
    with again.controller(PROMPTS, reward, config=config) as controller:
        assert min(r.min_version or 0 for r in controller.next_batch(timeout_s=500).rollouts) == 4


def test_the_versions_file_has_a_version_that_came_just_before_the_stop(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(versions_file=path)) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
        fleet.publish()
    assert json.loads(path.read_text()) == {"highest_version": 1}


def test_a_run_that_published_nothing_has_no_highest_version(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(versions_file=path)) as controller:
        state = controller.state_dict()
        assert controller.highest_version is None
    assert state["highest_version"] is None
    assert not path.exists()
    again = fleet.controller(PROMPTS, reward, config=a_config(versions_file=path))
    again.load_state_dict(state)
    with again:
        assert again.next_batch(timeout_s=500).version == 0


def test_a_checkpoints_weights_are_the_next_version_once_a_batch_of_this_one_was_trained_on() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(max_staleness=2)) as controller:
        first, second = controller.next_batch(timeout_s=500), controller.next_batch(timeout_s=500)
        second.give_back()
        assert controller.state_dict()["policy_version"] == 0, "nothing was trained on"
        second = controller.next_batch(timeout_s=500)
        first.acknowledge()
        assert controller.state_dict()["policy_version"] == 1, "whatever else is out"
        fleet.publish()
        fleet.loop.advance(10.0)
        assert controller.state_dict()["policy_version"] == 1, "it was published"


def test_the_versions_file_makes_its_folder_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "versions.json"
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config(versions_file=path)) as controller:
        controller.next_batch(timeout_s=500).acknowledge()
        fleet.publish()
        controller.next_batch(timeout_s=500)
    assert json.loads(path.read_text()) == {"highest_version": 1}
    path.write_text("")
    with pytest.raises(InvalidRequestError, match="is no file of versions"):
        a_fleet().controller(PROMPTS, config=a_config(versions_file=path))


@pytest.mark.parametrize("state", [None, [], "x", {}, {"format": 1}, {"format": STATE_FORMAT, "config": {}}])
def test_what_is_no_checkpoint_is_refused_at_once(state: Any) -> None:
    with pytest.raises(InvalidRequestError, match="state of a RolloutController"):
        a_fleet().controller(PROMPTS, config=a_config()).load_state_dict(state)


def test_a_checkpoint_drawn_by_another_distribution_is_refused() -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        state = controller.state_dict()
    for settings in ({"temperature": 0.5}, {"seed": 3}):
        config = a_config(sampling=SamplingParams(max_new_tokens=1000, **settings))
        with pytest.raises(InvalidRequestError, match=f"sampling.{next(iter(settings))}"):
            a_fleet().controller(PROMPTS, reward, config=config).load_state_dict(state)

"""The real controller over simulated fleets: rewards and filters, and what becomes of those that cannot be computed."""

import json
from collections.abc import Sequence

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, check_rollouts, number_of, reward

from rollout import Rollout, RolloutStalledError
from rollout.batches.lease import Lease
from rollout.batches.rewards import RewardResult
from rollout.simulate import ConstantLengths, Faults, SimulatedTrainer


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


def test_whoever_asks_again_after_a_run_without_output_has_another_try_also_after_a_checkpoint() -> None:
    keeps = False
    fleet = a_fleet()
    config = a_config(max_groups_without_output=12, num_epochs=None)
    with fleet.controller(PROMPTS, reward, keep_group=lambda group: keeps, config=config) as controller:
        for _ in range(2):
            with pytest.raises(RolloutStalledError, match="zero output"):
                controller.next_batch(timeout_s=10_000)
        fleet.loop.advance(500.0)  # what runs still has ended
        state = json.loads(json.dumps(controller.state_dict()))
        keeps = True
        assert len(controller.next_batch(timeout_s=10_000)) == 4
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS, reward, config=config)
    controller.load_state_dict(state)
    with controller:
        assert len(controller.next_batch(timeout_s=10_000)) == 4


def test_a_filter_that_raises_reaches_next_batch_and_its_group_is_settled_after_a_resume() -> None:
    def broken(group: Sequence[Rollout]) -> bool:
        if group[0].prompt_id == "p2":
            raise KeyError("score")
        return True

    fleet = a_fleet()
    with fleet.controller(PROMPTS[:8], reward, keep_group=broken, config=a_config()) as controller:
        with pytest.raises(KeyError, match="score"):
            controller.next_batch(timeout_s=1000)
        state = json.loads(json.dumps(controller.state_dict()))
    fleet = a_fleet()
    controller = fleet.controller(PROMPTS[:8], reward, config=a_config())
    controller.load_state_dict(state)
    with controller:
        records = SimulatedTrainer(controller, fleet, step_s=1.0).run(10)
        check_books(controller)
    assert sorted(group for record in records for group in record.group_ids) == [f"g{n}" for n in range(8)]


def test_what_a_reward_says_is_there_after_a_checkpoint_too() -> None:
    def told(rollout: Rollout, text: str) -> RewardResult:
        return RewardResult(reward=1.0, metadata={"parsed": (4, 2), "object": object()})

    rows = [{"prompt": prompt, "answer": n} for n, prompt in enumerate(PROMPTS[:4])]
    fleet = a_fleet()
    with fleet.controller(rows, told, config=a_config()) as controller:
        controller.next_batch(timeout_s=1000).give_back()
        state = json.loads(json.dumps(controller.state_dict()))
    fleet = a_fleet()
    controller = fleet.controller(rows, reward, config=a_config())
    controller.load_state_dict(state)
    with controller:
        rollouts = controller.next_batch(timeout_s=1000).rollouts
    assert [rollout.metadata for rollout in rollouts[::4]] == [{"answer": n, "parsed": [4, 2]} for n in range(4)]


def test_a_reward_function_that_changes_its_rollout_changes_no_batch() -> None:
    def one(rollout: Rollout, text: str) -> float:
        rollout.token_ids.append(0)
        dict.clear(rollout.metadata)
        return 1.0

    def group(rollouts: list[Rollout]) -> list[float]:
        return [one(rollouts.pop(), "") for _ in range(len(rollouts))]

    rows = [{"prompt": prompt, "answer": 4} for prompt in PROMPTS[:4]]
    for functions in ({"reward_fn": one}, {"group_reward_fn": group}):
        fleet = a_fleet()
        with fleet.controller(rows, config=a_config(), **functions) as controller:
            lease = controller.next_batch(timeout_s=1000)
            check_rollouts(lease)
            assert {rollout.metadata["answer"] for rollout in lease.rollouts} == {4}

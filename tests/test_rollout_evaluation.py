"""Evaluation on simulated fleets that train: first in line, in no account, of one version where that can be."""

from concurrent.futures import Future
from typing import Any

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books, reward

from rollout import EngineStateError, FinishReason, InvalidRequestError, Rollout, RolloutStalledError, SamplingParams
from rollout.batches.prompts import Prompt
from rollout.simulate import ConstantLengths, Faults, SimulatedWorker


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


def test_an_evaluation_gets_the_next_free_places_before_what_waits_of_training() -> None:
    fleet = a_fleet(1, lengths=ConstantLengths(tokens=100), slots=64)
    config = a_config(group_size=1, prompts_per_step=16, max_samples_per_worker=8, max_staleness=3)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        fleet.loop.advance(1.0)
        assert len(fleet.workers["w0"]._running) == 8, "it is full"
        controller.evaluate([[5, 6]], SamplingParams(max_new_tokens=200), num_samples=4)
        assert fleet.loop.now() < 5.0, "what ran took 2.1 s, and so did this; all that may be admitted takes 16.8 s"


def test_a_worker_with_a_commit_at_its_door_leaves_evaluations_to_the_others() -> None:
    fleet = a_fleet(2, lengths=ConstantLengths(tokens=1000), slots=64)
    params = SamplingParams(max_new_tokens=1000)
    later: Future[list[Rollout]] = Future()
    prompt = Prompt(number=0, prompt_id="e0", prompt_ids=[7, 8])
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        coordinator = controller._coordinator
        target = next(target for target in controller.targets() if target.worker_id == "w0")
        fleet.loop.call_later(0.05, lambda: target.call_update(SimulatedWorker.commit, 1))
        fleet.loop.call_later(0.1, lambda: coordinator.evaluate([prompt], params, 4, later))
        first = controller.evaluate([[5, 6], [5, 6]], params)
        assert {rollout.worker_id for rollout in first} == {"w0", "w1"}
        fleet.loop.advance(5.0)
        assert {rollout.worker_id for rollout in later.result(0)} == {"w1"}


def test_samples_of_a_prompt_go_to_one_worker_together() -> None:
    fleet = a_fleet(4, lengths=ConstantLengths(tokens=100), slots=64)
    given: list[tuple[str, int]] = []
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        for worker in fleet.workers.values():
            worker.submit = noting(worker.submit, given)
        results = controller.evaluate([[5, 6], [7, 8]], SamplingParams(max_new_tokens=100), num_samples=6)
    assert [size for name, size in given if name.startswith("eval")] == [6, 6]
    assert [len({rollout.worker_id for rollout in results[at : at + 6]}) for at in (0, 6)] == [1, 1]
    assert [rollout.sample_index for rollout in results] == [*range(6)] * 2


@pytest.mark.parametrize("room", [{"max_samples_per_worker": 3}, {"max_outstanding": 3}])
def test_samples_for_which_no_worker_has_room_at_once_go_as_they_fit(room: dict[str, int]) -> None:
    """The first is the controller's own limit, the second the worker's, which refuses what is more. Training, which always
    has something waiting, takes whatever place is left to it."""
    limit = {} if "max_samples_per_worker" in room else room
    fleet = a_fleet(1, slots=64, **limit)
    config = a_config(group_size=1, prompts_per_step=4, max_staleness=20, **({} if limit else room))
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        fleet.loop.advance(1.0)
        params = SamplingParams(max_new_tokens=100, stop_token_ids=())
        results = controller.evaluate([[5, 6]], params, num_samples=8, timeout_s=60)
        assert [rollout.sample_index for rollout in results] == [*range(8)]
        assert all(rollout.token_ids and rollout.reward is not None for rollout in results)
        assert controller._coordinator.evaluations.num_on("w0") == 0


def test_an_idle_worker_gets_no_more_samples_of_an_evaluation_than_it_may_have() -> None:
    fleet = a_fleet(1, slots=64)
    given: list[tuple[str, int]] = []
    config = a_config(max_samples_per_worker=4)
    with fleet.controller(iter([]), reward, config=config) as controller:
        fleet.workers["w0"].submit = noting(fleet.workers["w0"].submit, given)
        results = controller.evaluate([[5, 6]], SamplingParams(max_new_tokens=100), num_samples=10)
    assert [rollout.sample_index for rollout in results] == [*range(10)]
    assert given[0] == ("eval0-0", 4)
    assert max(size for _, size in given) == 4


def test_no_two_samples_draw_the_same_noise_under_a_seed_which_draws_it_again() -> None:
    params = SamplingParams(max_new_tokens=1000, seed=3)

    def lengths() -> list[int]:
        with a_fleet().controller(PROMPTS, reward, config=a_config()) as controller:
            results = controller.generate([[5, 6], [5, 6], [7, 8]], params, num_samples=3)
        return [len(rollout.token_ids) for rollout in results]

    first = lengths()
    assert len(set(first)) == len(first) == 9
    assert first == lengths()


def noting(submit: Any, given: list[tuple[str, int]]) -> Any:
    """A worker's `submit` that notes (request id, size) of each item."""

    def noted(items: Any) -> Any:
        given.extend((item.request_id, item.size) for item in items)
        return submit(items)

    return noted


def test_an_evaluation_that_nobody_waits_for_any_more_ends_on_the_workers_too() -> None:
    fleet = a_fleet(1, lengths=ConstantLengths(tokens=1000), slots=64)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        with pytest.raises(RolloutStalledError, match="evaluating took longer than 2 s"):
            controller.evaluate([[5, 6]] * 3, SamplingParams(max_new_tokens=1000), timeout_s=2.0)
        assert any(name.startswith("eval") for name in fleet.workers["w0"]._running)
        fleet.loop.advance(6.0)
        assert not any(name.startswith("eval") for name in fleet.workers["w0"]._running)
        assert controller._coordinator.evaluations.num_on("w0") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_samples": 1.5}, "num_samples must be an integer of at least 1, got 1.5"),
        ({"num_samples": "2"}, "num_samples"),
        ({"num_samples": -1}, "num_samples"),
        ({"params": {}}, "params must be SamplingParams"),
        ({"prompts": "hello"}, "takes a list of prompts, got 'hello'"),
        ({"prompts": {"prompt": [1]}}, "takes a list of prompts"),
        ({"prompts": 3}, "takes a list of prompts"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_and_the_training_goes_on(arguments: dict[str, Any], says: str) -> None:
    fleet = a_fleet()
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        with pytest.raises(InvalidRequestError, match=says):
            controller.evaluate(**{"prompts": [[1, 2]], **arguments})
        assert len(controller.next_batch(timeout_s=500)) == 4


def test_after_a_stop_a_target_says_so_and_answers_what_waited() -> None:
    fleet = a_fleet(1, lengths=ConstantLengths(tokens=500), slots=64)
    with fleet.controller(PROMPTS, reward, config=a_config()) as controller:
        (target,) = controller.targets()
        waits = target.call_update(lambda _: 1)
    for future in (waits, target.call_update(lambda _: 1)):
        with pytest.raises(EngineStateError, match="stopped"):
            future.result(0)

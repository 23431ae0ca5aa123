"""One rollout for each prompt of a trainer, and what stays untouched when one fails."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from fakes import CancelsOne, LosesOne, RefusesSecondGroup, tiny_llama

from rollout import (
    EngineConfig,
    EngineFencedError,
    EngineState,
    FinishReason,
    GenerationEngine,
    Rollout,
    RolloutConfig,
    RolloutController,
    SamplingParams,
)
from trainer_adapters import AdapterError
from trainer_adapters.generation import EngineGenerator, generator_of, groups, is_usable

A, B, TOO_LONG = [5, 6, 7], [8, 9], list(range(2, 60)) * 9
PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=())
SMALL = EngineConfig(num_blocks=16, page_size=16)


def make(source: GenerationEngine | RolloutController, max_retries: int = 1):
    return generator_of(source, timeout_s=60, max_retries=max_retries)


def test_equal_neighbours_are_one_group_of_at_most_the_group_size() -> None:
    assert list(groups([A, A, A, B, A], 2)) == [(A, 2), (A, 1), (B, 1), (A, 1)]


def test_rollouts_come_in_the_order_of_the_prompts() -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        rollouts = make(engine).generate([A, A, B, B, A], PARAMS, 2)
    assert [rollout.prompt_ids for rollout in rollouts] == [A, A, B, B, A]
    assert all(is_usable(rollout) for rollout in rollouts)


def test_controller_prefills_a_prompt_once_for_its_group_and_numbers_its_samples() -> None:
    prompts = [[5] * 50] * 4 + [[6] * 50] * 4
    engine = EngineConfig(num_blocks=64, page_size=16, prefix_sharing=False)
    config = RolloutConfig(group_size=2, prompts_per_step=1)
    with RolloutController(tiny_llama(), [[3, 4]], engine=engine, config=config) as controller:
        generator = make(controller)
        generator.generate([A], PARAMS, 1)  # after which the controller's own prompts rest
        sizes: list[int] = []
        controller.engine.model.model.register_forward_pre_hook(
            lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        rollouts = generator.generate(prompts, PARAMS, 4)
    assert [rollout.sample_index for rollout in rollouts] == [0, 1, 2, 3] * 2
    assert sum(sizes) == 2 * 49 + 8 * 6, "but for the last token of each prompt, which each sample begins with"


def test_rows_of_one_prompt_differ_under_a_seed_which_draws_them_again() -> None:
    config = RolloutConfig(group_size=2, prompts_per_step=1)
    with (
        GenerationEngine(tiny_llama(), SMALL) as engine,
        RolloutController(tiny_llama(), [[3, 4]], engine=SMALL, config=config) as controller,
    ):
        for source in (engine, controller):
            rows = make(source).generate([A] * 4, replace(PARAMS, seed=5), 2)
            assert len({tuple(row.token_ids) for row in rows}) == 4
            first, same, other = (
                [row.token_ids for row in make(source).generate([A, A, A], replace(PARAMS, seed=seed), 2)]
                for seed in (5, 5, 6)
            )
            assert first == same != other
            assert len({tuple(ids) for ids in first}) == 3


def test_sample_that_is_lost_is_generated_again_alone() -> None:
    with LosesOne(tiny_llama(), SMALL) as engine:
        rollouts = make(engine).generate([A, A, B, B], PARAMS, 2)
        assert [len(rollout.token_ids) for rollout in rollouts] == [6, 6, 6, 6]
        assert engine.stats().generated_tokens == 4 * 6, "a sibling was generated again"


def test_group_that_a_dying_engine_refused_draws_what_it_would_have() -> None:
    params = replace(PARAMS, seed=5)
    with GenerationEngine(tiny_llama(), SMALL) as engine, RefusesSecondGroup(tiny_llama(), SMALL) as dying:
        expected = make(engine).generate([A, A, B, B], params, 2)
        rollouts = make(dying, max_retries=2).generate([A, A, B, B], params, 2)
    assert [rollout.token_ids for rollout in rollouts] == [rollout.token_ids for rollout in expected]
    assert [rollout.sample_index for rollout in rollouts] == [0, 1, 0, 1]


def test_sample_that_fails_for_good_leaves_its_siblings() -> None:
    with LosesOne(tiny_llama(), SMALL) as engine:
        rollouts = make(engine, max_retries=0).generate([A, A, B, B], PARAMS, 2)
    assert [is_usable(rollout) for rollout in rollouts] == [False, True, True, True]
    assert (rollouts[0].finish_reason, rollouts[0].error) == (FinishReason.ERROR, "lost")


def test_sample_that_is_cancelled_is_not_generated_again() -> None:
    with CancelsOne(tiny_llama(), SMALL) as engine:
        rollouts = make(engine).generate([A, A, B, B], PARAMS, 2)
        assert engine.stats().generated_tokens == 3 * 6
    assert [rollout.finish_reason for rollout in rollouts] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 3


def test_refused_prompt_fails_alone() -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        rollouts = make(engine).generate([A, TOO_LONG, B], PARAMS, 1)
    assert [is_usable(rollout) for rollout in rollouts] == [True, False, True]
    assert rollouts[1].prompt_ids == TOO_LONG
    assert "522" in str(rollouts[1].error), "the reason does not name the prompt's length"


def test_batch_of_which_nothing_could_be_generated_raises_the_reason() -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine, pytest.raises(AdapterError, match=r"none of 2 samples.*522"):
        make(engine).generate([TOO_LONG, TOO_LONG], PARAMS, 2)


class StopsAtThird:
    """In an engine's place: keeps what it was given open for ever, and does not take the third group."""

    state = EngineState.RUNNING

    def __init__(self) -> None:
        self.taken: list[list[Future[Rollout]]] = []

    def submit_group(self, prompt_ids: list[int], params: SamplingParams, *, size: int, **_: Any) -> Any:
        if len(self.taken) == 2:
            raise EngineFencedError("fenced by an update")
        self.taken.append([Future() for _ in range(size)])
        return self.taken[-1]


def test_what_was_submitted_before_a_refusal_does_not_go_on() -> None:
    engine = StopsAtThird()
    with pytest.raises(EngineFencedError):
        EngineGenerator(engine, timeout_s=60, max_retries=1).generate([A, A, B, B, [7], [7]], PARAMS, 2)
    assert [[future.cancelled() for future in group] for group in engine.taken] == [[True] * 2] * 2


def test_engine_that_dies_is_restarted_and_its_samples_go_on() -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        steps = iter(range(1000))

        def die_once(*_: object) -> None:
            if next(steps) == 3:
                raise RuntimeError("a forward failed")

        engine.model.register_forward_pre_hook(die_once)
        rollouts = make(engine).generate([A, A, B, B], PARAMS, 2)
        assert [len(rollout.token_ids) for rollout in rollouts] == [6, 6, 6, 6]
        assert next(steps) > 6, "the loop never died, so this shows nothing"
        assert engine.stats().generated_tokens == 4 * 6, "what they had was generated again"


def test_controller_generates_the_trainers_prompts_while_its_own_rest() -> None:
    controller = RolloutController(tiny_llama(), [[3, 4]] * 50, config=RolloutConfig(group_size=2, prompts_per_step=2))
    with controller:
        rollouts = make(controller).generate([A, A, B, B], PARAMS, 2)
        assert [rollout.prompt_ids for rollout in rollouts] == [A, A, B, B]
        issued = controller.metrics()["rollout/samples_issued"]
        make(controller).generate([A, A], PARAMS, 2)
        counts = controller.metrics()
        assert counts["rollout/samples_issued"] == issued
        assert counts["rollout/samples_running"] == counts["rollout/samples_queued"] == 0
        assert controller.status()["draining"]


def test_controllers_own_reward_function_is_not_asked_about_the_trainers_samples() -> None:
    asked: list[str] = []

    def reward(rollout: Rollout, text: str) -> float:
        asked.append(rollout.rollout_id)
        return float(str(rollout.metadata["answer"]))

    rows = [{"prompt": [3, 4], "answer": 1}]
    config = RolloutConfig(group_size=2, prompts_per_step=1)
    with RolloutController(tiny_llama(), rows, reward, engine=SMALL, config=config) as controller:
        for prompts in ([A, A, B, B], [A, B, B]):
            rollouts = make(controller).generate(prompts, PARAMS, 2)
            assert [(rollout.prompt_ids, rollout.reward, rollout.error) for rollout in rollouts] == [
                (prompt, None, None) for prompt in prompts
            ]
    assert not [name for name in asked if name.startswith("eval")]


def test_sample_that_fails_in_a_controller_fails_alone() -> None:
    controller = RolloutController(
        tiny_llama(), [[3, 4]], engine=SMALL, config=RolloutConfig(group_size=2, prompts_per_step=1)
    )
    with controller:
        rollouts = make(controller).generate([A, A, TOO_LONG, TOO_LONG, B, B], PARAMS, 2)
        assert [is_usable(rollout) for rollout in rollouts] == [True, True, False, False, True, True]
        assert [rollout.prompt_ids for rollout in rollouts] == [A, A, TOO_LONG, TOO_LONG, B, B]
        with pytest.raises(AdapterError, match="none of 1"):
            make(controller).generate([TOO_LONG], PARAMS, 1)

"""A controller over an engine that somebody else has started."""

from pathlib import Path

import pytest
from fakes import tiny_llama

from rollout import (
    EngineState,
    EngineStateError,
    GenerationEngine,
    InvalidRequestError,
    RolloutConfig,
    RolloutController,
    RunningEngine,
    SamplingParams,
)
from sync import WeightSync
from trainer_adapters.publishing import shares_weights

PROMPTS = [[2 + n, 3, 4] for n in range(6)]


def a_controller(engine: GenerationEngine, **settings: object) -> RolloutController:
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=())
    config = RolloutConfig(**{"group_size": 1, "prompts_per_step": 2, "sampling": sampling, **settings})
    return RolloutController.over(RunningEngine(engine), PROMPTS, lambda rollout, text: 1.0, config=config)


def test_the_engine_of_a_controller_that_did_not_start_it_goes_on_after_it() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        for _ in range(2):
            with a_controller(engine) as controller:
                assert len(controller.next_batch(timeout_s=60).groups) == 2
        assert engine.state is EngineState.RUNNING


def test_in_a_run_that_goes_on_the_running_engine_serves_nothing_before_it_has_the_weights(tmp_path: Path) -> None:
    versions = tmp_path / "versions.json"
    versions.write_text('{"highest_version": 7}')
    model = tiny_llama()
    with (
        GenerationEngine(model, copy_weights=True) as engine,
        a_controller(engine, versions_file=versions) as controller,
        WeightSync(controller) as weight_sync,
    ):
        assert [worker["state"] for worker in controller.status()["workers"].values()] == ["stale"]
        assert weight_sync.publish(model).version == 8
        rollouts = controller.next_batch(timeout_s=60).rollouts
        assert {version for rollout in rollouts for version in rollout.versions} == {8}


def test_the_running_engine_is_updated_through_its_controller_and_cannot_be_removed_from_it() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine, a_controller(engine) as controller:
        assert controller.engine is engine
        assert shares_weights(controller, model)
        with controller.update() as updated:
            assert updated is engine.model
        assert (engine.version, controller.version) == (1, 1)
        with pytest.raises(InvalidRequestError, match="this fleet is one engine and cannot lose it"):
            controller.remove_worker("local")
        with pytest.raises(InvalidRequestError, match="this fleet is one engine; use Ray workers"):
            controller.add_worker()


@pytest.mark.parametrize("state", [EngineState.CREATED, EngineState.STOPPED])
def test_an_engine_that_does_not_run_is_refused_as_running_engine(state: EngineState) -> None:
    engine = GenerationEngine(tiny_llama())
    if state is EngineState.STOPPED:
        with engine:
            pass
    assert engine.state is state
    controller = a_controller(engine)
    with pytest.raises(EngineStateError, match=f"the engine of this fleet is {state}.*inside `with engine:`"):
        controller.start()

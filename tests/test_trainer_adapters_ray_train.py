"""A Ray Train trainer over a fleet: what every rank gets, and what is left of it when one fails."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import ray.train
from fakes import tiny_llama
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_train_jobs import NUM_PROMPTS, PROMPTS_PER_STEP, SMALL, make_fleet, prompts, rollout_config, train

from rollout import GenerationEngine, PromptsExhaustedError, RolloutController
from rollout.fleet.local_fleet import LocalFleet
from trainer_adapters import AdapterError, PolicyView, RankFleet, engine_train_loop
from trainer_adapters.ray_train import STATE_FILE, shares


def test_every_rank_gets_equally_many_groups_in_canonical_order() -> None:
    assert shares(list("abcdef"), 3) == [["a", "d"], ["b", "e"], ["c", "f"]]
    with pytest.raises(AdapterError, match="5 groups cannot be dealt to 2 ranks"):
        shares(list("abcde"), 2)


def local_fleet(config: dict[str, Any]) -> RolloutController:
    engine = GenerationEngine(tiny_llama(seed=1), SMALL, copy_weights=True)
    return RolloutController.over(LocalFleet(engine), prompts(), config=rollout_config())


def test_a_trainer_in_one_process_trains_on_every_prompt_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Ray Train's local mode, which needs no cluster."""
    model = tiny_llama()

    def loop(fleet: RankFleet, config: dict[str, Any]) -> list[Any]:
        assert fleet.controller is not None
        seen, versions = [], [fleet.publish(PolicyView(model)).version]
        for _ in range(NUM_PROMPTS // PROMPTS_PER_STEP):
            with fleet.next_batch(timeout_s=60) as groups:
                seen += [group.prompt_id for group in groups]
            versions.append(fleet.publish(PolicyView(model)).version)
        with pytest.raises(PromptsExhaustedError), fleet.next_batch(timeout_s=60):
            pass
        fleet.save(config["folder"])
        return [seen, versions, fleet.controller]

    trainer = TorchTrainer(
        engine_train_loop(loop, local_fleet),
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=0),
    )
    seen, versions, controller = trainer.fit().return_value
    assert seen == [f"p{n}" for n in range(NUM_PROMPTS)]
    assert versions == [1, 2, 3, 4]
    assert json.loads((tmp_path / STATE_FILE).read_text())["policy_version"] == 4
    assert controller.engine.state.name == "STOPPED"


def test_a_batch_that_was_not_trained_is_handed_out_again() -> None:
    def loop(fleet: RankFleet, config: dict[str, Any]) -> list[Any]:
        with pytest.raises(KeyError), fleet.next_batch(timeout_s=60) as lost:
            raise KeyError
        with fleet.next_batch(timeout_s=60) as again:
            return [[group.prompt_id for group in groups] for groups in (lost, again)]

    trainer = TorchTrainer(engine_train_loop(loop, local_fleet), scaling_config=ScalingConfig(num_workers=0))
    lost, again = trainer.fit().return_value
    assert lost == again


def test_a_run_that_goes_on_from_a_checkpoint_trains_on_the_rest_under_versions_above_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()

    def loop(fleet: RankFleet, config: dict[str, Any]) -> list[Any]:
        seen, versions = [], [fleet.publish(PolicyView(model)).version]
        for _ in range(config["steps"]):
            with fleet.next_batch(timeout_s=60) as groups:
                seen += [group.prompt_id for group in groups]
            versions.append(fleet.publish(PolicyView(model)).version)
            fleet.save(tmp_path)
        return [seen, versions]

    def run(steps: int) -> list[Any]:
        loop_of_rank = engine_train_loop(loop, local_fleet)
        scaling = ScalingConfig(num_workers=0)
        trainer = TorchTrainer(loop_of_rank, train_loop_config={"steps": steps}, scaling_config=scaling)
        return trainer.fit().return_value

    seen, versions = run(1)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: ray.train.Checkpoint.from_directory(str(tmp_path)))
    seen_later, versions_later = run(2)
    # within the window a batch has the groups that are complete, whichever they are
    assert sorted(seen + seen_later) == sorted(f"p{n}" for n in range(NUM_PROMPTS))
    assert versions == [1, 2]
    assert min(versions_later) > 2
    assert versions_later == sorted(set(versions_later))


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_share_each_batch_and_a_run_that_failed_goes_on_with_every_prompt_once(
    tmp_path: Path, local_ray: str
) -> None:
    tiny_llama(seed=9).save_pretrained(tmp_path / "model")
    trainer = TorchTrainer(
        engine_train_loop(train, make_fleet),
        train_loop_config={"model": str(tmp_path / "model"), "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    first, second = ([json.loads(line) for line in (tmp_path / f"{r}.jsonl").read_text().splitlines()] for r in (0, 1))
    starts = [event for event in first if "resumed" in event]
    assert [event["resumed"] for event in starts] == [False, True]
    trainers = {event["placement"] for event in (*first, *second) if "placement" in event}
    fleets = {place for event in first if "fleet" in event for place in event["fleet"]}
    assert len(trainers) == len(fleets) == 2, "one in each life"
    assert not (trainers | {"none"}) & fleets
    steps = [[event for event in rank if "trained" in event] for rank in (first, second)]
    assert len(steps[0]) == len(steps[1]) == NUM_PROMPTS // PROMPTS_PER_STEP
    for ours, theirs in zip(*steps, strict=True):
        assert len(ours["trained"]) == len(theirs["trained"]) == PROMPTS_PER_STEP // 2
        assert ours["weights"] == pytest.approx(theirs["weights"])
    trained = [prompt for rank in steps for event in rank for prompt in event["trained"]]
    assert sorted(trained) == sorted(f"p{n}" for n in range(NUM_PROMPTS))
    published = [event["published"] for event in first if "published" in event]
    assert published == sorted(published), "versions go on across the failure"
    assert max(version for event in steps[0] for version in event["versions"]) >= 2
    assert "ended" in first[-1]
    assert "the first rank failed, and with it all of them: PromptsExhaustedError" in second[-1]["ended"]


def test_this_ray_train_has_what_the_adapter_is_called_by() -> None:
    parameters = inspect.signature(TorchTrainer.__init__).parameters
    assert {"train_loop_per_worker", "train_loop_config", "scaling_config", "run_config"} <= set(parameters)
    assert {"metrics", "checkpoint"} <= set(inspect.signature(ray.train.report).parameters)
    assert hasattr(ray.train.Checkpoint, "as_directory")
    assert list(inspect.signature(ray.train.get_checkpoint).parameters) == []

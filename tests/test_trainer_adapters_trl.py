"""TRL's GRPO and RLOO trainers over an engine, and the seams of TRL's that this goes through."""

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from fakes import EOS_ID, CancelsOne, tiny_llama
from fakes_trl import Logs, even_share, number_tokenizer, prompts, settings
from peft import LoraConfig
from tokenizers import Regex, decoders
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from rollout import EngineConfig, GenerationEngine, RolloutConfig, RolloutController
from rollout.fleet.local_fleet import LocalFleet
from sync import SyncError
from sync.manifest import held_tensors
from trainer_adapters import AdapterError
from trainer_adapters.generation import GRACE_S
from trainer_adapters.trl import EngineGRPOTrainer, EngineRLOOTrainer, EngineRolloutFunc
from trainer_adapters.trl.backend import EngineBackend, Rows, longest_generation_s
from trainer_adapters.trl.prompts import prompt_ids_of
from trainer_adapters.trl.seams import Seam, check_seams, seams_of

CORRECTION = "sampling/sampling_logp_difference/max"
RATIO = "sampling/importance_sampling_ratio"
SMALL = EngineConfig(num_blocks=16, page_size=16)
LONG_PROMPT = " ".join(["w9"] * 600)


class Columns:
    """A reward function that keeps what it was given."""

    __name__ = "columns"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **columns: Any) -> list[float]:
        self.calls.append(columns)
        return even_share(**columns)


def grpo(folder: Path, source: Any, reward: Any = even_share, *, model: Any = None, **changes: Any) -> Any:
    data, lora = changes.pop("data", prompts(12)), changes.pop("peft_config", None)
    eval_data = changes.pop("eval_data", None)
    tokenizer = changes.pop("tokenizer", None) or number_tokenizer()
    logs = Logs()
    trainer = EngineGRPOTrainer(
        tiny_llama() if model is None else model,
        reward,
        args=GRPOConfig(**settings(folder, **changes)),
        train_dataset=data,
        eval_dataset=eval_data,
        processing_class=tokenizer,
        callbacks=[logs],
        peft_config=lora,
        engine=source,
    )
    trainer.logs = logs.steps
    return trainer


def check_on_policy(logs: list[dict[str, float]]) -> None:
    assert len(logs) == 3
    for step in logs:
        assert step[CORRECTION] < 1e-4
        assert abs(step[f"{RATIO}/min"] - 1) < 1e-3
        assert abs(step[f"{RATIO}/max"] - 1) < 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shares", [True, False])
def test_grpo_is_on_policy_at_every_step(tmp_path: Path, shares: bool, temperature: float) -> None:
    model, reward = tiny_llama(), Columns()
    with GenerationEngine(model if shares else tiny_llama(seed=9), SMALL, copy_weights=not shares) as engine:
        trainer = grpo(tmp_path, engine, reward, model=model, temperature=temperature)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.train()
        assert engine.version == 3
    check_on_policy(trainer.logs)
    changed = zip(before, model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in changed), "nothing was learned, so this shows nothing"
    assert [call["policy_version"] for call in reward.calls] == [[1] * 8, [2] * 8, [3] * 8]
    assert [call["min_policy_version"] for call in reward.calls] == [[1] * 8, [2] * 8, [3] * 8]
    assert all(set(call["finish_reason"]) <= {"stop", "length"} for call in reward.calls)
    assert not any(any(call["rollout_failed"]) for call in reward.calls)


def test_training_is_on_the_sampled_ids_where_their_text_encodes_to_others(tmp_path: Path) -> None:
    tokenizer, reward = number_tokenizer(), Columns()
    tokenizer.backend_tokenizer.decoder = decoders.Replace(Regex("w[0-9]+"), "w7 ")
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, reward, tokenizer=tokenizer)
        trainer.train()
    check_on_policy(trainer.logs)
    for call in reward.calls:
        ids_of_texts = tokenizer(list(call["completions"]))["input_ids"]
        assert all(a != b for a, b in zip(ids_of_texts, call["completion_ids"], strict=True))


def test_seed_of_trls_settings_decides_what_an_engine_samples(tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": "w5 w6"}] * 2)

    def completions(seed: int) -> list[list[int]]:
        reward, model = Columns(), tiny_llama()
        with GenerationEngine(model, SMALL) as engine:
            grpo(tmp_path, engine, reward, model=model, data=data, seed=seed, learning_rate=0.0).train()
        return [ids for call in reward.calls for ids in call["completion_ids"]]

    first, same, other = completions(1), completions(1), completions(2)
    assert first == same != other
    assert len({tuple(ids) for ids in first}) == len(first) == 3 * 8, "steps, groups or samples share their noise"


def test_noise_of_a_step_is_the_same_after_a_checkpoint_and_beside_evaluations(tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": "w5 w6"}] * 8)

    def completions_by_step(resume_from: str | None, **changes: Any) -> list[list[int]]:
        reward, model = Columns(), tiny_llama()
        with GenerationEngine(model, SMALL) as engine:
            trainer = grpo(tmp_path, engine, reward, model=model, data=data, learning_rate=0.0, max_steps=3, **changes)
            trainer.train(resume_from_checkpoint=resume_from)
        return [call["completion_ids"] for call in reward.calls]

    saved = {"save_strategy": "steps", "save_steps": 2}
    first, second, third = completions_by_step(None, **saved)
    assert first != second != third
    assert completions_by_step(str(tmp_path / "checkpoint-2")) == [third]
    evaluated = completions_by_step(
        None, eval_data=data.select(range(2)), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8
    )
    assert [ids for ids in evaluated if ids in (first, second, third)] == [first, second, third]
    assert len(evaluated) > 3, "nothing was evaluated, so this shows nothing"


def test_other_ranks_wait_longer_than_any_first_generation_may_take() -> None:
    of_controller = 3 * 100.0  # its draining, and two sizes of groups, whatever max_retries is
    assert longest_generation_s(100, max_retries=0) > of_controller
    of_engine = (1 + 4) * (100.0 + GRACE_S)
    assert longest_generation_s(100, max_retries=4) > of_engine


def test_metrics_of_engine_and_sync_are_in_trls_logs(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, max_steps=2)
        trainer.train()
    assert [step["engine/version"] for step in trainer.logs] == [1, 2]
    for step in trainer.logs:
        assert step["rollout/failed_samples"] == 0
        assert step["rollout/tokens_per_s"] > 0
        assert step["sync/bytes"] > 10_000
        assert {"sync/stage_s", "sync/pause_wait_s", "sync/commit_s", "reward", "loss"} <= step.keys()


@pytest.mark.parametrize("per_generation", [1, 2])
def test_weights_are_published_once_for_each_step_however_often_it_generates(
    tmp_path: Path, per_generation: int
) -> None:
    reward = Columns()
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, reward, gradient_accumulation_steps=2, steps_per_generation=per_generation)
        trainer.train()
        assert engine.version == 3
    check_on_policy(trainer.logs)
    assert len(reward.calls) == 6 // per_generation
    versions = [1, 1, 2, 2, 3, 3] if per_generation == 1 else [1, 2, 3]
    assert [set(call["policy_version"]) for call in reward.calls] == [{version} for version in versions]


def test_second_training_publishes_what_the_first_has_learned(tmp_path: Path) -> None:
    model = tiny_llama()
    with GenerationEngine(model, SMALL) as engine:
        trainer = grpo(tmp_path, engine, model=model, max_steps=1)
        trainer.train()
        trainer.train()
        assert engine.version == 2
    assert [step[CORRECTION] < 1e-4 for step in trainer.logs] == [True, True]


def test_prompts_come_already_repeated_and_each_gets_its_own_completion(tmp_path: Path) -> None:
    reward = Columns()
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        grpo(tmp_path, engine, reward, max_steps=1).train()
    (call,) = reward.calls
    assert len(call["prompts"]) == len(call["completion_ids"]) == len(call["answer"]) == 8
    assert len(set(call["prompts"])) == 2
    assert call["prompts"][0] == call["prompts"][3] != call["prompts"][4]


def test_prompts_become_the_ids_that_trl_itself_makes_of_them(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        trainer = grpo(tmp_path, engine)
        chats = [[{"role": "user", "content": "w5 w6"}], [{"role": "user", "content": "w7"}]]
        for given in (["w5 w6 w7", "w8"], chats):
            ids = prompt_ids_of(given, trainer.processing_class, trainer.chat_template_kwargs)
            assert ids == trainer._tokenize_prompts(given)[0]
        assert ids == [[5, 6, 3], [7, 3]]


def test_evaluation_generates_with_the_engine_too(tmp_path: Path) -> None:
    reward = Columns()
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        trainer = grpo(tmp_path, engine, reward, num_generations_eval=2, per_device_eval_batch_size=4)
        metrics = trainer.evaluate(prompts(4))
        assert engine.version == 1
        assert trainer.vllm_generation.publisher.weight_sync is None, "what publishing keeps is kept for nothing"
    assert [len(call["prompts"]) for call in reward.calls] == [4, 4]
    assert [set(call["policy_version"]) for call in reward.calls] == [{1}, {1}]
    assert math.isfinite(metrics["eval_loss"])


class AllLogs(TrainerCallback):
    """Keeps whatever is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_metrics_of_training_and_of_evaluation_do_not_mix(tmp_path: Path) -> None:
    every = AllLogs()
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, max_steps=2, logging_steps=2, eval_data=prompts(1), **evaluation)
        trainer.add_callback(every)
        trainer.train()
    training = [log for log in every.logs if "loss" in log]
    evaluations = [log for log in every.logs if "eval_loss" in log]
    assert [log["engine/version"] for log in training] == [1.5]
    assert [log["eval_engine/version"] for log in evaluations] == [2, 3]


class KeepsInputs(EngineGRPOTrainer):
    """Keeps what the loss is computed of."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


class ByPlace(Columns):
    """No two samples of a group are equally good, whatever they say."""

    def __call__(self, **columns: Any) -> list[float]:
        super().__call__(**columns)
        return [float(place % 4) for place in range(len(columns["completion_ids"]))]


def test_failed_sample_counts_nowhere_and_its_siblings_train(tmp_path: Path) -> None:
    reward = ByPlace()
    logs = Logs()
    with CancelsOne(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = KeepsInputs(
            tiny_llama(),
            reward,
            args=GRPOConfig(**settings(tmp_path, max_steps=1)),
            train_dataset=prompts(12),
            processing_class=number_tokenizer(),
            callbacks=[logs],
            engine=engine,
            max_retries=0,
        )
        trainer.train()
    assert reward.calls[0]["rollout_failed"] == [True] + [False] * 7
    assert reward.calls[0]["completion_ids"][0] == [EOS_ID], "an empty completion must never reach TRL"
    assert reward.calls[0]["policy_version"] == [None] + [1] * 7
    (step,) = logs.steps
    assert step["rollout/failed_samples"] == 1
    assert math.isfinite(step["loss"])
    assert math.isfinite(step["grad_norm"])
    kept = trainer.kept
    masked = (kept["completion_mask"] * kept["tool_mask"]).sum(1) == 0
    assert masked.sum() == 1
    assert kept["advantages"][masked].item() == 0
    prompt = kept["prompt_ids"][masked]
    siblings = (kept["prompt_ids"] == prompt).all(1) & ~masked
    assert siblings.sum() == 3
    assert kept["advantages"][siblings].abs().max() > 0.1
    assert abs(kept["advantages"][siblings].sum().item()) < 1e-4, "the failed one's reward moved its siblings' mean"


def test_prompt_that_the_engine_refuses_costs_only_its_own_group(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": [LONG_PROMPT, "w5 w6 w7"]})
    with GenerationEngine(tiny_llama(max_position_embeddings=1024), SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, model=tiny_llama(max_position_embeddings=1024), data=data)
        trainer.train()
        assert engine.version == 3
    assert [step["rollout/failed_samples"] for step in trainer.logs] == [4, 4, 4]
    assert all(math.isfinite(step["loss"]) and step[CORRECTION] < 1e-4 for step in trainer.logs)


def test_batch_that_fails_as_a_whole_ends_the_training_with_the_reason(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": [LONG_PROMPT] * 2})
    with (
        GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine,
        pytest.raises(AdapterError, match="none of 8 samples could be generated"),
    ):
        grpo(tmp_path, engine, data=data).train()


def test_publish_that_fails_ends_the_training_with_its_error(tmp_path: Path) -> None:
    with (
        GenerationEngine(tiny_llama(hidden_size=64), SMALL, copy_weights=True) as engine,
        pytest.raises(SyncError, match="wrong shape"),
    ):
        grpo(tmp_path, engine).train()


@pytest.mark.parametrize("shares", [True, False])
def test_controller_takes_the_engines_place(tmp_path: Path, shares: bool) -> None:
    model, reward = tiny_llama(), Columns()
    config = RolloutConfig(group_size=2, prompts_per_step=1)
    fleet = LocalFleet(GenerationEngine(model if shares else tiny_llama(seed=9), SMALL, copy_weights=not shares))
    with RolloutController.over(fleet, [[3, 4]] * 20, config=config) as controller:
        trainer = grpo(tmp_path, controller, reward, model=model, temperature=0.7)
        trainer.train()
        assert controller.version == 3
    check_on_policy(trainer.logs)
    assert [set(call["policy_version"]) for call in reward.calls] == [{1}, {2}, {3}]


@pytest.mark.ray
def test_grpo_generates_on_ray_workers(tmp_path: Path, local_ray: str) -> None:
    tiny_llama(seed=9).save_pretrained(tmp_path / "model")
    reward = Columns()
    config = RolloutConfig(num_workers=1, group_size=2, prompts_per_step=1)
    with RolloutController(str(tmp_path / "model"), [[3, 4]] * 8, engine=SMALL, config=config) as controller:
        trainer = grpo(tmp_path / "out", controller, reward)
        trainer.train()
        assert controller.version == 3
    check_on_policy(trainer.logs)
    assert [set(call["policy_version"]) for call in reward.calls] == [{1}, {2}, {3}]


def test_adapters_are_merged_on_their_way_to_the_engine(tmp_path: Path) -> None:
    model, base = tiny_llama(), tiny_llama()
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with GenerationEngine(model, SMALL, copy_weights=True) as engine:
        trainer = grpo(tmp_path, engine, model=model, peft_config=lora, learning_rate=0.1)
        trainer.train()
        assert engine.version == 3
        old = base.model.layers[0].self_attn.q_proj.weight
        assert not torch.equal(engine.model.model.layers[0].self_attn.q_proj.weight, old)
    check_on_policy(trainer.logs)


def test_engine_on_the_adapters_base_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = tiny_llama()
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with GenerationEngine(model, SMALL) as engine, pytest.raises(SyncError, match="copy_weights=True"):
        grpo(tmp_path, engine, model=model, peft_config=lora).train()


@pytest.mark.parametrize("shares", [True, False])
def test_rloo_generates_with_the_newest_weights(tmp_path: Path, shares: bool) -> None:
    model, columns, logs, held = tiny_llama(), Columns(), Logs(), []
    with GenerationEngine(model if shares else tiny_llama(seed=9), SMALL, copy_weights=not shares) as engine:

        def reward(**given: Any) -> list[float]:
            pairs = zip(held_tensors(engine.model), held_tensors(model), strict=True)
            held.append(all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs))
            return columns(**given)

        trainer = EngineRLOOTrainer(
            model,
            reward,
            args=RLOOConfig(**settings(tmp_path, beta=0.0)),
            train_dataset=prompts(12),
            processing_class=number_tokenizer(),
            callbacks=[logs],
            engine=engine,
        )
        trainer.train()
        assert engine.version == 3
    assert held == [True] * 3
    assert [set(call["policy_version"]) for call in columns.calls] == [{1}, {2}, {3}]
    assert [step["engine/version"] for step in logs.steps] == [1, 2, 3]


def test_each_rank_gets_its_own_rows_however_many_the_others_asked_for() -> None:
    rows = Rows(
        completion_ids=[[1], [2], [3]], logprobs=[[-1.0], [-2.0], [-3.0]], columns={"policy_version": [4, 5, 6]}
    )
    first, second, third = rows.split([1, 0, 2])
    assert (first.completion_ids, first.logprobs, first.columns) == ([[1]], [[-1.0]], {"policy_version": [4]})
    assert second.completion_ids == []
    assert (third.completion_ids, third.columns) == ([[2], [3]], {"policy_version": [5, 6]})


def test_failed_sample_of_rloo_has_no_reward(tmp_path: Path) -> None:
    reward, logs = Columns(), Logs()
    with CancelsOne(tiny_llama(), SMALL, copy_weights=True) as engine:
        trainer = EngineRLOOTrainer(
            tiny_llama(),
            reward,
            args=RLOOConfig(**settings(tmp_path, max_steps=1, beta=0.0)),
            train_dataset=prompts(12),
            processing_class=number_tokenizer(),
            callbacks=[logs],
            engine=engine,
            max_retries=0,
        )
        trainer.train()
    ((step,), (call,)) = logs.steps, reward.calls
    assert call["rollout_failed"] == [True] + [False] * 7
    shares = even_share(call["completion_ids"])[1:]
    assert step["reward"] == pytest.approx(sum(shares) / 7)
    assert math.isfinite(step["loss"])


def test_rollout_func_works_in_trls_own_trainer(tmp_path: Path) -> None:
    reward = Columns()
    with GenerationEngine(tiny_llama(seed=9), SMALL, copy_weights=True) as engine:
        rollout_func = EngineRolloutFunc(engine)
        trainer = GRPOTrainer(
            tiny_llama(),
            reward,
            args=GRPOConfig(**settings(tmp_path, gradient_accumulation_steps=2, steps_per_generation=1)),
            train_dataset=prompts(12),
            processing_class=number_tokenizer(),
            rollout_func=rollout_func,
        )
        trainer.train()
        assert engine.version == 3
        assert rollout_func.backend_for(trainer).publisher.weight_sync is None, (
            "what publishing keeps is kept for nothing"
        )
        assert [set(call["policy_version"]) for call in reward.calls] == [{1}, {1}, {2}, {2}, {3}, {3}]
        trainer.args.max_steps = 1
        trainer.train()
        trainer.train()
        assert engine.version == 5, "the last step of one training is not the first of the next"


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5}])
def test_sampling_that_renormalises_warns_where_ratios_are_corrected(tmp_path: Path, filters: dict[str, Any]) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        with pytest.warns(UserWarning, match="renormalise the sampling log-probs"):
            grpo(tmp_path, engine, **filters)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            grpo(tmp_path, engine, **filters, vllm_importance_sampling_correction=False)
            grpo(tmp_path, engine)
    assert not [warning for warning in caught if "renormalise" in str(warning.message)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_p": 0.1}, "min_p=0.1 is not among what an engine samples with"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"length_penalty": 2.0}}, "generation_kwargs="),
        ({"max_completion_length": None}, "max_completion_length must be at least 1 token, got None"),
        ({"top_k": -1}, "top_k must be at least 0, got -1; 0 turns it off"),
        ({"use_transformers_continuous_batching": True}, "must stay False"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "vespo"),
    ],
)
def test_setting_that_an_engine_cannot_keep_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine, pytest.raises(AdapterError, match=message):
        grpo(tmp_path, engine, **changes)


def test_trainer_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="needs an engine or a controller"):
        grpo(tmp_path, None)


# ------------------------------------------------------------------------------------------- the seams, one by one


@pytest.mark.parametrize("kinds", [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_this_trl_has_every_seam(kinds: tuple[type, type]) -> None:
    assert [line for seam in seams_of(*kinds) for line in seam.missing()] == []
    check_seams(seams_of(*kinds))


def test_trl_whose_seams_have_changed_is_refused_by_name_and_version() -> None:
    def generate(self: Any, prompts: Any) -> Any:
        return self.other_backend(prompts)

    changed = [Seam(of=generate, takes=("prompts", "images"), reads=("vllm_generation",))]
    expected = f"trl {trl.__version__} is not what .* has no parameter 'images'.* does not use 'vllm_generation'"
    with pytest.raises(AdapterError, match=expected):
        check_seams(changed)


def test_trl_calls_the_backend_as_it_is_written() -> None:
    for name in ("generate", "sync_weights"):
        theirs = inspect.signature(getattr(VLLMGeneration, name)).parameters
        ours = inspect.signature(getattr(EngineBackend, name)).parameters
        assert list(ours) == list(theirs)


def test_trl_takes_a_rollout_func_of_prompts_and_trainer() -> None:
    assert "rollout_func" in inspect.signature(GRPOTrainer.__init__).parameters
    assert "self.rollout_func(prompts, self)" in inspect.getsource(GRPOTrainer._generate)
    assert list(inspect.signature(EngineRolloutFunc.__call__).parameters) == ["self", "prompts", "trainer"]


def test_trl_leaves_completions_without_any_reward_out_of_the_mean() -> None:
    for trainer in (GRPOTrainer, RLOOTrainer):
        source = inspect.getsource(trainer._generate_and_score_completions)
        assert "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)" in source

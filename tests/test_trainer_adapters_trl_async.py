"""TRL's AsyncGRPO over an engine: its two plug-in protocols, their order, and what crosses the queue."""

import math
import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from fakes import EOS_ID, CancelsOne, StepGate, tiny_llama, tiny_qwen2, wait_until
from fakes_trl import Logs, even_share, number_tokenizer, prompts, settings
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
from trl_on_cpu import register_plain_tree_attention

from rollout import (
    EngineConfig,
    FinishReason,
    GenerationEngine,
    Rollout,
    RolloutConfig,
    RolloutController,
    RolloutError,
    RolloutGroup,
    RolloutStalledError,
    SamplingParams,
    VersionSpan,
)
from rollout.batches.prompts import Prompts
from rollout.fleet.local_fleet import LocalFleet
from sync import ManifestError
from sync.manifest import held_tensors
from trainer_adapters import AdapterError
from trainer_adapters.publishing import engine_of
from trainer_adapters.trl.async_grpo import EngineRolloutWorker, EngineWeightTransfer
from trainer_adapters.trl.prompts import PROMPT, REWARDS, UNSCORABLE, PromptRows, group_reward_of
from trainer_adapters.trl.samples import rollout_config_of, samples_of
from trainer_adapters.trl.seams import async_seams

SMALL = EngineConfig(num_blocks=64, page_size=16)
FOREVER_S = 300.0


def args_of(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(**settings(folder, token_budget=0, **changes))


def worker_over(engine: GenerationEngine, folder: Path, **changes: Any) -> EngineRolloutWorker:
    given = {"args": args_of(folder), "prompts": prompts(12), "reward_funcs": even_share, **changes}
    return EngineRolloutWorker(engine, processing_class=number_tokenizer(), **given)


def take(worker: EngineRolloutWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=60) for _ in range(count)]


def sent(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What TRL sends of it."""
    return ((name, parameter.detach()) for name, parameter in _iter_vllm_named_params(model))


def holds(engine: GenerationEngine, model: torch.nn.Module) -> bool:
    pairs = zip(held_tensors(engine.model), held_tensors(model), strict=True)
    return all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)


# ------------------------------------------------------------------------------------------------ the whole trainer


class Events:
    """A worker and a transfer that note what is called on them."""

    def __init__(self, engine: GenerationEngine, folder: Path, args: AsyncGRPOConfig) -> None:
        events = self.events = []

        class Worker(EngineRolloutWorker):
            def start(self) -> None:
                events.append("start")
                super().start()

            def stop(self) -> None:
                events.append("stop")
                super().stop()

            def update_model_version(self, model_version: int) -> None:
                events.append(f"version {model_version}")
                super().update_model_version(model_version)

        class Transfer(EngineWeightTransfer):
            def init_weight_transfer(self) -> None:
                events.append("init")
                super().init_weight_transfer()

            def pause(self) -> None:
                events.append("pause")
                super().pause()

            def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
                events.append("send")
                super().send_weights(iterator)

            def resume(self) -> None:
                events.append("resume")
                super().resume()

            def destroy(self) -> None:
                events.append("destroy")
                super().destroy()

        tokenizer = number_tokenizer()
        self.worker = Worker(
            engine, args=args, prompts=prompts(12), reward_funcs=even_share, processing_class=tokenizer
        )
        self.transfer = Transfer(engine)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_async_grpo_trains_on_the_engines_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")  # TRL asks for it, to know peak FLOPs
    tiny_llama().save_pretrained(tmp_path / "model")
    args, logs = args_of(tmp_path / "out", temperature=temperature), Logs()
    with GenerationEngine(tiny_llama(seed=9), SMALL) as engine:
        plugged = Events(engine, tmp_path, args)
        trainer = AsyncGRPOTrainer(
            str(tmp_path / "model"),
            args=args,
            train_dataset=prompts(12),
            processing_class=number_tokenizer(),
            callbacks=[logs],
            rollout_worker=plugged.worker,
            weight_transfer=plugged.transfer,
        )
        register_plain_tree_attention()
        trainer.train()
        assert engine.version == 4
        assert holds(engine, trainer.model)
    each = ["pause", "send", "resume"]
    steps = [event for step in (2, 3, 4) for event in (*each, f"version {step}")]
    assert plugged.events == ["init", *each, "version 1", "start", *steps, "stop", "destroy"]
    first = logs.steps[0]
    assert first["sample/staleness_max"] == 0
    assert abs(first["ratio"] - 1) < 1e-3
    assert abs(first["kl"]) < 1e-6
    for step in logs.steps:
        assert step["sample/staleness_max"] <= args.max_staleness
        assert math.isfinite(step["loss"])
        assert step["rewards/even_share"] == pytest.approx(step["reward"])
    assert "engine/version" in first, "our metrics are not in TRL's logs"
    assert first["rollout/imbalance"] == 0


# ------------------------------------------------------------------------------------------------ weight transfer


def test_everything_is_copied_when_send_returns_and_no_engine_is_waited_for() -> None:
    source = tiny_llama(seed=3)
    expected = [parameter.detach().clone() for parameter in source.parameters()]
    events: list[str] = []

    def streamed() -> Iterator[tuple[str, Tensor]]:
        yield from sent(source)
        events.append("drained")

    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        transfer = EngineWeightTransfer(engine)
        transfer.init_weight_transfer()
        free = threading.Event()
        busy = engine.call(lambda engine: free.wait(60))  # until then no commit can begin
        transfer.pause()
        transfer.send_weights(streamed())
        events.append("sent")
        assert engine.version == 0
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.zero_()  # what the trainer's next step does
        free.set()
        transfer.resume()
        assert busy.result(60)
        events.append(f"version {engine.version}")
        transfer.destroy()
        assert events == ["drained", "sent", "version 1"]
        assert all(torch.equal(a, b) for a, b in zip(expected, engine.model.parameters(), strict=True))


def engine_or_controller(model: Any, is_controller: bool) -> GenerationEngine | RolloutController:
    engine = GenerationEngine(model, SMALL, copy_weights=True)
    if not is_controller:
        return engine
    config = RolloutConfig(group_size=2, prompts_per_step=1, num_epochs=None, sampling=SamplingParams(max_new_tokens=8))
    return RolloutController.over(LocalFleet(engine), [[5, 6, 7]], config=config)


@pytest.mark.parametrize("is_controller", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
def test_of_a_partly_frozen_policy_what_is_not_trained_comes_from_the_model(make: Any, is_controller: bool) -> None:
    policy = make(seed=3)
    policy.model.embed_tokens.weight.requires_grad_(False)  # under tied embeddings the output's too
    with engine_or_controller(make(seed=4), is_controller) as source:
        transfer = EngineWeightTransfer(source, policy=policy)
        transfer.init_weight_transfer()
        assert "model.embed_tokens.weight" not in dict(sent(policy))
        transfer.send_weights(sent(policy))
        transfer.resume()
        engine = engine_of(source)
        assert engine is not None
        assert holds(engine, policy)
        assert transfer.last_report is not None
        assert transfer.last_report.version == engine.version == 1
        transfer.destroy()


@pytest.mark.parametrize("is_given", [False, True])
def test_of_a_policy_with_adapters_everything_is_sent_merged(is_given: bool) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    policy = get_peft_model(tiny_llama(seed=3), lora)
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        transfer = EngineWeightTransfer(engine, policy=policy if is_given else None)
        transfer.init_weight_transfer()
        policy.merge_adapter()
        merged = {name: tensor.clone() for name, tensor in sent(policy)}
        transfer.send_weights(sent(policy))
        policy.unmerge_adapter()
        transfer.resume()
        transfer.destroy()
        assert not holds(engine, tiny_llama(seed=3))
        assert all(torch.equal(parameter, merged[name]) for name, parameter in engine.model.named_parameters())


def test_unsent_tensors_can_be_given_by_name() -> None:
    source = tiny_llama(seed=3)
    source.model.embed_tokens.weight.requires_grad_(False)
    unsent = {"model.embed_tokens.weight": source.model.embed_tokens.weight}
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        transfer = EngineWeightTransfer(engine, unsent=unsent)
        transfer.init_weight_transfer()
        transfer.send_weights(sent(source))
        transfer.resume()
        assert holds(engine, source)
        transfer.destroy()


def test_send_without_the_trained_tensors_is_no_update() -> None:
    source = tiny_llama(seed=3)
    with GenerationEngine(tiny_llama(), SMALL, copy_weights=True) as engine:
        transfer = EngineWeightTransfer(engine)
        transfer.init_weight_transfer()
        with pytest.raises(AdapterError, match="sent 0 tensors"):
            transfer.send_weights(iter(()))
        with pytest.raises(
            ManifestError, match=r"sent 1 tensors, and 20 parameters .* model.embed_tokens.weight, .*policy=model"
        ):
            transfer.send_weights(iter([("lm_head.weight", torch.zeros(64, 32))]))
        assert engine.version == 0
        transfer.send_weights(sent(source))
        transfer.resume()
        with pytest.raises(AdapterError, match="sent 20 tensors, the first time 21"):
            transfer.send_weights(iter(list(sent(source))[:-1]))
        with pytest.raises(ManifestError, match="unexpected"):
            transfer.send_weights(iter([("module.lm_head.weight", torch.zeros(64, 32))]))
        assert engine.version == 1
        transfer.destroy()
        transfer.destroy()
        with pytest.raises(AdapterError, match="after init_weight_transfer"):
            transfer.send_weights(sent(source))


def test_controller_gets_the_weights_and_goes_on() -> None:
    source = tiny_llama(seed=3)
    fleet = LocalFleet(GenerationEngine(tiny_llama(), SMALL, copy_weights=True))
    config = RolloutConfig(group_size=2, prompts_per_step=1, num_epochs=None, sampling=SamplingParams(max_new_tokens=8))
    with RolloutController.over(fleet, [[5, 6, 7]], config=config) as controller:
        transfer = EngineWeightTransfer(controller)
        transfer.init_weight_transfer()
        transfer.send_weights(sent(source))
        transfer.resume()
        assert holds(fleet.engine, source)
        for _ in range(4):
            with controller.next_batch(60) as lease:
                versions = {rollout.max_version for group in lease.groups for rollout in group}
        assert versions == {1}
        transfer.destroy()


# --------------------------------------------------------------------------------------------------- rollout worker


def rollout(index: int, reward: float | None, spans: list[VersionSpan], **metadata: Any) -> Rollout:
    return Rollout(
        rollout_id=f"r{index}",
        sample_index=index,
        prompt_ids=[5, 6],
        token_ids=[7, 8, EOS_ID],
        logprobs=[-0.5, -0.25, -0.125],
        loss_mask=[1, 1, 1],
        version_spans=spans,
        prefill_version=spans[0].version,
        finish_reason=FinishReason.STOP,
        reward=reward,
        metadata={PROMPT: "w5 w6", **metadata},
    )


def group_of(rollouts: list[Rollout]) -> RolloutGroup:
    return RolloutGroup(group_id="g0", prompt_id="p0", prompt_ids=[5, 6], rollouts=tuple(rollouts), staleness=0)


def test_sample_has_ids_masks_and_logprobs_of_one_length() -> None:
    (sample,) = samples_of(
        group_of([rollout(0, 1.0, [VersionSpan(0, 3)], **{REWARDS: {"right": 1.0}})]), 7, number_tokenizer(), int
    )
    assert sample.input_ids.tolist() == [5, 6, 7, 8, EOS_ID]
    assert sample.completion_mask.tolist() == [0, 0, 1, 1, 1]
    assert sample.old_log_probs.tolist() == [0, 0, -0.5, -0.25, -0.125]
    assert (sample.input_ids.dtype, sample.old_log_probs.dtype) == (np.int64, np.float32)
    assert sample.group_id == 7
    assert sample.prompt == [{"role": "user", "content": "w5 w6"}]
    assert sample.completion == [{"role": "assistant", "content": "w7 w8"}]
    assert sample.metrics == {"reward": 1.0, "reward_std": 0.0, "rewards/right": 1.0}


def test_advantages_are_over_the_scored_samples_and_zero_for_the_others() -> None:
    rewards = [1.0, 0.0, 0.0, None]
    one = [VersionSpan(0, 1)]
    group = group_of(
        [rollout(i, 0.0 if r is None else r, one, **{UNSCORABLE: r is None}) for i, r in enumerate(rewards)]
    )
    samples = samples_of(group, 0, None, int)
    mean, std = 1 / 3, math.sqrt(2) / 3
    expected = [(1 - mean) / (std + 1e-8), -mean / (std + 1e-8), -mean / (std + 1e-8), 0.0]
    assert [sample.advantage for sample in samples] == pytest.approx(expected)
    assert math.isnan(samples[3].metrics["reward"])
    equal = samples_of(group_of([rollout(i, 0.5, one) for i in range(3)]), 0, None, int)
    assert [sample.advantage for sample in equal] == [0, 0, 0]
    with pytest.raises(AdapterError, match="r0 has no reward"):
        samples_of(group_of([rollout(0, None, one)]), 0, None, int)


def scale(completion_ids: list[list[int]], factor: float, **_: Any) -> list[float]:
    return [factor] * len(completion_ids)


def test_reward_functions_of_one_name_are_all_added_up() -> None:
    functions = [partial(scale, factor=1.0), partial(scale, factor=2.0), lambda **given: scale(given["prompts"], 4.0)]
    rewards = group_reward_of(functions, [1.0, 10.0, 100.0], number_tokenizer())
    one = [VersionSpan(0, 1)]
    (result,) = rewards([rollout(0, 0.0, one, **{PROMPT: "w5"})])
    assert result.reward == 421.0
    assert set(result.metrics) == {"scale/mean", "<lambda>/mean"}


def test_reward_function_may_be_called_as_one_of_the_controllers_own_metrics() -> None:
    def mean(**_: Any) -> list[float]:
        return [0.5]

    one = [VersionSpan(0, 1)]
    (result,) = group_reward_of([mean], [1.0], number_tokenizer())([rollout(0, 0.0, one, **{PROMPT: "w5"})])
    assert (result.reward, result.metrics) == (0.5, {"mean/mean": 0.5})


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_rollout_without_any_reward_leaves_the_mean_of_the_others(nothing: float | None) -> None:
    def first(**_: Any) -> list[float | None]:
        return [nothing, 1.0, 2.0]

    def second(**_: Any) -> list[float | None]:
        return [nothing, nothing, 3.0]

    rewards = group_reward_of([first, second], [1.0, 1.0], number_tokenizer())
    one = [VersionSpan(0, 1)]
    results = rewards([rollout(i, 0.0, one, **{PROMPT: "w5"}) for i in range(3)])
    assert [result.metadata[UNSCORABLE] for result in results] == [True, False, False]
    assert [result.reward for result in results] == [3.0, 1.0, 5.0]
    assert results[1].metrics == {"first/mean": 1.0}
    alone = group_reward_of([lambda **_: [nothing]], [1.0], number_tokenizer())(
        [rollout(0, 0.0, one, **{PROMPT: "w5"})]
    )
    assert (alone[0].reward, alone[0].metadata[UNSCORABLE]) == (0.0, True)


def test_row_that_the_tokenizer_refuses_fails_alone_and_rows_without_a_length_are_refused() -> None:
    rows = Prompts(PromptRows([{"prompt": "w5"}, {"prompt": "half \ud83d"}, {"prompt": "w6"}], number_tokenizer(), {}))
    found = [rows.next() for _ in range(3)]
    errors = [prompt.error if prompt is not None else "none came" for prompt in found]
    assert (errors[0], errors[2]) == (None, None)
    assert "prompt 1: the tokenizer cannot encode this prompt of text: " in (errors[1] or "")
    with pytest.raises(AdapterError, match="got generator, which has no length"):
        PromptRows((row for row in ()), number_tokenizer(), {})


def test_sample_is_as_old_as_its_oldest_token() -> None:
    spans = [VersionSpan(0, 3), VersionSpan(2, 5)]
    (sample,) = samples_of(group_of([rollout(0, 1.0, spans)]), 0, None, lambda version: version * 10)
    assert sample.model_version == 30


def test_versions_are_trls_whatever_the_engine_calls_them(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        with engine.update(version=40):
            pass
        worker = worker_over(engine, tmp_path)
        worker.update_model_version(1)
        worker.start()
        assert {sample.model_version for sample in take(worker, 8)} == {1}
        with engine.update(version=45):
            pass
        worker.update_model_version(2)
        wait_until(lambda: take(worker, 1)[0].model_version == 2)
        worker.stop()


class CountsRefusals(queue.Queue[Any]):
    """Counts how often it was too full to take something in time."""

    num_refusals = 0

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        try:
            super().put(item, block, timeout)
        except queue.Full:
            self.num_refusals += 1
            raise


def test_full_queue_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        worker = worker_over(engine, tmp_path)
        assert worker.rollout_buffer.maxsize == 4
        worker.rollout_buffer = full = CountsRefusals(4)
        worker.update_model_version(1)
        worker.start()
        wait_until(lambda: full.num_refusals >= 2)
        samples = take(worker, 16)  # two batches of two groups
        worker.check_health(FOREVER_S)
        worker.stop()
    assert [sample.group_id for sample in samples] == [group for group in range(4) for _ in range(4)]
    texts = [sample.prompt[0]["content"] for sample in samples]
    assert texts == [text for text in prompts(12)["prompt"][:4] for _ in range(4)]
    for sample in samples:
        prompt_len = int((sample.completion_mask == 0).sum())
        assert [f"w{token}" for token in sample.input_ids[:prompt_len]] == sample.prompt[0]["content"].split()
        completion = sample.input_ids[prompt_len:].tolist()
        assert sample.metrics["reward"] == pytest.approx(even_share([completion])[0])
        assert sample.enqueued_at is not None


def test_reward_functions_get_what_trl_gives_them(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def one(**given: Any) -> list[float | None]:
        calls.append(given)
        return [None, 1.0, 0.0, None]

    async def other(completions: list[Any], **_: Any) -> list[float | None]:
        return [None, 1.0, 1.0, 1.0]

    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": "w5 w6"}], "answer": "x"}])
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        worker = worker_over(engine, tmp_path, prompts=chats, reward_funcs=[one, other], reward_weights=[1.0, 0.5])
        worker.start()
        samples = take(worker, 4)
        worker.stop()
    completions = [sample.input_ids[3:].tolist() for sample in samples]
    (given,) = [call for call in calls if call["completion_ids"] == completions]
    assert given["answer"] == ["x"] * 4
    assert given["prompts"] == [[{"role": "user", "content": "w5 w6"}]] * 4
    assert given["completions"][0][0]["role"] == "assistant"
    assert given["policy_version"] == [0] * 4
    assert samples[0].input_ids[:3].tolist() == [5, 6, 3], "the chat template was not applied as TRL does"
    rewards = [sample.metrics["reward"] for sample in samples]
    assert math.isnan(rewards[0])
    assert rewards[1:] == [1.5, 0.5, 0.5]
    assert samples[1].metrics["rewards/one"] == samples[1].metrics["rewards/other"] == 1.0


def test_sample_that_fails_is_replaced_and_its_siblings_come(tmp_path: Path) -> None:
    with CancelsOne(tiny_llama(), SMALL) as engine:
        worker = worker_over(engine, tmp_path)
        worker.start()
        samples = take(worker, 8)
        worker.check_health(FOREVER_S)
        worker.stop()
    assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4
    assert all(sample.completion_mask.sum() > 0 for sample in samples)


def test_prompt_that_is_refused_leaves_the_others(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["w5 w6", " ".join(["w9"] * 2000), "w7 w8"]})
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        worker = worker_over(engine, tmp_path, prompts=data)
        worker.start()
        samples = take(worker, 8)
        worker.check_health(FOREVER_S)
        worker.stop()
    assert [sample.prompt[0]["content"] for sample in samples] == ["w5 w6"] * 4 + ["w7 w8"] * 4


def test_worker_that_failed_says_why(tmp_path: Path) -> None:
    controller = RolloutController(tiny_llama(), [[3, 4]], config=RolloutConfig(group_size=2, prompts_per_step=1))
    worker = EngineRolloutWorker(controller)
    worker.start()  # over a controller that its owner has not started
    with pytest.raises(RolloutError, match="the rollout worker failed: the controller is not running") as caught:
        wait_until(lambda: worker.check_health(FOREVER_S) is not None)
    assert caught.value.__cause__ is not None
    worker.stop()


def test_worker_from_which_nothing_comes_is_told_from_one_that_waits_for_the_trainer(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        gate = StepGate(engine)
        worker = worker_over(engine, tmp_path)
        worker.start()
        gate.wait_for_arrival()
        worker.check_health(FOREVER_S)
        with pytest.raises(RolloutStalledError, match="no sample came for"):
            worker.check_health(0.0)
        gate.open()
        wait_until(worker.rollout_buffer.full)
        worker.check_health(0.0)
        worker.stop()


def test_controller_of_somebody_elses_goes_on_after_the_stop(tmp_path: Path) -> None:
    config = RolloutConfig(group_size=4, prompts_per_step=2, num_epochs=None, sampling=SamplingParams(max_new_tokens=8))
    controller = RolloutController(
        tiny_llama(),
        [[5, 6], [7, 8, 9]],
        lambda rollout, text: float(rollout.token_ids[0] % 2),
        engine=SMALL,
        config=config,
    )
    with controller:
        worker = EngineRolloutWorker(controller, processing_class=number_tokenizer())
        worker.update_model_version(1)
        worker.start()
        samples = take(worker, 8)
        worker.stop()
        assert {sample.metrics["reward"] for sample in samples} <= {0.0, 1.0}
        with controller.next_batch(60) as lease:
            assert len(lease) == 2
        counts = controller.metrics()
        assert counts["rollout/imbalance"] == 0


@pytest.mark.ray
def test_ray_workers_get_the_weights_and_their_samples_say_so(tmp_path: Path, local_ray: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    config = RolloutConfig(
        num_workers=1, group_size=2, prompts_per_step=1, num_epochs=None, sampling=SamplingParams(max_new_tokens=8)
    )
    prompt = [{"prompt": [5, 6, 7]}]
    with RolloutController(
        str(tmp_path / "model"),
        prompt,
        lambda rollout, text: float(len(rollout.token_ids)),
        engine=SMALL,
        config=config,
    ) as controller:
        worker, transfer = EngineRolloutWorker(controller), EngineWeightTransfer(controller)
        transfer.init_weight_transfer()
        for version in (1, 2):
            transfer.send_weights(sent(tiny_llama(seed=version)))
            transfer.resume()
            worker.update_model_version(version)
        worker.start()
        wait_until(lambda: take(worker, 1)[0].model_version == 2)
        assert controller.version == 2
        worker.stop()
        transfer.destroy()


def test_second_start_is_refused(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        worker = worker_over(engine, tmp_path)
        worker.start()
        with pytest.raises(AdapterError, match="started already"):
            worker.start()
        worker.stop()


def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    controller = RolloutController(tiny_llama(), [[3, 4]])
    with pytest.raises(AdapterError, match="of its own; pass none"):
        EngineRolloutWorker(controller, reward_funcs=even_share)
    engine = GenerationEngine(tiny_llama(), SMALL)
    with pytest.raises(AdapterError, match="needs args, prompts, reward_funcs"):
        EngineRolloutWorker(engine, args=args_of(tmp_path))
    with pytest.raises(AdapterError, match="as many reward_weights"):
        worker_over(engine, tmp_path, reward_weights=[1.0, 2.0])
    with pytest.warns(UserWarning, match="renormalise"):
        worker_over(engine, tmp_path, args=args_of(tmp_path, top_k=3))


def test_trls_settings_become_the_controllers(tmp_path: Path) -> None:
    args = args_of(
        tmp_path, gradient_accumulation_steps=2, weight_sync_steps=3, max_staleness=2, temperature=0.7, top_p=0.9
    )
    config = rollout_config_of(args)
    assert (config.group_size, config.prompts_per_step) == (4, 12)
    assert config.max_staleness == 1
    assert config.num_epochs is None
    assert (config.sampling.max_new_tokens, config.sampling.temperature, config.sampling.top_p) == (8, 0.7, 0.9)
    for changes, message in (
        ({"max_staleness": 0}, "at least 1"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"top_k": -1}, "top_k must be at least 0"),
    ):
        with pytest.raises(AdapterError, match=message):
            rollout_config_of(args_of(tmp_path, **changes))


def test_this_trl_has_every_seam_of_async_grpo() -> None:
    assert [line for seam in async_seams() for line in seam.missing()] == []

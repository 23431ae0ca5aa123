"""examples/grpo_by_hand.py, ppo.py, lora.py and trainer_callback.py on a tiny random model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpo
import grpo_by_hand
import lora
import ppo
import pytest
import smollm2
import torch
import trainer_callback
from digit_model import TASK, save_digit_model
from peft.tuners.lora import LoraLayer
from run_folder import RunFolder
from tasks import TASKS

from rollout import FinishReason, Rollout, VersionSpan
from trainer_adapters import group_advantages, grpo_loss, pad_rollouts


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_digit_model(tmp_path_factory.mktemp("tiny"))


def small(model: Path, *extra: str) -> list[str]:
    """At this seed some of the first step's groups, all of whose noise the seed decides, have unequal rewards."""
    return ["--model", str(model), "--steps", "3", "--lr", "1e-2", "--task", TASK, "--seed", "2", *extra]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts_of(rewards: list[float]) -> list[Rollout]:
    """One for each reward, of different lengths."""
    return [
        Rollout(
            rollout_id=str(row),
            prompt_ids=[3, 4],
            token_ids=[5 + i for i in range(row + 1)],
            logprobs=[-0.5 - 0.3 * row] * (row + 1),
            loss_mask=[1] * (row + 1),
            version_spans=[VersionSpan(0, 0)],
            prefill_version=0,
            finish_reason=FinishReason.STOP,
            reward=reward,
        )
        for row, reward in enumerate(rewards)
    ]


def test_the_loop_by_hand_has_the_batch_and_the_gradients_of_the_library() -> None:
    group = rollouts_of([0.0, 1.0, 0.5, 1.0])
    batch = pad_rollouts([group], 0)
    input_ids, mask, old_logprobs = grpo_by_hand.tensors_of(group)
    assert torch.equal(input_ids, batch.input_ids)
    assert torch.equal(mask, batch.loss_mask)
    assert torch.equal(old_logprobs, batch.old_logprobs)
    advantages = grpo_by_hand.advantages_of(group)
    assert torch.allclose(advantages, group_advantages(batch.rewards, batch.group_index))

    logprobs = torch.linspace(-2, 0, mask.numel()).view(mask.shape).requires_grad_()
    losses = grpo_by_hand.policy_losses(logprobs, old_logprobs, advantages)
    (ours,) = torch.autograd.grad(losses[mask].sum() / mask.sum(), logprobs)
    loss, metrics = grpo_loss(logprobs, old_logprobs, advantages, mask, proximal_logprobs=logprobs.detach())
    (theirs,) = torch.autograd.grad(loss, logprobs)
    assert metrics.truncated_share > 0, "no weight was cut, so this shows nothing of the bound"
    assert torch.allclose(ours, theirs)


def test_a_step_by_hand_has_the_gradient_of_the_librarys_whose_groups_of_equal_rewards_count_for_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    """Before it is clipped, since a clipped one does not tell by what it was divided."""
    options = ["--steps", "1", "--prompts-per-step", "6", "--group-size", "4", "--max-new-tokens", "8"]
    arguments = ["--model", str(model_folder), "--task", TASK, "--seed", "2", *options]

    def gradients(train: Callable[[Any, Any], None]) -> list[torch.Tensor]:
        model, tokenizer = smollm2.load_model(str(model_folder))
        kept: dict[int, torch.Tensor] = {}
        for place, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda p, at=place: kept.update({at: p.grad.clone()}))
        train(model, tokenizer)
        return [kept[place] for place in sorted(kept)]

    _, args = grpo.parse_args([*arguments, "--out", str(tmp_path)])
    run = RunFolder(args.out, tokenizer=None)
    ours = gradients(lambda model, tokenizer: grpo.train(model, tokenizer, TASKS[TASK], args, run))
    by_hand = gradients(
        lambda model, tokenizer: grpo_by_hand.train(model, tokenizer, grpo_by_hand.parse_args(arguments))
    )
    (step,) = lines(tmp_path / "metrics.jsonl")
    assert 0 < step["mixed_groups"] < 6, "no group is equal, or all are, so this shows nothing"
    assert len(ours) == len(by_hand) > 10
    for left, right in zip(ours, by_hand, strict=True):
        assert torch.allclose(left, right, rtol=1e-3, atol=1e-5 * float(left.abs().max()))


def test_the_loop_by_hand_updates_the_engine_at_each_step(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo_by_hand.main(small(model_folder, "--max-new-tokens", "8")) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[-1] for line in steps] == ["1", "2", "3"]
    staleness = [int(re.search(r"staleness (\d+)", line)[1]) for line in steps]
    assert staleness[0] == 0
    assert max(staleness) <= 1


def test_the_loop_by_hand_refuses_a_group_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        grpo_by_hand.main(["--group-size", "1"])
    assert exit_info.value.code == 2
    assert "--group-size: must be at least 2, got 1" in capsys.readouterr().err


def test_ppo_publishes_once_a_batch_however_many_steps_it_takes(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--max-new-tokens", "8", "--epochs", "2", "--minibatch", "8", "--out", str(out))
    assert ppo.main(small(model_folder, *arguments)) == 0
    steps = lines(out / "metrics.jsonl")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert [step["staleness"] <= 1 for step in steps] == [True] * 3
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference is the model as it was at the start"
    assert steps[1]["kl"] > 1e-4
    assert all(step["value_loss"] > 0 for step in steps)
    assert [update["version"] for update in lines(out / "updates.jsonl")] == [1, 2, 3]
    assert len(lines(out / "rollouts.jsonl")) == 3 * 4 * 4
    assert (out / "report.html").exists()


def test_lora_trains_adapters_alone_and_the_engine_runs_on_the_sum(model_folder: Path, tmp_path: Path) -> None:
    base, tokenizer = smollm2.load_model(str(model_folder))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    args = lora.parse_args(small(model_folder, "--max-new-tokens", "8", "--out", str(tmp_path / "run")))
    model = lora.train(base, tokenizer, args, RunFolder(args.out, tokenizer=tokenizer))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert any(layer.lora_B["default"].weight.abs().max() > 0 for layer in layers), "nothing was trained"
    after = {name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    steps = lines(args.out / "metrics.jsonl")
    assert [step["version"] for step in steps] == [1, 2, 3]
    rollouts = lines(args.out / "rollouts.jsonl")
    assert {span[1] for rollout in rollouts if rollout["step"] == 3 for span in rollout["version_spans"]} <= {1, 2}


def test_trainers_callbacks_answer_held_out_questions_with_each_steps_weights(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--batch-size", "4", "--held-out", "4", "--out", str(tmp_path))
    assert trainer_callback.main(small(model_folder, *arguments)) == 0
    printed = capsys.readouterr().out.splitlines()
    steps = [line for line in printed if line.startswith("step ")]
    assert [re.search(r"version (\d+)", line)[1] for line in steps] == ["2", "3", "4"]
    assert re.fullmatch(r"at the end: held out [\d.]+, 4 answers by version 4", printed[-1])

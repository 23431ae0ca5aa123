"""examples/trl_grpo.py and examples/trl_async_grpo.py on a tiny random model."""

from pathlib import Path

import pytest
import torch
import trl_async_grpo
import trl_grpo
from digit_model import TASK, save_digit_model
from trl_on_cpu import register_plain_tree_attention


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_digit_model(tmp_path_factory.mktemp("tiny"))


def small(model: Path, out: Path) -> list[str]:
    return [
        *("--model", str(model), "--out", str(out), "--steps", "3", "--prompts-per-step", "4", "--group-size", "8"),
        *("--max-new-tokens", "16", "--lr", "1e-3", "--task", TASK, "--seed", "2"),
    ]


def test_grpo_example_trains_on_policy(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = trl_grpo.main([*small(model_folder, tmp_path), "--temperature", "0.7"])
    assert [step["engine/version"] for step in steps] == [1, 2, 3]
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
    assert steps[0]["reward_std"] > 0, "nothing is trained, so this shows nothing"
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(printed) == 3


def test_async_grpo_example_trains_with_what_the_engine_made_meanwhile(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    args = trl_async_grpo.parse_args([*small(model_folder, tmp_path), "--cpu"])
    with trl_async_grpo.engine_for(args) as engine:
        trainer = trl_async_grpo.trainer_over(engine, args)
        register_plain_tree_attention()
        trainer.train()
        assert engine.version == 4
    trl_async_grpo.print_steps(trainer)
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert "staleness at most 0  ratio 1.000" in steps[0]

"""That it learns: benchmarks/learning.py in its smallest form, and the demo for thirty steps."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import grpo
import learning
import learning_run
import learning_task
import pytest
import torch
from learning_run import Curve, Setting, learn

from rollout import FinishReason, Rollout, VersionSpan
from rollsync_cli.report import write_report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve_of(setting: Setting, tmp_path: Path) -> Curve:
    """Four batches of two prompts."""
    small = replace(setting, prompts_per_batch=2, group_size=8, num_minibatches=2)
    return learn(small, 0, 4, tmp_path / "run", num_workers=0)


@pytest.mark.parametrize(("algorithm", "num_workers"), [("grpo", 1), ("ppo", 0)])
def test_a_run_leaves_its_curves_and_a_run_folder(
    local_ray: str, tmp_path: Path, algorithm: str, num_workers: int
) -> None:
    out = tmp_path / "out"
    size = ["--seeds", "1", "--budget", "512", "--workers", str(num_workers)]
    learning.main(["--algorithm", algorithm, "--modes", "live", *size, "--out", str(out)])
    ((name, row),) = json.loads((out / "curves.json").read_text())["rows"].items()
    assert name == f"{algorithm}, live"
    (run,) = row["runs"]
    assert run["samples"] == [0, 512]
    assert run["versions"] == [1]
    assert len(run["held_out"]) == len(run["seconds"]) == 2
    assert all(0 <= value <= 1 for value in run["held_out"] + run["trained"])
    folder = out / f"{algorithm}-live-0"
    assert len(lines(folder / "rollouts.jsonl")) == 64
    assert [update["version"] for update in lines(folder / "updates.jsonl")] == [1]
    assert write_report(folder).exists()
    picture = (out / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert (folder / "curves.png").read_bytes() == picture


def test_an_ablation_is_drawn_beside_the_row_that_has_the_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = replace(learning.FRESH, prompts_per_batch=2, num_minibatches=2)
    rows = {"a quarter fails, left out": replace(fresh, failing=0.25), "trained on": replace(fresh, trains_failed=True)}
    monkeypatch.setattr(learning, "ABLATIONS", rows)
    learning.main(["--ablate", "--seeds", "1", "--budget", "16", "--out", str(tmp_path / "out")])
    assert set(json.loads((tmp_path / "out" / "curves.json").read_text())["rows"]) == set(rows)
    curves = {name: [Curve(seed=0, batch_size=16, held_out=[0.1, 0.2], seconds=[0.0, 1.0])] for name in rows}
    assert [list(panel) for panel in learning.panels(curves, rows).values()] == [list(rows)]


@pytest.mark.parametrize(
    "argv", [["--seeds", "0"], ["--budget", "-5"], ["--workers", "-1"], ["--out", "."]], ids=lambda argv: argv[0]
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        learning.main(argv)
    assert f"argument {argv[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("mode", learning.MODES)
def test_the_modes_differ_in_what_meets_an_update_in_flight(mode: str, tmp_path: Path) -> None:
    # one request after the other: generation takes much longer than training, so that the updates come amid it
    curve = curve_of(Setting(algorithm="grpo", max_requests=1, **learning.MODES[mode]), tmp_path)
    assert curve.versions == [1, 2, 3, 4]
    assert curve.seconds == sorted(curve.seconds)
    assert curve.staleness[0] == 0.0
    if mode == "live":
        assert max(curve.spanning) > 0.0
        assert max(curve.logprob_gap) > 1e-4
    else:
        assert curve.spanning == [0.0] * 4
    if mode == "drained":
        assert curve.staleness == [0.0, 1.0, 1.0, 1.0]
    if mode == "synchronous":
        assert curve.staleness == [0.0] * 4
        assert max(curve.logprob_gap) < 1e-4


def test_a_batch_that_lags_is_as_many_versions_old_to_the_token(tmp_path: Path) -> None:
    curve = curve_of(replace(learning.FRESH, lag=2), tmp_path)
    assert curve.staleness == [0.0, 1.0, 2.0, 2.0]
    assert curve.spanning == [0.0] * 4


def test_with_one_prompt_that_comes_again_stale_prefixes_part_engine_and_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_run, "TRAINING", [(1, 2, 3), (4, 5, 6)])
    fresh = replace(learning.FRESH, learning_rate=1e-2)
    clean, stale = (
        curve_of(setting, tmp_path / name)
        for name, setting in {"clean": fresh, "stale": replace(fresh, stale_prefixes=True)}.items()
    )
    assert max(clean.logprob_gap) < 1e-4
    assert stale.logprob_gap[0] < 1e-4
    assert min(stale.logprob_gap[1:]) > 1e-3


def test_a_label_names_the_weights_that_sampled_its_token_and_an_error_in_it_names_others() -> None:
    setting = Setting(algorithm="grpo", max_staleness=1, behaviour=learning_run.Behaviour.LABELLED)
    learner = learning_run.Learner(setting, seed=0, num_batches=1)
    weights = [learner.copy()]
    with torch.no_grad():
        learner.model.lm_head.weight.mul_(3.0)
    weights.append(learner.copy())
    batch = learning_run.pad_rollouts([[a_rollout("a", 0), a_rollout("b", 1)]], pad_id=learning_task.END)
    (old, _), (new, _) = (learner.forward(batch, weights=state) for state in weights)
    mask = batch.loss_mask
    assert not torch.allclose(old[mask], new[mask])

    def behaviour(label_error: int) -> torch.Tensor:
        learner.setting = replace(setting, label_error=label_error)
        return learner.behaviour_logprobs(batch, new, weights)

    right, too_old, too_new = behaviour(0), behaviour(-1), behaviour(1)
    assert torch.equal(right[0][mask[0]], old[0][mask[0]])
    assert torch.equal(right[1][mask[1]], new[1][mask[1]])
    assert torch.equal(too_old[mask], old[mask])
    assert torch.equal(too_new[mask], new[mask])


def a_rollout(name: str, version: int) -> Rollout:
    return Rollout(
        rollout_id=name,
        prompt_ids=learning_task.prompt_ids([3, 1, 2]),
        token_ids=[1, 2, 3, learning_task.END],
        logprobs=[-1.0] * 4,
        loss_mask=[1] * 4,
        version_spans=[VersionSpan(0, version)],
        prefill_version=version,
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )


def test_failed_samples_are_left_out_unless_they_are_to_be_trained_on() -> None:
    failing = replace(learning.FRESH, failing=1.0)
    cut = learning_run.fallible(a_rollout("a", 0), failing)
    trained = learning_run.fallible(a_rollout("b", 0), replace(failing, trains_failed=True))
    assert learning_run.fallible(a_rollout("c", 0), learning.FRESH) == a_rollout("c", 0)
    batch = learning_run.pad_rollouts([[cut, trained]], pad_id=learning_task.END)
    assert batch.dropped_ids == ("a",)
    assert batch.loss_mask.sum().item() == 1


def test_the_reward_is_the_share_of_right_positions() -> None:
    prompt = learning_task.prompt_ids([3, 1, 2])
    end = learning_task.END
    assert learning_task.reward(prompt, [1, 2, 3, end]) == 1.0
    assert learning_task.reward(prompt, [1, 2, 3, 3]) == 0.75
    assert learning_task.reward(prompt, [1, end]) == 0.25
    assert learning_task.reward(prompt, []) == 0.0
    rollouts = [
        replace(a_rollout("a", 0), token_ids=ids, logprobs=[-1.0] * len(ids), loss_mask=[1] * len(ids))
        for ids in ([1, end], [1, 2, 3, 3])
    ]
    batch = learning_run.pad_rollouts([rollouts], pad_id=end)
    assert learning_task.position_rewards(batch.input_ids, batch.loss_mask)[:, 4:].tolist() == [
        [0.25, 0.0, 0.0, 0.0],
        [0.25, 0.25, 0.25, 0.0],
    ]
    assert not set(learning_task.HELD_OUT) & set(learning_task.TRAINING)


@pytest.mark.slow
def test_the_demo_learns_in_thirty_steps(tmp_path: Path) -> None:
    assert grpo.main(["--steps", "30", "--out", str(tmp_path / "run")]) == 0
    rewards = [step["reward"] for step in lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(rewards) == 30
    assert fmean(rewards[-10:]) > fmean(rewards[:3])

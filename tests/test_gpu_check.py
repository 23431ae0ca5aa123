"""benchmarks/gpu_check.py runs where it can, says so where it cannot, and its checks can fail."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import random_prompts, tiny_llama

from rollout import GenerationEngine, Rollout, SamplingParams, VersionSpan

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"
SPEC = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
gpu_check = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_check"] = gpu_check
SPEC.loader.exec_module(gpu_check)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=SCRIPT.parent.parent,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        check=False,
    )


def test_all_that_a_cpu_allows_passes() -> None:
    done = run("--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("settings", "parity", "isolation", "spans", "fencing", "preempted"):
        assert f" {name} " in done.stdout
    assert "FAIL" not in done.stdout
    assert done.stdout.count("left out: needs a GPU") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert "no CUDA device" in done.stdout


def test_a_wrong_label_is_found() -> None:
    def rollout(tokens: list[int]) -> Rollout:
        spans = [VersionSpan(0, 1), VersionSpan(2, 2)]
        return Rollout(
            rollout_id="a",
            prompt_ids=[5],
            token_ids=tokens,
            logprobs=[0.0] * 3,
            loss_mask=[1] * 3,
            version_spans=spans,
            prefill_version=1,
            finish_reason=None,
        )

    assert gpu_check.labels([rollout([1, 1, 2])])[0]
    assert not gpu_check.labels([rollout([1, 2, 2])])[0]


def test_another_model_shows_in_the_comparison() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        params = SamplingParams(max_new_tokens=8, temperature=0, stop_token_ids=())
        (rollout,) = engine.generate(random_prompts([9]), params)
    assert max(gpu_check.compare(tiny_llama(), rollout)) < 1e-4
    assert min(gpu_check.compare(tiny_llama(seed=1), rollout)) > 0.5

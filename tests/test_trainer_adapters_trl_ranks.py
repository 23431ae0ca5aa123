"""GRPO on two ranks, one of which has the engine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("trl_ranks")
    script = Path(__file__).with_name("trl_ranks.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": f"{script.parent.parent}:{script.parent}",
        "HF_HUB_OFFLINE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_gets_the_completions_of_its_own_prompts(seen: list[dict[str, Any]]) -> None:
    for step in range(3):
        first, second = (rank["calls"][step] for rank in seen)
        assert first["versions"] == second["versions"] == [step + 1] * 4
        assert set(first["prompts"]) != set(second["prompts"])
    for step in seen[0]["steps"]:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert [step["engine/version"] for step in seen[0]["steps"]] == [1, 2, 3]


def test_batch_that_fails_raises_on_every_rank(seen: list[dict[str, Any]]) -> None:
    assert "none of 8 samples could be generated" in seen[0]["error"]
    assert seen[1]["error"] == f"the first rank failed, and with it all of them: AdapterError: {seen[0]['error']}"


def test_async_grpo_of_several_ranks_is_refused_and_does_not_hang(seen: list[dict[str, Any]]) -> None:
    assert "serves trainers of one process, this one has 2" in seen[0]["async"]

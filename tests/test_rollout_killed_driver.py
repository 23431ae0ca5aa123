"""The driver is killed at every kind of point, and goes on each time from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DEATHS = ["started:1", "handed_out:2", "trained:1", "acknowledged:2", "half_saved:1", "saved:2", "published:2"]
"""Each life is killed at the next of these. None of them alone comes to the end of the prompts."""


def live(folder: Path, where: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(TESTS / "killed_driver.py"), str(folder), where],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.slow
def test_a_driver_killed_at_any_point_goes_on_and_trains_every_prompt_once(tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#3594: what was in flight is in the state, and the state is saved together with the weights."""
    highest = 0
    for where in DEATHS:
        killed = live(tmp_path, where)
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        if (tmp_path / "versions.json").exists():
            version = json.loads((tmp_path / "versions.json").read_text())["highest_version"]
            assert version >= highest
            highest = version
    done = live(tmp_path, "never:1")
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert ended["trained"] == Counter(f"p{n}" for n in range(30))
    assert ended["highest_version"] > highest

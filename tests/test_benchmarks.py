"""Each benchmark starts as its docstring says."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PARTS = {"sync_workers.py", "vllm_worker.py"}
"""Run by a benchmark, elsewhere."""


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.py") if path.name not in PARTS))
def test_it_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--help"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout

"""Each benchmark starts as its docstring says."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PARTS = {"learning_run.py", "learning_task.py", "models.py", "sync_workers.py", "vllm_worker.py"}
"""Used by a benchmark, or run by it elsewhere."""


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.py") if path.name not in PARTS))
def test_it_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--help"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.fixture(scope="module")
def fleet_main() -> Callable[[list[str]], None]:
    main: Callable[[list[str]], None] = runpy.run_path(str(BENCHMARKS / "fleet.py"))["main"]
    return main


def test_the_fleets_staleness_is_a_table_and_a_plot(
    fleet_main: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_main(["staleness", "--steps", "2", "--plot", str(tmp_path / "staleness.png")])
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["| max_staleness", "| 0", "| 1", "| 2", "| 4"]
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["overhead", "--tokens", "20", "--workers", "1", "2"], r"^\| 2 \| \d+ \| \d+ \| \d+ \|"),
        (["memory", "--rollouts", "10000"], r"^\| 1\d{4} \| \d+ \|"),
    ],
)
def test_the_fleets_other_tables_have_their_rows(
    fleet_main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], arguments: list[str], row: str
) -> None:
    fleet_main(arguments)
    assert re.search(row, capsys.readouterr().out, flags=re.MULTILINE)

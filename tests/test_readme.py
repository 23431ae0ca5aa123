"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda code: code.strip().splitlines()[-1].strip()[:40])
def test_a_snippet_runs_as_it_stands(snippet: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300, cwd=README.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "a snippet that shows nothing teaches nothing"


def test_the_twelve_lines_are_twelve() -> None:
    assert len([line for line in SNIPPETS[0].splitlines() if line.strip()]) == 12


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(
        re.findall(r"`((?:rollout|sync|trainer_adapters|examples|benchmarks|tests)/[\w./]*)`", README.read_text())
    )
    assert named
    assert [path for path in sorted(named) if not (README.parent / path).exists()] == []


@pytest.mark.parametrize("document", ["acceptance.md", "promises.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (README.parent / "docs" / document).read_text()))
    there = {
        name
        for path in (README.parent / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    }
    assert named
    assert sorted(named - there) == []

"""What the README and the documents say: their code runs as it stands, and what they name exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def snippets(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


def headings(document: Path) -> set[str]:
    """As the fragments of links name them."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


SNIPPETS = [
    pytest.param(code, id=f"{document.stem}-{number}")
    for document in DOCUMENTS
    for number, code in enumerate(snippets(document), start=1)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs_as_it_stands(snippet: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "a snippet that shows nothing teaches nothing"


def test_the_twelve_lines_are_twelve() -> None:
    assert len([line for line in snippets(README)[0].splitlines() if line.strip()]) == 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    folders = r"rollout|sync|trainer_adapters|rollsync_cli|examples|benchmarks|tests"
    named = set(re.findall(rf"`((?:{folders})/(?:[\w./]*(?:/|\.\w+))?)`", document.read_text()))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_within_the_repository_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text())
    dead = []
    for path, fragment in links:
        target = document.parent / path if path else document
        if not target.exists() or (fragment and fragment not in headings(target)):
            dead.append(f"{path}#{fragment}")
    assert dead == []


@pytest.mark.parametrize("document", ["acceptance.md", "promises.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / document).read_text()))
    there = {
        name
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    }
    assert named
    assert sorted(named - there) == []

"""Imports go one way: trainer_adapters -> sync -> rollout."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imported_packages(package: str) -> set[str]:
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("package", "above"), [("rollout", {"sync", "trainer_adapters"}), ("sync", {"trainer_adapters"})]
)
def test_package_imports_nothing_from_the_layers_above(package: str, above: set[str]) -> None:
    assert not imported_packages(package) & above

"""Installed versions against those that rollsync asks for."""

import platform
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from rollsync_cli.checks import Check, Status

DISTRIBUTION = "rollsync"
SOURCE_TREE = Path(__file__).resolve().parent.parent / "pyproject.toml"
FOR_WHAT = {
    "gpu": "faster attention on a GPU",
    "peft": "LoRA policies",
    "trl": "TRL's trainers",
    "demo": "the examples",
}
"""Extras by what they are for; others are for the project's own development."""


def check_versions() -> Iterator[Check]:
    """One check for Python, rollsync, and each package that it asks for or can use."""
    section = "versions"
    yield Check(section=section, name="python", status=Status.OK, detail=platform.python_version())
    yield Check(section=section, name=DISTRIBUTION, status=Status.OK, detail=own_version())
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        asked = _from_source_tree()
    seen: set[str] = set()
    for requirement in map(Requirement, asked):
        extra = next((name for name in FOR_WHAT if requirement.marker and name in str(requirement.marker)), None)
        is_wanted = requirement.marker is None or extra is not None
        if is_wanted and requirement.name not in seen:
            seen.add(requirement.name)
            yield check_version(requirement, extra, _installed(requirement.name))


def own_version() -> str:
    """Of rollsync, and whether it is not installed but run from its source tree."""
    installed = _installed(DISTRIBUTION)
    if installed is not None or not SOURCE_TREE.exists():
        return installed or "of an unknown version"
    return f"{tomllib.loads(SOURCE_TREE.read_text())['project']['version']} (not installed: run from its source tree)"


def check_version(requirement: Requirement, extra: str | None, installed: str | None) -> Check:
    """`extra`: the one that it comes with; None: it is needed."""
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    if installed is None:
        status = Status.FAIL if extra is None else Status.OFF
        detail = "not installed" + ("" if extra is None else f"; for {FOR_WHAT[extra]}")
        remedy = f"pip install '{wanted}'" if extra is None else f"pip install 'rollsync[{extra}]'"
        return Check(section="versions", name=name, status=status, detail=detail, remedy=remedy)
    if requirement.specifier.contains(installed, prereleases=True):
        return Check(section="versions", name=name, status=Status.OK, detail=installed)
    return Check(
        section="versions",
        name=name,
        status=Status.FAIL if extra is None else Status.OFF,
        detail=f"{installed}, tested with {requirement.specifier}",
        remedy=f"pip install '{wanted}'",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _from_source_tree() -> list[str]:
    if not SOURCE_TREE.exists():
        return []
    project = tomllib.loads(SOURCE_TREE.read_text())["project"]
    optional = project["optional-dependencies"]
    extras = [f'{line}; extra == "{extra}"' for extra, lines in optional.items() for line in lines]
    return [*project["dependencies"], *extras]

"""What `rollsync doctor` says of each thing that it looks at."""

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import typer


class Status(enum.StrEnum):
    """How a thing is."""

    OK = "ok"
    OFF = "off"
    """Not there, and everything else works without it."""
    FAIL = "FAIL"
    """Something that is needed cannot work."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line."""

    section: str
    name: str
    status: Status
    detail: str
    """The value, or why not."""
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.status is not Status.FAIL or self.remedy, f"{self.name}: a failure comes with its remedy"


_COLOURS = {Status.OK: typer.colors.GREEN, Status.OFF: typer.colors.YELLOW, Status.FAIL: typer.colors.RED}


def print_checks(checks: Iterable[Check], *, as_json: bool) -> bool:
    """Prints each as it comes, or all as one JSON object; whether none failed."""
    if as_json:
        all_checks = list(checks)
        ok = not any(check.status is Status.FAIL for check in all_checks)
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in all_checks]}, indent=2))
        return ok
    section, num_failed = "", 0
    for check in checks:
        if check.section != section:
            section = check.section
            typer.echo(f"{section}")
        typer.echo(f"  {typer.style(f'{check.status:<5}', fg=_COLOURS[check.status])} {check.name:<19} {check.detail}")
        if check.remedy is not None:
            typer.echo(f"{'':27} -> {check.remedy}")
        num_failed += check.status is Status.FAIL
    typer.echo("\neverything that is needed works" if not num_failed else f"\n{num_failed} failed; see FAIL above")
    return not num_failed

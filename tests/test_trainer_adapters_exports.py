"""What `trainer_adapters` offers, also by names whose packages may not be installed."""

import pytest

import trainer_adapters


@pytest.mark.parametrize("name", trainer_adapters.__all__)
def test_every_name_that_is_offered_is_there(name: str) -> None:
    assert getattr(trainer_adapters, name).__name__ == name


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EngineDPOTrainer'"):
        _ = trainer_adapters.EngineDPOTrainer

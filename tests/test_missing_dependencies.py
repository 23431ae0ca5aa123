"""What needs a package that is not installed says so, and how to get it."""

import importlib
import sys

import pytest

from rollout import MissingDependencyError, RolloutConfig, RolloutController, RolloutError
from rollout.simulate import SimulatedFleet
from trainer_adapters import engine_train_loop

OVER_RAY = (
    "rollout.worker",
    "rollout.workers.remote",
    "rollout.workers.incarnation",
    "rollout.workers.worker_requests",
    "rollout.fleet.pool",
)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in OVER_RAY:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("without_ray")
def test_a_fleet_of_ray_workers_names_ray_and_the_remedy() -> None:
    with pytest.raises(MissingDependencyError, match=r'not installed here: pip install "ray\[default\]"'):
        RolloutController("some/path", [[1, 2]], config=RolloutConfig(num_workers=2))


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("module", OVER_RAY)
def test_the_modules_over_ray_name_the_remedy_when_they_are_imported(module: str) -> None:
    with pytest.raises(RolloutError, match=r'pip install "ray\[default\]"') as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, ImportError), "whoever asks whether it can be imported is answered as ever"


@pytest.mark.usefixtures("without_ray")
def test_a_train_loop_without_ray_train_names_the_extra() -> None:
    with pytest.raises(MissingDependencyError, match=r'pip install "rollsync\[train\]"'):
        engine_train_loop(lambda fleet, config: None, lambda config: SimulatedFleet(1).controller([[1, 2]]))({})

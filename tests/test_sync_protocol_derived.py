"""What is computed from the weights changes with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakes import wait_until
from fakes_sync import FakeTarget, marked
from protocol_fleet import Fleet, fault, fleet_of

from rollout import EngineState
from sync.receiver import add_derived


class Doubled:
    """Twice the sum of the weights, kept beside them; a log of what was done when."""

    def __init__(self, target: FakeTarget) -> None:
        self.value = 0.0
        self.log: list[str] = []
        self.fail_in: str | None = None
        self.fails_once = False
        self._target = target

    def prepare(self, staged: Any) -> float:
        self.log.append(f"prepare at version {self._target.engine.version}")
        self._fail("prepare")
        assert staged["head.weight"].data_ptr() == staged["embed.weight"].data_ptr()
        return 2 * float(sum(tensor.sum() for tensor in staged.values()))

    def install(self, prepared: float) -> None:
        self.log.append(f"install at version {self._target.engine.version}")
        self._fail("install")
        self.value = prepared

    def _fail(self, step: str) -> None:
        if self.fail_in == step:
            if self.fails_once:
                self.fail_in = None
            raise RuntimeError(f"{step} failed")

    def is_right(self) -> bool:
        return self.value == 2 * sum(float(tensor.sum()) for tensor in self._target.engine.model.state_dict().values())


@contextmanager
def deriving() -> Iterator[tuple[Fleet, Doubled]]:
    with fleet_of() as fleet:
        derived = Doubled(fleet.targets[0])
        fleet.targets[0].call(add_derived, derived).result(0)
        yield fleet, derived


def test_derived_tensors_are_prepared_while_staging_and_installed_with_the_version() -> None:
    with deriving() as (fleet, derived):
        fleet.publish()
        assert derived.log == ["prepare at version 0", "install at version 0"]
        assert derived.is_right()
        fleet.publish()
        assert derived.is_right()


def test_derived_tensors_that_cannot_be_prepared_fail_their_target_before_its_pause() -> None:
    with deriving() as (fleet, derived):
        fleet.publish()
        derived.fail_in = "prepare"
        report = fleet.publish()
        assert report.failures == {"a": "prepare failed"}
        assert (fleet.targets[0].engine.version, fleet.targets[0].engine.state) == (1, EngineState.RUNNING)
        assert derived.is_right()
        fleet.check()
        derived.fail_in = None
        fleet.check_that_the_next_publish_works()
        assert derived.is_right()


@pytest.mark.parametrize("step", ["prepare", "install"])
def test_derived_tensors_that_fail_once_cost_nothing(step: str) -> None:
    with deriving() as (fleet, derived):
        fleet.publish()
        derived.fail_in, derived.fails_once = step, True
        assert fleet.publish().fenced == ()
        assert derived.is_right()
        fleet.check()


def test_derived_tensors_that_cannot_be_installed_fence_their_target() -> None:
    with deriving() as (fleet, derived):
        fleet.publish()
        derived.fail_in = "install"
        assert fleet.publish().failures == {"a": "install failed"}
        assert (fleet.targets[0].engine.version, fleet.targets[0].engine.state) == (1, EngineState.FENCED)
        derived.fail_in = None
        fleet.check_that_the_next_publish_works()
        assert derived.is_right()


@pytest.mark.parametrize("point", ["begin", "receive+2", "commit"])
def test_derived_tensors_added_in_the_middle_of_a_publish_are_right_after_it(point: str) -> None:
    with fleet_of() as fleet:
        target = fleet.targets[0]
        fault(target, point, "stall")
        delivering = fleet.weight_sync.publish(marked(1.0), wait=False)
        wait_until(lambda: target.is_stalled)
        derived = Doubled(target)
        add_derived(target.engine, derived)
        target.resume()
        assert delivering.result(10).fenced == ()
        assert derived.is_right()
        fleet.published[1] = fleet.next_mark()
        fleet.check_that_the_next_publish_works()
        assert derived.is_right()

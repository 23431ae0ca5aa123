"""A publish that is overtaken, cancelled, or under way when its sender is closed."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes import wait_until
from fakes_sync import BUCKET_BYTES, check_fleet, marked
from protocol_fleet import CALLS, LATE_S, Fleet, InThread, fault, fleet_of, items
from torch import Tensor

from sync import ManifestError, SyncConfig, SyncTimeoutError, TensorSpec


@pytest.mark.parametrize("point", CALLS)
def test_a_newer_publish_overtakes_at_every_point_before_the_commit(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        slow, healthy = fleet.targets
        fault(slow, point, "stall")
        overtaken = fleet.weight_sync.publish(marked(2.0), wait=False)
        wait_until(lambda: healthy.engine.version == 2)
        newer = fleet.weight_sync.publish(marked(3.0), wait=False)
        report = overtaken.result(10)
        assert (report.version, report.overtaken, report.fenced) == (2, ("a",), ())
        wait_until(lambda: healthy.engine.version == 3)
        slow.resume()
        assert newer.result(10).fenced == ()
        assert [target.engine.version for target in fleet.targets] == [3, 3]
        fleet.published = {1: 1.0, 2: 2.0, 3: 3.0}
        fleet._mark = 3.0
        fleet.check()
        fleet.check_that_the_next_publish_works()


def test_a_publish_that_arrives_while_another_stages_overtakes_it_too() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        entered.set()
        assert leave.wait(30)
        yield from items(2.0)

    with fleet_of() as fleet:
        fleet.publish()
        first = InThread(lambda: fleet.weight_sync.publish(slow(), timeout_s=30))
        assert entered.wait(30)
        second = InThread(lambda: fleet.weight_sync.publish(marked(3.0), timeout_s=30, wait=False))
        wait_until(second.is_waiting)
        leave.set()
        assert first.result().overtaken == ("a", "b")
        assert second.result().result(10).fenced == ()
        assert {target.engine.version for target in fleet.targets} == {3}
        fleet.check()


def test_a_future_that_is_cancelled_ends_its_publish_and_no_other() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        fault(fleet.targets[0], "commit", "stall")
        delivering = fleet.weight_sync.publish(marked(2.0), wait=False)
        wait_until(lambda: fleet.targets[1].engine.version == 2)
        assert not delivering.cancel(), "its bytes are on their way"
        fleet.targets[0].resume()
        assert delivering.result(10).fenced == ()
        fleet.published[2] = fleet.next_mark()
        fleet.check_that_the_next_publish_works()


def test_closing_waits_for_a_publish_and_ends_what_a_target_holds_up_within_its_limit() -> None:
    fleet = Fleet()
    fleet.publish()
    fault(fleet.targets[0], "commit", "stall")
    delivering = fleet.weight_sync.publish(marked(2.0), wait=False, timeout_s=LATE_S)
    fleet.weight_sync.close(timeout_s=10)
    assert delivering.result(0).fenced == ("a",)
    assert fleet.transport.is_closed
    fleet.targets[0].resume()
    assert fleet.targets[0].engine.version == 1
    check_fleet(fleet.targets, {1: 1.0, 2: 2.0})


class Failing:
    """A source that fails in its opening, since no engine holds it, or half-way; `when_asked` is called first."""

    def __init__(self, where: str, when_asked: Callable[[], None]) -> None:
        self._where = where
        self._when_asked = when_asked

    def specs(self) -> dict[str, TensorSpec]:
        self._when_asked()
        ghost = {"ghost": TensorSpec(shape=(1,), dtype=torch.float32)} if self._where == "opening" else {}
        return ghost | {name: TensorSpec.of(tensor) for name, tensor in items(9.0)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from list(items(9.0))[:2]
        raise KeyError("the gather failed")


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("where", ["waiting", "opening", "staging"])
def test_a_version_that_was_overtaken_by_one_that_fails_reaches_its_targets_after_all(where: str, reuse: bool) -> None:
    patient = SyncConfig(bucket_bytes=BUCKET_BYTES, open_timeout_s=10.0)
    with fleet_of(reuse=reuse, config=patient) as fleet:
        fleet.publish()
        slow, healthy = fleet.targets
        fault(slow, "commit", "stall")
        overtaken = fleet.weight_sync.publish(marked(fleet.next_mark()), wait=False)
        fleet.published[2] = 2.0
        wait_until(lambda: healthy.engine.version == 2)
        if where == "waiting":
            with pytest.raises(SyncTimeoutError):
                fleet.weight_sync.publish(marked(9.0), timeout_s=1e-9)
            assert overtaken.result(30).overtaken == ("a",)
            slow.resume()
        else:
            with pytest.raises(ManifestError if where == "opening" else KeyError):
                fleet.weight_sync.publish(Failing(where, slow.resume))
        assert overtaken.result(30).overtaken == ("a",)
        wait_until(lambda: slow.engine.version == 2)
        fleet.check()
        fleet.check_that_the_next_publish_works()

"""A publish in which one target fails: at every state of the protocol, by every kind of fault."""

from collections.abc import Callable
from typing import Any

import pytest
from fakes import wait_until
from fakes_sync import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    corrupt,
    corrupt_duplicate,
    drop,
    duplicate,
    marked,
    marks,
    pause_timed_out,
    reorder,
    swap,
)
from protocol_fleet import CALLS, IN_UPDATE, LATE_S, fault, fleet_of

from rollout import EngineState
from sync import SyncConfig, SyncError


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("point", [*CALLS, *IN_UPDATE, "after"])
def test_a_target_that_dies_at_any_point_is_named_and_the_others_go_on(point: str, reuse: bool) -> None:
    """NeMo/RL#3591, trl#6796: a dead rank blocks the trainer for ever."""
    with fleet_of(reuse=reuse) as fleet:
        fleet.publish()
        dying, healthy = fleet.targets
        fault(dying, point, "kill")
        report = fleet.publish()
        assert report.fenced == ("a",)
        assert "dead" in report.failures["a"] or "died" in report.failures["a"]
        assert (healthy.engine.version, marks(healthy.engine.model)) == (2, {2.0})
        fleet.check()
        dying.revive()
        wait_until(lambda: dying.engine.version == 2)
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("point", CALLS)
def test_a_target_that_answers_only_after_its_limit_is_named_and_its_late_answer_breaks_nothing(point: str) -> None:
    """NeMo/RL#3591, trl#6796: a dead rank blocks the trainer for ever."""
    with fleet_of() as fleet:
        fleet.publish()
        late, healthy = fleet.targets
        fault(late, point, "stall")
        report = fleet.publish(timeout_s=LATE_S)
        assert report.fenced == ("a",)
        assert f"exceeded {LATE_S:g} s" in report.failures["a"]
        assert healthy.engine.version == 2
        assert late.engine.version == 1
        late.resume()
        assert late.engine.version == 1, "a commit that comes after its limit touches nothing"
        fleet.check()
        fleet.check_that_the_next_publish_works()


def test_a_target_that_has_never_answered_is_left_out_and_gets_the_next_version() -> None:
    with fleet_of() as fleet:
        fleet.targets[0].stall()
        report = fleet.publish()
        assert report.fenced == ("a",)
        assert "did not say in time" in report.failures["a"]
        assert "begin" not in fleet.targets[0].calls
        fleet.recover()
        fleet.check_that_the_next_publish_works()


def test_a_stopped_target_does_not_use_up_the_time_of_the_others() -> None:
    patient = SyncConfig(bucket_bytes=BUCKET_BYTES, open_timeout_s=10.0)
    with fleet_of(config=patient) as fleet:
        fleet.publish()
        fleet.targets[0].stall()
        assert fleet.publish(timeout_s=LATE_S).fenced == ("a",)
        assert fleet.targets[1].engine.version == 2


@pytest.mark.parametrize("point", ["hello", "begin", *[f"receive+{index}" for index in range(NUM_BUCKETS)]])
def test_a_call_that_fails_before_the_commit_costs_its_target_this_version_only(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        failing, healthy = fleet.targets
        fault(failing, point, RuntimeError("out of memory"))
        report = fleet.publish()
        assert report.fenced == ("a",)
        assert "out of memory" in report.failures["a"]
        assert (failing.engine.version, failing.engine.state) == (1, EngineState.RUNNING)
        assert healthy.engine.version == 2
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("point", ["commit", *IN_UPDATE])
def test_a_commit_that_breaks_off_is_rolled_forward_from_the_staging_in_the_same_publish(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        fault(fleet.targets[0], point, RuntimeError("the device failed"))
        report = fleet.publish()
        assert (report.fenced, report.failures) == ((), {})
        assert [target.engine.version for target in fleet.targets] == [2, 2]
        assert fleet.targets[0].calls.count("commit") == 3
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("point", ["copy+0", "copy+3", "leave"])
def test_a_commit_that_breaks_off_twice_fences_its_target_until_a_publish_succeeds(point: str, again: bool) -> None:
    """sglang-omni#784, dynamo#9131: a `finally: resume` serves half-updated weights."""
    with fleet_of() as fleet:
        fleet.publish()
        broken, healthy = fleet.targets
        fault(broken, point, RuntimeError("the device failed"))
        fault(broken, "copy" if point != "copy+0" else "pause", RuntimeError("the device failed again"))
        fault(broken, "leave", RuntimeError("the device failed once more"))
        report = fleet.publish()
        assert report.fenced == ("a",)
        assert (broken.engine.version, broken.engine.state) == (1, EngineState.FENCED)
        assert healthy.engine.version == 2
        fleet.check()
        broken.clear_faults()
        if again:
            repaired = fleet.weight_sync.publish(marked(2.0), version=2)
            assert (repaired.version, repaired.fenced) == (2, ())
            assert (broken.engine.version, broken.engine.state) == (2, EngineState.RUNNING)
            assert healthy.calls.count("commit") == 2, "who has it already is left alone"
            fleet.check()
        fleet.check_that_the_next_publish_works()


def test_a_fence_holds_through_a_publish_that_does_not_reach_the_commit() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        broken = fleet.targets[0]
        fault(broken, "copy+2", RuntimeError("the device failed"))
        fault(broken, "leave", RuntimeError("the device failed again"))
        fleet.publish()
        fleet.transport.edits["a"] = corrupt(0)
        assert fleet.publish().fenced == ("a",)
        assert (broken.engine.version, broken.engine.state) == (1, EngineState.FENCED)
        fleet.check_that_the_next_publish_works()


def test_an_update_that_misses_its_own_limit_is_named_and_not_tried_again_beside_it() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        fault(fleet.targets[0], "pause", pause_timed_out())
        report = fleet.publish()
        assert report.failures == {"a": "the pause was not entered within 0.1 s"}
        assert fleet.targets[0].calls.count("commit") == 2
        assert fleet.targets[0].engine.version == 1
        fleet.check()
        fleet.check_that_the_next_publish_works()


def test_the_update_limit_is_the_smaller_of_its_own_and_what_is_left_of_the_publish() -> None:
    given: list[float] = []
    with fleet_of(num_targets=1, config=SyncConfig(bucket_bytes=BUCKET_BYTES, update_timeout_s=5.0)) as fleet:
        engine = fleet.targets[0].engine
        update = engine.update

        def noting(version: int, timeout_s: float) -> Any:
            given.append(timeout_s)
            return update(version, timeout_s)

        engine.update = noting
        fleet.publish()
        fleet.publish(timeout_s=2.0)
    assert given[0] == 5.0
    assert given[1] < 2.0


# ------------------------------------------------------------------------------------------- what happens on the way


@pytest.mark.parametrize("index", range(NUM_BUCKETS))
@pytest.mark.parametrize("edit", [corrupt, drop, corrupt_duplicate, swap])
def test_bytes_that_do_not_arrive_as_they_were_sent_are_never_committed(edit: Callable[[int], Any], index: int) -> None:
    """tokenspeed#672: a version is published before the last chunk was in."""
    with fleet_of() as fleet:
        fleet.publish()
        fleet.transport.edits["a"] = edit(index)
        report = fleet.publish()
        assert report.fenced == ("a",)
        assert "again" in report.failures["a"]
        assert (fleet.targets[0].engine.version, fleet.targets[0].engine.state) == (1, EngineState.RUNNING)
        assert fleet.targets[1].engine.version == 2
        fleet.check()
        assert fleet.weight_sync.publish(marked(2.0), version=2).fenced == ()
        assert fleet.targets[0].engine.version == 2
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("index", range(NUM_BUCKETS))
def test_a_bucket_that_comes_twice_is_harmless(index: int) -> None:
    with fleet_of() as fleet:
        fleet.transport.edits["a"] = duplicate(index)
        assert fleet.publish().fenced == ()
        fleet.check()


def test_buckets_may_come_in_any_order() -> None:
    with fleet_of() as fleet:
        fleet.transport.edits["a"] = reorder
        assert fleet.publish().fenced == ()
        fleet.check()


@pytest.mark.parametrize("then", ["again", "next"])
def test_a_transport_that_raises_costs_a_publish_not_the_sync(then: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        fleet.transport.fail_next_send = OSError("no space left")
        with pytest.raises(SyncError, match="no space left"):
            fleet.publish()
        assert [target.engine.version for target in fleet.targets] == [1, 1]
        if then == "again":
            assert fleet.weight_sync.publish(marked(2.0), version=2).fenced == ()
            fleet.check()
        fleet.check_that_the_next_publish_works()

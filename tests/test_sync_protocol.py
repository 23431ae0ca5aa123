"""The protocol of a publish, state by state and fault by fault, on targets and a transport in memory.

After every fault the same four things hold: no engine serves mixed weights, versions are right, the next publish works, and
every wait has ended.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import wait_until
from fakes_sync import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    FakeTarget,
    Memory,
    check_fleet,
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
from torch import Tensor

from rollout import EngineState
from sync import ManifestError, SyncConfig, SyncError, SyncReport, WeightSync
from sync.errors import SenderReplacedError
from sync.receiver import add_derived, hello
from sync.ticket import Claim

CONFIG = SyncConfig(bucket_bytes=BUCKET_BYTES, open_timeout_s=0.05)
LATE_S = 0.5
"""A publish's limit where a target shall miss it."""

CALLS = ["hello", "begin", *[f"receive+{index}" for index in range(NUM_BUCKETS)], "commit"]
"""What a target is called for in one publish, in order; `receive+2` is the third bucket."""
IN_UPDATE = ["pause", *[f"copy+{index}" for index in range(4)], "leave"]
"""The moments of an update: before the pause, before each copy, after the last."""


def at(point: str) -> tuple[str, int]:
    name, _, skip = point.partition("+")
    return name, int(skip or 0)


def fault(target: FakeTarget, point: str, what: Any) -> None:
    name, skip = at(point)
    target.fault_at(name, what, skip)


class Fleet:
    """Two targets behind one sender, and what was published."""

    def __init__(self, *, num_targets: int = 2, reuse: bool = False, config: SyncConfig = CONFIG) -> None:
        self.targets = [FakeTarget(name) for name in "abc"[:num_targets]]
        self.transport = Memory(reuse=reuse)
        self.weight_sync = WeightSync(self.targets, self.transport, config)
        self.published: dict[int, float] = {}
        self._mark = 0.0

    def next_mark(self) -> float:
        self._mark += 1
        return self._mark

    def publish(self, **limits: Any) -> SyncReport:
        mark = self.next_mark()
        report = self.weight_sync.publish(marked(mark), **limits)
        self.published[report.version] = mark
        return report

    def check(self) -> None:
        check_fleet(self.targets, self.published)

    def recover(self) -> None:
        """What is late comes now; who is dead comes back, and is brought up before the next publish."""
        for target in self.targets:
            target.resume()
            if target.is_dead:
                target.revive()

    def check_that_the_next_publish_works(self) -> None:
        report = self.publish()
        assert (report.fenced, report.overtaken) == ((), ())
        assert {target.engine.version for target in self.targets} == {report.version} == {max(self.published)}
        assert {target.engine.state for target in self.targets} == {EngineState.RUNNING}
        self.check()


@contextmanager
def fleet_of(num_targets: int = 2, **settings: Any) -> Iterator[Fleet]:
    threads = set(threading.enumerate())
    fleet = Fleet(num_targets=num_targets, **settings)
    try:
        yield fleet
    finally:
        fleet.recover()
        fleet.weight_sync.close(timeout_s=30)
    assert fleet.transport.is_closed
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread not in threads])


# -------------------------------------------------------------------------------------------- one target, every state


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
        assert "exceeded 0.5 s" in report.failures["a"]
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


# ------------------------------------------------------------------------------------------------ overtaking, cancelling


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
        yield from _items(2.0)

    with fleet_of() as fleet:
        fleet.publish()
        first = _Thread(lambda: fleet.weight_sync.publish(slow(), timeout_s=30))
        assert entered.wait(30)
        second = _Thread(lambda: fleet.weight_sync.publish(marked(3.0), timeout_s=30, wait=False))
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


# -------------------------------------------------------------------------------------------------- failing at the start


def test_targets_that_a_report_could_not_tell_apart_are_refused() -> None:
    with pytest.raises(SyncError, match="two targets are called a"):
        WeightSync([FakeTarget("a"), FakeTarget("b"), FakeTarget("a")], Memory(), CONFIG)


def test_a_target_that_does_not_say_what_it_holds_is_left_out_of_three() -> None:
    with fleet_of(num_targets=3) as fleet:
        fleet.publish()
        fleet.targets[1].fault_at("hello", RuntimeError("no device"))
        report = fleet.publish()
        assert report.failures == {"b": "no device"}
        assert [target.engine.version for target in fleet.targets] == [2, 1, 2]
        assert fleet.targets[1].calls.count("begin") == 1
        fleet.check_that_the_next_publish_works()


def test_with_all_targets_dead_the_publish_fails_at_once_with_all_names() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        for target in fleet.targets:
            target.kill()
        with pytest.raises(SyncError, match=r"no engine answered: a: .*dead; b: .*dead"):
            fleet.publish()
        fleet.recover()
        wait_until(lambda: [target.engine.version for target in fleet.targets] == [1, 1])
        fleet.check()
        fleet._mark = 1.0
        fleet.check_that_the_next_publish_works()


def test_versions_grow_although_every_engine_comes_back_empty() -> None:
    with fleet_of() as fleet:
        fleet.publish(version=5)
        for target in fleet.targets:
            target.kill()
            target.forget_who_joins()
            target.revive()
        assert fleet.publish().version == 6
        fleet.check()


@pytest.mark.parametrize("point", ["pause", "copy+1", "leave", "after"])
def test_a_version_that_a_dying_target_may_have_served_is_never_used_for_other_bytes(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        for target in fleet.targets:
            target.forget_who_joins()
            fault(target, point, "kill")
        with pytest.raises(SyncError, match="no engine took version 2"):
            fleet.publish()
        fleet.recover()
        assert fleet.publish().version == 3
        fleet.check()


@pytest.mark.parametrize("point", ["begin", "receive+1", "commit", "copy+1"])
def test_with_all_targets_dying_on_the_way_the_publish_fails_with_all_names(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        for target in fleet.targets:
            fault(target, point, "kill")
        with pytest.raises(SyncError, match=r"no engine took version 2: a: .*(dead|died).*; b: "):
            fleet.publish()
        fleet.published[2] = 2.0
        fleet.recover()
        wait_until(lambda: [target.engine.version for target in fleet.targets] == [2, 2])
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("kind", ["dict", "iterable"])
def test_a_mismatch_with_one_of_two_kinds_of_engine_changes_neither(kind: str) -> None:
    odd = marked(0.0)
    odd.extra = torch.nn.Parameter(torch.zeros(2))
    targets = [FakeTarget("a"), FakeTarget("b", odd)]
    with WeightSync(targets, Memory(), CONFIG) as weight_sync:
        for _ in range(2):
            offered = marked(1.0).state_dict()
            with pytest.raises(ManifestError, match=r"missing: extra \[2\]"):
                weight_sync.publish(offered if kind == "dict" else iter(offered.items()))
        assert [target.engine.version for target in targets] == [0, 0]
        assert not {"begin", "commit"} & {*targets[0].calls, *targets[1].calls}
        check_fleet(targets, {})


def test_two_kinds_of_engine_each_get_the_version_in_their_own_type_and_recover_alone() -> None:
    targets = [FakeTarget("a"), FakeTarget("b", marked(0.0, torch.bfloat16))]
    with WeightSync(targets, Memory(), CONFIG) as weight_sync:
        weight_sync.publish(marked(1.0))
        targets[1].fault_at("receive", "kill", skip=1)
        assert weight_sync.publish(marked(2.0)).fenced == ("b",)
        targets[1].revive()
        wait_until(lambda: targets[1].engine.version == 2)
        assert weight_sync.publish(marked(3.0)).fenced == ()
        check_fleet(targets, {1: 1.0, 2: 2.0, 3: 3.0})
    assert {tensor.dtype for tensor in targets[1].engine.model.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["module", "iterable"])
def test_the_very_bytes_of_the_version_before_are_published_with_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def offer(mark: float) -> Any:
        return marked(mark) if kind == "module" else iter(_items(mark))

    with fleet_of() as fleet, caplog.at_level(logging.WARNING):
        fleet.weight_sync.publish(offer(1.0))
        fleet.weight_sync.publish(offer(2.0))
        fleet.weight_sync.publish(offer(2.0), version=2)
        assert not caplog.messages
        assert fleet.weight_sync.publish(offer(2.0)).version == 3
        assert len([message for message in caplog.messages if "version 3 has the very bytes" in message]) == 1
        assert [target.engine.version for target in fleet.targets] == [3, 3]


def test_a_version_costs_the_same_number_of_calls_however_many_tensors_there_are() -> None:
    """open-instruct#1535: one call per parameter. Here: what it holds, one call per bucket and one before the first, the
    commit."""
    few, many = torch.nn.ParameterDict(), torch.nn.ParameterDict()
    few["all"] = torch.nn.Parameter(torch.zeros(16 * 64))
    for index in range(64):
        many[f"part{index}"] = torch.nn.Parameter(torch.zeros(16))
    for module in (few, many):
        target = FakeTarget("a", module)
        with WeightSync(target, Memory(), SyncConfig(bucket_bytes=1024)) as weight_sync:
            weight_sync.publish({name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()})
            target.calls.clear()
            weight_sync.publish({name: torch.ones_like(tensor) * 2 for name, tensor in module.state_dict().items()})
        assert target.calls == ["hello", "begin", *["receive"] * 4, "commit"]


# ----------------------------------------------------------------------------------------------------------- joining


@pytest.mark.parametrize("point", CALLS)
def test_a_target_that_comes_back_in_the_middle_of_a_publish_ends_on_the_version_of_the_others(point: str) -> None:
    """miles#1724: a recovered engine serves its base checkpoint. (What serves nothing until then: test_sync_workers.)"""
    with fleet_of(num_targets=3) as fleet:
        fleet.publish()
        joining, slow, _ = fleet.targets
        joining.kill()
        fault(slow, point, "stall")
        delivering = fleet.weight_sync.publish(marked(2.0), wait=False)
        fleet.published[2] = fleet.next_mark()
        wait_until(lambda: slow.is_stalled)
        joining.revive()
        slow.resume()
        assert delivering.result(10).fenced == ("a",)
        wait_until(lambda: joining.engine.version == 2)
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("point", [*CALLS, *IN_UPDATE])
def test_a_target_that_dies_again_while_it_is_brought_up_is_brought_up_when_it_comes_back(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        joining = fleet.targets[0]
        joining.kill()
        with joining.standing_still():
            joining.revive()
            fault(joining, point, "kill")
        wait_until(lambda: joining.is_dead)
        joining.revive()
        wait_until(lambda: joining.engine.version == 1)
        fleet.check()
        fleet.check_that_the_next_publish_works()


def test_a_target_that_comes_back_before_anything_was_published_is_left_alone() -> None:
    with fleet_of() as fleet:
        fleet.targets[0].kill()
        fleet.targets[0].revive()
        fleet.check_that_the_next_publish_works()
        assert fleet.targets[0].calls.count("begin") == 1


def test_bringing_up_is_overtaken_by_a_publish() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        joining = fleet.targets[0]
        joining.kill()
        with joining.standing_still():
            joining.revive()
            fault(joining, "commit", "stall")
        wait_until(lambda: "begin" in joining.calls[-6:] and joining.is_stalled)
        newer = fleet.weight_sync.publish(marked(2.0), wait=False)
        fleet.published[2] = fleet.next_mark()
        joining.resume()
        assert newer.result(10).fenced == ()
        assert joining.engine.version == 2
        fleet.check()
        fleet.check_that_the_next_publish_works()


# ------------------------------------------------------------------------------------------------------ several senders


@pytest.mark.parametrize("point", CALLS)
def test_a_second_sender_goes_on_where_the_first_one_died_at_any_point(point: str) -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    first = WeightSync(targets, Memory(), CONFIG)
    first.publish(marked(1.0))
    fault(targets[0], point, "stall")
    left_behind = first.publish(marked(2.0), wait=False, timeout_s=30)
    wait_until(lambda: targets[1].engine.version == 2)
    with WeightSync(targets, Memory(), CONFIG) as second:
        report = second.publish(marked(3.0), timeout_s=30)
        assert (report.version, report.fenced) == (3, ("a",))
        targets[0].resume()
        check_fleet(targets, {1: 1.0})
        newest = second.publish(marked(4.0))
        assert newest.fenced == ()
        assert {target.engine.version for target in targets} == {newest.version}
        assert {4.0} == marks(targets[0].engine.model) == marks(targets[1].engine.model)
        left_behind.result(10)
        check_fleet(targets, {1: 1.0})
        with pytest.raises(SyncError, match="newer trainer"):
            first.publish(marked(5.0))
        first.close()
        check_fleet(targets, {1: 1.0})


def test_a_zombie_is_refused_from_the_moment_its_successor_has_opened() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    with WeightSync(targets, Memory(), CONFIG) as zombie, WeightSync(targets, Memory(), CONFIG) as successor:
        zombie.publish(marked(1.0))

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            with pytest.raises(SyncError, match="a obeys a newer trainer"):
                zombie.publish(marked(2.0))
            yield from _items(3.0)

        report = successor.publish(while_staging())
        assert (report.version, report.fenced) == (2, ())
        check_fleet(targets, {1: 1.0, 2: 3.0})


@pytest.mark.parametrize("step", ["stage", "send", "commit"])
def test_a_zombie_that_was_under_way_cannot_give_one_version_two_sets_of_weights(step: str) -> None:
    """Its successor opens while it stages, between two of its sends, or before one of its commits."""
    targets = [FakeTarget("a"), FakeTarget("b", marked(0.0, torch.bfloat16))]  # two kinds: sent one after the other
    reached, go_on = threading.Event(), threading.Event()
    transport = Memory()
    zombie, successor = WeightSync(targets, transport, CONFIG), WeightSync(targets, Memory(), CONFIG)

    def hold(_: int = 0) -> None:
        reached.set()
        assert go_on.wait(30)

    def source() -> Iterator[tuple[str, Tensor]]:
        if step == "stage":
            hold()
        yield from _items(2.0)

    zombie.publish(marked(1.0))
    if step == "send":
        transport.before_send = lambda number: hold() if number == 4 else None
    if step == "commit":
        targets[1].fault_at("commit", "stall")
    under_way = _Thread(lambda: zombie.publish(source(), timeout_s=30))
    wait_until(lambda: reached.is_set() or targets[1].is_stalled)
    report = _Thread(lambda: successor.publish(marked(3.0), timeout_s=30))
    if step == "commit":
        wait_until(lambda: targets[1].num_queued >= 2)
        targets[1].resume()
    version = report.result().version
    go_on.set()
    with suppress(SyncError):
        assert "b" in under_way.result().fenced or step == "commit"
    check_fleet(targets, {1: 1.0, version: 3.0})
    newest = successor.publish(marked(4.0))
    assert newest.fenced == ()
    check_fleet(targets, {1: 1.0, version: 3.0, newest.version: 4.0})
    successor.close()
    zombie.close()


def test_a_sender_that_was_replaced_brings_nobody_up_with_what_was_refused() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    with WeightSync(targets, Memory(), CONFIG) as zombie, WeightSync(targets, Memory(), CONFIG) as successor:
        zombie.publish(marked(1.0))

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            successor.publish(marked(2.0))
            yield from _items(9.0)

        with pytest.raises(SenderReplacedError):
            zombie.publish(while_staging())
        successor.close()
        targets[0].kill()
        targets[0].revive()
        zombie._joiner.submit(lambda: None).result(10)  # it has been told, and has done what it does
        assert targets[0].engine.version == 0


def test_a_sender_that_started_on_other_engines_is_refused_by_the_run_folder(tmp_path: Path) -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    config = SyncConfig(bucket_bytes=BUCKET_BYTES, open_timeout_s=0.05, run_folder=tmp_path / "run")
    targets[1].kill()
    with WeightSync(targets, Memory(), config) as first, WeightSync(targets, Memory(), config) as second:

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            targets[0].kill()
            targets[1].revive()
            assert second.publish(marked(2.0)).version == 1
            targets[0].revive()
            yield from _items(1.0)

        with pytest.raises(SenderReplacedError, match="belongs to a newer trainer"):
            first.publish(while_staging())
        assert second.publish(marked(3.0)).fenced == ()
        check_fleet(targets, {1: 2.0, 2: 3.0})


def test_of_two_senders_that_start_at_once_one_wins_everywhere() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    transports = [Memory(), Memory()]
    with WeightSync(targets, transports[0], CONFIG) as left, WeightSync(targets, transports[1], CONFIG) as right:

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            reports.append(right.publish(marked(2.0)))
            yield from _items(1.0)

        reports: list[SyncReport] = []
        with pytest.raises(SyncError, match=r"newer trainer|another run|belongs to run"):
            left.publish(while_staging())
        assert reports[0].fenced == ()
        for mark in (3.0, 4.0):
            with pytest.raises(SyncError, match=r"newer trainer|belongs to run"):
                left.publish(marked(mark + 10))
            assert right.publish(marked(mark)).fenced == ()
        check_fleet(targets, {1: 2.0, 2: 3.0, 3: 4.0})


def test_of_two_claims_of_one_epoch_every_engine_obeys_the_same_in_whatever_order_they_come() -> None:
    left, right = (Claim(run_id="run", epoch=1, sender=name) for name in ("left", "right"))
    engines = FakeTarget("a").engine, FakeTarget("b").engine
    for claims, engine in zip([(left, right), (right, left)], engines, strict=True):
        for claim in claims:
            hello(engine, claim)
    assert hello(engines[0]).claim == hello(engines[1]).claim == right


def test_a_sender_of_another_run_is_refused_and_changes_nothing() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    ours = SyncConfig(bucket_bytes=BUCKET_BYTES, run_id="ours")
    theirs = SyncConfig(bucket_bytes=BUCKET_BYTES, run_id="theirs")
    with WeightSync(targets, Memory(), ours) as weight_sync, WeightSync(targets, Memory(), theirs) as other:
        weight_sync.publish(marked(1.0))
        with pytest.raises(SyncError, match=r"belongs to run 'ours', the publish comes from run 'theirs'"):
            other.publish(marked(2.0))
        assert weight_sync.publish(marked(3.0)).fenced == ()
        check_fleet(targets, {1: 1.0, 2: 3.0})


@pytest.mark.parametrize("engines_survive", [True, False])
def test_a_restarted_trainer_goes_on_above_its_last_version(tmp_path: Path, engines_survive: bool) -> None:
    config = SyncConfig(bucket_bytes=BUCKET_BYTES, run_folder=tmp_path / "run")
    targets = [FakeTarget("a"), FakeTarget("b")]
    with WeightSync(targets, Memory(), config) as before:
        before.publish(marked(1.0), version=7)
    if not engines_survive:
        targets = [FakeTarget("a"), FakeTarget("b")]
    with WeightSync(targets, Memory(), config) as after:
        assert after.publish(marked(2.0)).version == 8
        check_fleet(targets, {7: 1.0, 8: 2.0})


@pytest.mark.parametrize("point", ["hello", "begin", "receive+3", "commit", "copy+1", "leave", "after"])
def test_a_trainer_restarted_after_losing_a_publish_and_every_engine_never_uses_that_version_again(
    tmp_path: Path, point: str
) -> None:
    config = SyncConfig(bucket_bytes=BUCKET_BYTES, run_folder=tmp_path / "run")
    lost = [FakeTarget("a")]
    with WeightSync(lost, Memory(), config) as before:
        before.publish(marked(1.0))
        fault(lost[0], point, "kill")
        with pytest.raises(SyncError):
            before.publish(marked(2.0))
    sent = "begin" in lost[0].calls[7:]
    fresh = [FakeTarget("a")]
    with WeightSync(fresh, Memory(), config) as after:
        assert after.publish(marked(3.0)).version == (3 if sent else 2)
        check_fleet([*lost, *fresh], {1: 1.0})


# --------------------------------------------------------------------------------------------------- derived tensors


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


# --------------------------------------------------------------------------------------------------------------- helpers


def _items(mark: float) -> Iterator[tuple[str, Tensor]]:
    """A source that is not known beforehand."""
    return iter(marked(mark).state_dict().items())


class _Thread:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except BaseException as error:
            self._result = error

    def is_waiting(self) -> bool:
        """It stands in `publish`'s wait for its turn."""
        import sys

        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_name == "_take_turn":
                return True
            frame = frame.f_back
        return False

    def result(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

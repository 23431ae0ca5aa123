"""Trainers that replace each other: of all of them one has the engines."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import wait_until
from fakes_sync import BUCKET_BYTES, FakeTarget, Memory, check_fleet, marked, marks
from protocol_fleet import CALLS, CONFIG, InThread, fault, items
from torch import Tensor

from sync import SyncConfig, SyncError, SyncReport, WeightSync
from sync.errors import SenderReplacedError
from sync.receiver import hello
from sync.run_record import RunRecord
from sync.ticket import Claim


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
            yield from items(3.0)

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
        yield from items(2.0)

    zombie.publish(marked(1.0))
    if step == "send":
        transport.before_send = lambda number: hold() if number == 4 else None
    if step == "commit":
        targets[1].fault_at("commit", "stall")
    under_way = InThread(lambda: zombie.publish(source(), timeout_s=30))
    wait_until(lambda: reached.is_set() or targets[1].is_stalled)
    report = InThread(lambda: successor.publish(marked(3.0), timeout_s=30))
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
            yield from items(9.0)

        with pytest.raises(SenderReplacedError):
            zombie.publish(while_staging())
        successor.close()
        targets[0].kill()
        targets[0].revive()
        zombie._latecomers._executor.submit(lambda: None).result(10)  # it has been told, and has done what it does
        assert targets[0].engine.version == 0


def test_a_sender_that_started_on_other_engines_is_refused_by_the_run_folder(tmp_path: Path) -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    config = SyncConfig(bucket_bytes=BUCKET_BYTES, run_folder=tmp_path / "run")
    targets[1].kill()
    with WeightSync(targets, Memory(), config) as first, WeightSync(targets, Memory(), config) as second:

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            targets[0].kill()
            targets[1].revive()
            assert second.publish(marked(2.0)).version == 1
            targets[0].revive()
            yield from items(1.0)

        with pytest.raises(SenderReplacedError, match="belongs to a newer trainer"):
            first.publish(while_staging())
        assert second.publish(marked(3.0)).fenced == ()
        check_fleet(targets, {1: 2.0, 2: 3.0})


@pytest.mark.parametrize("other", ["", "~"])
def test_of_two_senders_that_claim_one_epoch_on_engines_apart_the_run_folder_lets_one_go_on(
    tmp_path: Path, other: str
) -> None:
    """The one that an engine which met both would obey: names are of hexadecimal digits, which lie between these two."""
    config = SyncConfig(bucket_bytes=BUCKET_BYTES, run_folder=tmp_path)
    with WeightSync(target := FakeTarget("a"), Memory(), config) as weight_sync:

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            record = RunRecord.load(tmp_path)
            assert record is not None
            replace(record, claim=replace(record.claim, sender=other)).save(tmp_path)
            yield from items(1.0)

        if other:
            with pytest.raises(SenderReplacedError, match="belongs to a newer trainer"):
                weight_sync.publish(while_staging())
        else:
            assert weight_sync.publish(while_staging()).fenced == ()
        assert target.engine.version == (0 if other else 1)


def test_of_two_senders_that_start_at_once_one_wins_everywhere() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    transports = [Memory(), Memory()]
    with WeightSync(targets, transports[0], CONFIG) as left, WeightSync(targets, transports[1], CONFIG) as right:

        def while_staging() -> Iterator[tuple[str, Tensor]]:
            reports.append(right.publish(marked(2.0)))
            yield from items(1.0)

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

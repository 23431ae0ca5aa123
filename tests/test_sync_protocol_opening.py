"""The first step of a publish: who takes part, under which version, and whether source and engines match."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import wait_until
from fakes_sync import FakeTarget, Memory, check_fleet, marked, pause_timed_out
from protocol_fleet import CONFIG, fault, fleet_of, items
from threaded_fleet import ThreadedFleet, ThreadedWorker

from rollout import RolloutConfig, RolloutController
from sync import ManifestError, SyncConfig, SyncError, WeightSync


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


@pytest.mark.parametrize("fails_at", ["begin", "pause", "copy"])
def test_a_version_that_no_target_took_is_never_used_for_other_bytes(fails_at: str) -> None:
    """It was sent, and whoever missed it is told to wait for it."""
    with fleet_of(num_targets=1) as fleet:
        (target,) = fleet.targets
        for version in (2, 3):
            for _ in range(2):  # a commit that breaks off is tried again
                target.fault_at(fails_at, pause_timed_out() if fails_at == "pause" else RuntimeError("no device"))
            with pytest.raises(SyncError, match=f"no engine took version {version}"):
                fleet.weight_sync.publish(marked(float(version)), version=version)
            target.clear_faults()
        with pytest.raises(SyncError, match="version must be at least 4, got 2"):
            fleet.weight_sync.publish(marked(2.0), version=2)
        with pytest.raises(SyncError, match="differs from what is already staged"):
            fleet.weight_sync.publish(marked(9.0), version=3)
        assert fleet.weight_sync.publish(marked(4.0)).version == 4


def test_a_version_that_no_target_took_can_be_published_again_with_its_own_bytes() -> None:
    with fleet_of(num_targets=1) as fleet:
        fleet.targets[0].fault_at("pause", pause_timed_out())
        with pytest.raises(SyncError, match="no engine took version 2"):
            fleet.weight_sync.publish(marked(2.0), version=2)
        assert fleet.weight_sync.publish(marked(2.0), version=2).fenced == ()
        assert fleet.targets[0].engine.served == [(2, frozenset({2.0}))]


def test_a_version_that_was_never_whole_is_not_used_up() -> None:
    with fleet_of(num_targets=1) as fleet:
        with pytest.raises(ManifestError):
            fleet.weight_sync.publish(list(items(1.0))[1:])
        assert fleet.publish().version == 1


class WaitingTarget(FakeTarget):
    """It has come back, or was started, to serve a version and what follows."""

    serve_from_version = 6


def test_targets_that_wait_for_a_version_are_given_one_that_they_serve() -> None:
    """They do not say whether that one has been published: the next one is right in either case."""
    with WeightSync([FakeTarget("a"), WaitingTarget("b")], Memory(), CONFIG) as weight_sync:
        assert weight_sync.publish(marked(1.0)).version == 7


def test_a_version_below_what_a_target_waits_for_is_refused_and_that_one_is_not() -> None:
    with WeightSync([FakeTarget("a"), WaitingTarget("b")], Memory(), CONFIG) as weight_sync:
        with pytest.raises(SyncError, match=r"version must be at least 6, got 5: .* an engine waits for that one"):
            weight_sync.publish(marked(1.0), version=5)
        assert weight_sync.publish(marked(1.0), version=6).fenced == ()


def test_the_fleet_of_a_run_that_goes_on_is_given_the_very_version_that_it_waits_for(tmp_path: Path) -> None:
    """Its workers are new and hold nothing; what the checkpoint has in flight bears that version's name already."""

    class Worker(ThreadedWorker):
        target = FakeTarget("w0")

        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            return self.target.call(fn, *args)

    class Fleet(ThreadedFleet):
        def start(self, serve_from_version: int) -> Sequence[ThreadedWorker]:
            waited_for.append(serve_from_version)
            return super().start(serve_from_version)

    waited_for: list[int] = []
    (tmp_path / "versions.json").write_text('{"highest_version": 7}')
    config = RolloutConfig(num_workers=1, versions_file=tmp_path / "versions.json")
    controller = RolloutController.over(Fleet(Worker("w0")), [[1, 2]], config=config)
    with controller, WeightSync(controller, Memory(), CONFIG) as weight_sync:
        assert [weight_sync.publish(marked(1.0)).version] == waited_for == [8]


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
        return marked(mark) if kind == "module" else iter(items(mark))

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

"""Who waits for whom in a `WeightSync`: nothing waits for itself, or for what has nothing to do with it."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import tiny_llama, wait_until
from fakes_sync import FakeTarget, Memory, check_fleet, marked, pause_timed_out
from protocol_fleet import CONFIG

from rollout import GenerationEngine
from sync import SyncError, SyncReport, WeightSync
from sync.receiver import receiver_of
from sync.turns import Turns


def test_a_publish_in_the_callback_of_another_is_refused_unless_it_need_not_wait() -> None:
    target, told = FakeTarget("a"), threading.Event()
    refused: list[str] = []
    newer: list[Future[SyncReport]] = []

    def publish_again(_: Future[SyncReport]) -> None:
        try:
            weight_sync.publish(marked(2.0), timeout_s=5)
        except SyncError as error:
            refused.append(str(error))
        newer.append(weight_sync.publish(marked(2.0), wait=False))
        told.set()

    with WeightSync(target, Memory(), CONFIG) as weight_sync:
        target.fault_at("commit", "stall")
        weight_sync.publish(marked(1.0), wait=False, timeout_s=20).add_done_callback(publish_again)
        wait_until(lambda: target.is_stalled)
        target.resume()
        assert told.wait(20), "the callback waits for itself"
        assert "would wait for itself; pass wait=False" in refused[0]
        assert newer[0].result(10).version == 2


def test_a_weight_sync_may_be_closed_in_the_callback_of_its_last_publish() -> None:
    target, closed = FakeTarget("a"), threading.Event()

    def close(_: Future[SyncReport]) -> None:
        weight_sync.close(timeout_s=10)
        closed.set()

    weight_sync = WeightSync(target, transport := Memory(), CONFIG)
    target.fault_at("commit", "stall")
    weight_sync.publish(marked(1.0), wait=False, timeout_s=20).add_done_callback(close)
    wait_until(lambda: target.is_stalled)
    target.resume()
    assert closed.wait(20)
    assert transport.is_closed


def test_a_target_that_comes_back_waits_as_long_as_the_publish_under_way_may_last() -> None:
    class NotedTurns(Turns):
        def take(self, timeout_s: float, what: str) -> None:
            if what == "waiting for a publish":
                limits.append(timeout_s)
            super().take(timeout_s, what)

    limits: list[float] = []
    joining, slow = FakeTarget("a"), FakeTarget("b")
    with WeightSync([joining, slow], Memory(), CONFIG) as weight_sync:
        weight_sync._turns = weight_sync._latecomers._turns = NotedTurns()
        weight_sync.publish(marked(1.0))
        joining.kill()
        slow.fault_at("commit", "stall")
        delivering = weight_sync.publish(marked(2.0), wait=False, timeout_s=1000)
        wait_until(lambda: slow.is_stalled)
        joining.revive()
        wait_until(lambda: limits)
        slow.resume()
        assert delivering.result(20).fenced == ("a",)
        wait_until(lambda: joining.engine.version == 2)
        assert limits[0] > 1000


def test_a_target_that_hangs_while_it_is_fenced_keeps_no_other_from_being_brought_up() -> None:
    class Deaf(FakeTarget):
        def require_version(self, version: int) -> None:
            asked.set()
            assert heard.wait(30)

    asked, heard = threading.Event(), threading.Event()
    joining, deaf = FakeTarget("a"), Deaf("b")
    try:
        with WeightSync([joining, deaf], Memory(), CONFIG) as weight_sync:
            weight_sync.publish(marked(1.0))
            deaf.kill()
            weight_sync.publish(marked(2.0))
            assert asked.wait(10)
            joining.kill()
            joining.revive()
            wait_until(lambda: joining.engine.version == 2)
    finally:
        heard.set()


def test_a_target_that_does_not_answer_when_it_comes_back_is_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    joining = FakeTarget("a")
    with caplog.at_level(logging.WARNING), WeightSync([joining, FakeTarget("b")], Memory(), CONFIG) as weight_sync:
        weight_sync.publish(marked(1.0))
        joining.kill()
        with joining.standing_still():
            joining.revive()
            joining.fault_at("hello", "stall")
        wait_until(lambda: "a is not brought up" in caplog.text)
        joining.resume()
    assert "a is not brought up before the next publish: it did not say in time what it holds" in caplog.text


def test_a_version_that_one_target_was_brought_up_to_is_never_used_for_other_weights() -> None:
    first, second = FakeTarget("a"), FakeTarget("b")
    with WeightSync([first, second], transport := Memory(), CONFIG) as weight_sync:
        transport.fail_next_send = OSError("no network")
        with pytest.raises(SyncError, match="no engine took version 1"):
            weight_sync.publish(marked(1.0))
        first.kill()
        first.revive()
        wait_until(lambda: first.engine.version == 1)
        first.stall()  # it does not say that it has version 1
        publishing = weight_sync.publish(marked(2.0), wait=False)
        first.resume()
        assert publishing.result(30).version == 2
        check_fleet([first, second], {1: 1.0, 2: 2.0})


def test_a_target_has_a_say_in_when_it_is_updated_and_in_nothing_else() -> None:
    class Evaluates(FakeTarget):
        def call_update(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            updates.append(fn.__name__)
            return self.call(fn, *args)

    updates: list[str] = []
    target = Evaluates("a")
    with WeightSync(target, Memory(), CONFIG) as weight_sync:
        weight_sync.publish(marked(1.0))
        assert updates == ["commit"]
        assert len(target.calls) > 4


def test_a_publish_on_the_thread_that_its_own_commit_needs_is_refused_at_once() -> None:
    trainer = tiny_llama(seed=1)
    with GenerationEngine(tiny_llama(), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        waiting = engine.call(lambda _: weight_sync.publish(trainer, timeout_s=60))
        with pytest.raises(SyncError, match=r"control thread of engine\[0\] would wait for itself; .* wait=False"):
            waiting.result(30)
        later = engine.call(lambda _: weight_sync.publish(trainer, wait=False)).result(30)
        assert later.result(30).version == engine.version == 1


def test_what_a_target_keeps_of_a_sender_goes_with_that_sender_and_with_no_other() -> None:
    target = FakeTarget("a")
    first, second = (WeightSync(target, Memory(), CONFIG) for _ in range(2))
    first.publish(marked(1.0))
    target.fault_at("pause", pause_timed_out())
    with pytest.raises(SyncError, match="the pause was not entered"):
        second.publish(marked(2.0))
    receiver = receiver_of(target.engine)
    first.close()
    assert receiver._staged is not None
    second.close()
    assert receiver._staged is receiver._own is None
    gone = [weakref.ref(part) for part in (first, first._latecomers, second, second._latecomers)]
    del first, second
    gc.collect()
    assert [part() for part in gone] == [None] * 4, "its targets still hold it"

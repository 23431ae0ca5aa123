"""What a worker's handle keeps of its calls and of those who want to know of a new incarnation."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from fakes import wait_until

from rollout import RolloutError, WorkerDiedError, WorkerUnreachableError
from rollout.control import ControlThread
from rollout.workers.calls import PendingCalls
from rollout.workers.joins import JoinCallbacks

LATE, GONE = WorkerUnreachableError("no answer"), WorkerDiedError("gone")


@pytest.fixture
def calls() -> Iterator[PendingCalls]:
    calls = PendingCalls()
    yield calls
    calls.fail_all(GONE)
    calls.stop(20)


def test_a_call_resolves_by_its_answer_or_its_error(calls: PendingCalls) -> None:
    answered, failed = calls.add(500, LATE), calls.add(500, LATE)
    calls.answer(answered, lambda: 3)
    calls.answer(failed, lambda: 1 // 0)
    assert answered.result(20) == 3
    with pytest.raises(ZeroDivisionError):
        failed.result(20)


def test_a_call_without_an_answer_fails_at_its_limit_and_a_late_answer_changes_nothing(calls: PendingCalls) -> None:
    call, after = calls.add(0.02, LATE), calls.add(500, LATE)
    with pytest.raises(WorkerUnreachableError, match="no answer"):
        call.result(20)
    calls.answer(call, lambda: 3)
    calls.answer(after, lambda: 4)  # resolved after the late one
    assert after.result(20) == 4
    assert isinstance(call.exception(), WorkerUnreachableError)


class Payload:
    """What a call was given, a bucket of weights, say."""

    def fail(self) -> None:
        raise ValueError("no")


def is_let_go(ask: Callable[[Payload], Callable[[int], BaseException | None]]) -> bool:
    """Whether a failed call's payload goes with the call, without the help of a collection."""
    payload = Payload()
    held = weakref.ref(payload)
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        failure_within = ask(payload)
        del payload
        assert isinstance(failure_within(20), ValueError)
        del failure_within
        wait_until(lambda: held() is None, 5)
    finally:
        if is_enabled:
            gc.enable()
    return True


def test_what_a_failed_call_was_given_goes_with_the_call(calls: PendingCalls) -> None:
    def ask(payload: Payload) -> Callable[[int], BaseException | None]:
        call = calls.add(500, LATE)
        calls.answer(call, payload.fail)
        return call.exception

    assert is_let_go(ask)


def test_what_a_failed_call_of_an_engine_was_given_goes_with_the_call() -> None:
    control = ControlThread()
    control.start()
    try:
        assert is_let_go(lambda payload: control.submit(payload.fail).exception)
    finally:
        control.stop(20)


def test_an_answer_after_the_end_is_dropped_and_a_call_after_it_is_refused(calls: PendingCalls) -> None:
    call = calls.add(500, LATE)
    calls.fail_all(GONE)
    with pytest.raises(WorkerDiedError, match="gone"):
        call.result(20)
    calls.stop(20)
    calls.answer(call, lambda: 3)
    with pytest.raises(WorkerDiedError, match="gone"):
        calls.add(500, LATE)


def test_no_thread_is_left_and_none_is_started_without_a_call() -> None:
    before = set(threading.enumerate())
    calls = PendingCalls()
    assert set(threading.enumerate()) == before
    calls.add(500, LATE)
    assert set(threading.enumerate()) != before
    calls.fail_all(GONE)
    calls.stop(20)
    assert set(threading.enumerate()) == before


def test_a_callback_that_raises_does_not_keep_the_others_from_being_told() -> None:
    told: list[str] = []

    def fail(worker: str) -> None:
        raise RolloutError("no weights")

    callbacks = JoinCallbacks("the worker", "w0")
    callbacks.tell()
    callbacks.add(fail)
    callbacks.add(told.append)
    callbacks.tell()
    wait_until(lambda: told == ["the worker"])
    callbacks.tell(told.append)
    callbacks.join(20)
    assert told == ["the worker"] * 2
    assert not any(thread.name == "rollsync-join-w0" for thread in threading.enumerate())

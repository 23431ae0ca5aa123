"""Rewards are computed beside generation, a bounded number at once, and a failure is never a zero."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from fakes import wait_until

from rollout import InvalidRequestError
from rollout.batches.rewards import RewardError, RewardPool, RewardResult, as_result, as_results


def run(pool: RewardPool, call: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()

    def done(value: Any, error: RewardError | None) -> None:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    pool.submit(call, done)
    return future


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    pool = RewardPool(2, timeout_s=30.0)
    yield pool
    pool.stop(5.0)


def test_functions_and_coroutines_give_their_value(pool: RewardPool) -> None:
    async def later() -> float:
        await asyncio.sleep(0)
        return 2.0

    assert run(pool, lambda: 1.0).result(30) == 1.0
    assert run(pool, later).result(30) == 2.0


def test_no_more_run_at_once_than_the_pool_is_large(pool: RewardPool) -> None:
    running, most = 0, 0
    lock, both_in, go = threading.Lock(), threading.Barrier(3), threading.Event()

    def call(waits: bool) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if waits:
            both_in.wait(30)
            assert go.wait(30)
        with lock:
            running -= 1

    futures = [run(pool, lambda n=n: call(n < 2)) for n in range(10)]
    both_in.wait(30)
    go.set()
    for future in futures:
        future.result(30)
    assert most == 2


def test_an_exception_is_reported_with_its_cause_and_the_pool_goes_on(pool: RewardPool) -> None:
    def broken() -> float:
        raise KeyError("answer")

    with pytest.raises(RewardError, match="KeyError: 'answer'") as caught:
        run(pool, broken).result(30)
    assert caught.value.kind == "raised"
    assert isinstance(caught.value.__cause__, KeyError)
    assert run(pool, lambda: 1.0).result(30) == 1.0


class Unprintable(Exception):
    """As of a user's, with a mistake in it."""

    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit(1), "raised SystemExit: 1"),
        (asyncio.CancelledError(), "raised CancelledError"),
        (Unprintable(), "raised Unprintable"),
        (TimeoutError(), "raised TimeoutError"),
    ],
)
def test_whatever_is_raised_is_reported_by_its_name_and_costs_no_thread(error: BaseException, says: str) -> None:
    def at_once() -> float:
        raise error

    async def later() -> float:
        raise error

    pool = RewardPool(1, timeout_s=30.0)
    for call in (at_once, later):
        with pytest.raises(RewardError, match=says) as caught:
            run(pool, call).result(30)
        assert caught.value.kind == "raised"
    assert run(pool, lambda: 1.0).result(30) == 1.0
    pool.stop(5.0)


def reward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rollsync-reward")]


def test_a_users_own_reward_error_counts_as_its_kind_and_one_of_no_kind_as_raised(pool: RewardPool) -> None:
    def fail(kind: str) -> float:
        raise RewardError("no answer in it", kind)

    for kind, counted_as in [("invalid", "invalid"), ("unparsable", "raised")]:
        error = run(pool, lambda kind=kind: fail(kind)).exception(30)
        assert isinstance(error, RewardError)
        assert error.kind == counted_as
    assert "unparsable" in str(error)


def test_a_pool_has_no_threads_before_its_first_call_and_none_after_its_stop() -> None:
    before = len(reward_threads())
    started = threading.Barrier(3)

    async def for_ever() -> None:
        await asyncio.to_thread(started.wait, 30)
        await asyncio.Event().wait()

    pool = RewardPool(2, timeout_s=30.0)
    assert len(reward_threads()) == before
    for _ in range(2):
        pool.submit(for_ever, lambda value, error: None)
    started.wait(30)
    pool.stop(5.0)
    wait_until(lambda: len(reward_threads()) <= before)


def test_a_function_that_takes_too_long_is_reported_and_another_thread_takes_its_place() -> None:
    pool = RewardPool(1, timeout_s=0.05)
    go = threading.Event()
    with pytest.raises(RewardError, match=r"reward_timeout_s=0\.05") as caught:
        run(pool, lambda: go.wait(30)).result(30)
    assert caught.value.kind == "timeout"
    wait_until(lambda: pool.num_stuck == 1)
    other = RewardPool(1, timeout_s=30.0)
    assert run(other, lambda: 1.0).result(30) == 1.0
    assert run(pool, lambda: 1.0).result(30) == 1.0
    go.set()
    wait_until(lambda: pool.num_stuck == 0)
    for each in (pool, other):
        each.stop(5.0)


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    pool = RewardPool(1, timeout_s=0.05)
    cancelled = threading.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(RewardError, match="took longer"):
        run(pool, for_ever).result(30)
    assert cancelled.wait(30)
    pool.stop(5.0)


def test_after_the_stop_nothing_is_reported_and_the_threads_end(pool: RewardPool) -> None:
    entered, go, told = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        go.wait(30)

    assert run(pool, lambda: 1.0).result(30) == 1.0
    before = threading.active_count()
    pool.submit(call, lambda value, error: told.set())
    assert entered.wait(30)
    pool.stop(5.0)
    go.set()
    wait_until(lambda: threading.active_count() <= before)
    assert not told.is_set()


def test_a_pool_that_is_never_used_has_no_threads() -> None:
    before = set(threading.enumerate())
    pool = RewardPool(2, timeout_s=30.0)
    assert not set(threading.enumerate()) - before
    pool.stop(5.0)
    pool.submit(lambda: 1.0, lambda value, error: None)
    assert not set(threading.enumerate()) - before


def test_what_counts_as_a_reward() -> None:
    assert as_result(1) == RewardResult(reward=1.0)
    assert as_result(True).reward == 1.0
    assert as_result(torch.tensor(0.5)).reward == 0.5
    assert as_result(RewardResult(reward=2, metrics={"a": 1.0})).metrics == {"a": 1.0}
    for bad in (None, float("nan"), float("inf"), 10**400, 10**5000, "1", [1.0], torch.tensor([1.0, 2.0])):
        with pytest.raises(RewardError, match="finite number"):
            as_result(bad)
    with pytest.raises(InvalidRequestError, match="finite number"):
        RewardResult(reward=float("nan"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metrics": None}, "metrics must be a dict"),
        ({"metrics": [1]}, "metrics must be a dict"),
        ({"metrics": {1: 1.0}}, "metrics must be a dict with names"),
        ({"metrics": {"a": None}}, r"metrics\['a'\] must be a finite number, got None"),
        ({"metrics": {"a": float("nan")}}, "finite number, got nan"),
        ({"metrics": {"mean": 7.0}}, r"`reward/mean` is another's"),
        ({"metadata": None}, "metadata must be a dict"),
        ({"metadata": [1]}, "metadata must be a dict"),
    ],
)
def test_a_result_says_which_of_its_fields_is_wrong(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        RewardResult(reward=1.0, **fields)


def test_a_group_gets_one_reward_each() -> None:
    assert [result.reward for result in as_results(np.ones(2, np.float32), 2)] == [1.0, 1.0]
    assert [result.reward for result in as_results(torch.tensor([0.0, 1.0]), 2)] == [0.0, 1.0]
    with pytest.raises(RewardError, match="3 rewards, got 2 of them"):
        as_results([0.0, 1.0], 3)
    with pytest.raises(RewardError, match="got float"):
        as_results(1.0, 3)

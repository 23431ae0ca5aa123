"""Rewards are computed beside generation, a bounded number at once, and a failure is never a zero."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

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
    for bad in (None, float("nan"), float("inf"), "1", [1.0], torch.tensor([1.0, 2.0])):
        with pytest.raises(RewardError, match="finite number"):
            as_result(bad)
    with pytest.raises(InvalidRequestError, match="finite number"):
        RewardResult(reward=float("nan"))


def test_a_group_gets_one_reward_each() -> None:
    assert [result.reward for result in as_results(torch.tensor([0.0, 1.0]), 2)] == [0.0, 1.0]
    with pytest.raises(RewardError, match="3 rewards, got 2 of them"):
        as_results([0.0, 1.0], 3)
    with pytest.raises(RewardError, match="got float"):
        as_results(1.0, 3)

"""A worker in a process of its own: what it serves, and what its handle says when it stops answering, dies and comes back."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import worker_jobs
from fakes import greedy_reference, tiny_llama, wait_until
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout import (
    EngineConfig,
    FinishReason,
    InvalidRequestError,
    Rollout,
    RolloutError,
    SamplingParams,
    WorkerDiedError,
    WorkerStaleError,
    WorkerUnreachableError,
)
from rollout.worker import Finished, Worker, WorkerConfig, WorkerState, WorkItem
from sync import ManifestError

pytestmark = pytest.mark.ray

ENGINE = EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64)


def config(**changes: Any) -> WorkerConfig:
    given = {"model": worker_jobs.marker_llama, "engine": ENGINE, "num_cpus": 0, "num_threads": 1}
    return WorkerConfig(**{**given, **changes})


@pytest.fixture(scope="module")
def shared(local_ray: str) -> Iterator[Worker]:
    """Lives through the module; tests leave nothing in flight and nothing unread."""
    with Worker.start("shared", config(model=tiny_llama)) as worker:
        yield worker


@pytest.fixture(scope="module")
def reused(local_ray: str) -> Iterator[Worker]:
    """For `victim`."""
    worker = Worker.start("victim", config(heartbeat_s=0.2))
    yield worker
    worker.stop()


@pytest.fixture
def victim(reused: Worker) -> Worker:
    """A worker to stop and to kill; alive when a test begins."""
    if reused.health().state == WorkerState.DEAD:
        reused.restart()
    if reused.health().state == WorkerState.STALE:
        reused.call(worker_jobs.publish, reused.health().serve_from_version).result(20)
    reused.wait_for(WorkerState.HEALTHY, timeout_s=20)
    return reused


@contextmanager
def impatient(worker: Worker) -> Iterator[Worker]:
    """Another handle of the same worker, for which every limit is short."""
    short = dict.fromkeys(("grace_s", "submit_timeout_s", "call_timeout_s", "snapshot_timeout_s"), 0.3)
    copy = Worker.__new__(Worker)
    copy.__setstate__({**worker.__getstate__(), "config": replace(worker.config, suspect_after_s=0.5, **short)})
    try:
        yield copy
    finally:
        copy.disconnect()


def item(name: str, prompt: Any = (5, 6, 7), *, tokens: int = 4, **fields: Any) -> WorkItem:
    params = SamplingParams(max_new_tokens=tokens, temperature=0, stop_token_ids=())
    return WorkItem(request_id=name, prompt_ids=prompt, params=params, **fields)


def read(worker: Worker, count: int) -> dict[str, Rollout]:
    results: list[Finished] = []
    while len(results) < count:
        more = worker.poll(timeout_s=20)
        assert more, "no result came"
        results += more
    assert {(f.rollout.worker_id, f.rollout.attempt) for f in results} == {
        (worker.worker_id, f.attempt) for f in results
    }
    return {finished.rollout.rollout_id: finished.rollout for finished in results}


def send(worker: Worker, which: signal.Signals) -> None:
    os.kill(worker.health().pid, which)


# -------------------------------------------------------------------------------------------------------- requests


def test_a_batch_runs_but_for_the_items_that_cannot_work(shared: Worker) -> None:
    refusals = shared.submit(
        [
            item("a", metadata={"path": Path("x")}),
            item("empty", []),
            item("lock", metadata={"lock": threading.Lock()}),
            item("group", [9, 8], size=3, attempt=2),
        ]
    )
    assert [(r.position, r.request_id, type(r.error)) for r in refusals] == [
        (1, "empty", InvalidRequestError),
        (2, "lock", InvalidRequestError),
    ]
    rollouts = read(shared, 4)
    assert rollouts["a"].token_ids == greedy_reference(tiny_llama(), [5, 6, 7], 4)
    assert rollouts["a"].metadata == {"path": Path("x")}
    for number in range(3):
        sample = rollouts[f"group-{number}"]
        assert sample.token_ids == greedy_reference(tiny_llama(), [9, 8], 4)
        assert (sample.sample_index, sample.group_id, sample.attempt) == (number, "group", 2)


def test_polls_that_wait_wake_with_the_first_result_and_a_call_is_not_behind_them(shared: Worker) -> None:
    shared.submit([item("before")])
    read(shared, 1)  # and the copy knows that
    copy: Worker = pickle.loads(pickle.dumps(shared))  # so that as many polls wait as there are threads for polls
    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(handle.poll, 8, 60.0) for handle in (shared, copy)]
        assert shared.call(worker_jobs.version_of).result(20) == 0
        assert shared.snapshot() == []
        assert not any(poll.done() for poll in polls)
        assert shared.submit([item("a")]) == []
        for poll in polls:
            assert [f.rollout.rollout_id for f in poll.result(20)] == ["a"]
    copy.disconnect()


def test_a_poll_without_results_is_empty_at_its_limit(shared: Worker) -> None:
    assert shared.poll(timeout_s=0.05) == []


def test_threads_that_poll_at_once_share_the_results_and_each_result_comes_once(shared: Worker) -> None:
    shared.submit([item(f"r{number}", tokens=1 + number) for number in range(40)])
    seen: list[str] = []
    enough = threading.Event()

    def poll() -> None:
        while not enough.is_set():
            seen.extend(finished.rollout.rollout_id for finished in shared.poll(3, 0.2))
            if len(seen) >= 40:
                enough.set()

    with ThreadPoolExecutor(3) as pool:
        pollers = [pool.submit(poll) for _ in range(3)]
        assert enough.wait(60)
        for poller in pollers:
            poller.result(20)
    assert sorted(seen) == sorted(f"r{number}" for number in range(40))


def test_cancel_and_snapshot_reach_what_is_in_flight(shared: Worker) -> None:
    shared.call(worker_jobs.slow_down).result(20)
    shared.submit([item("a", tokens=400, metadata={"k": 1}), item("b", tokens=400)])
    wait_until(lambda: all(rollout.token_ids for rollout in shared.snapshot()))
    partial = shared.snapshot()[0]
    assert (partial.rollout_id, partial.finish_reason, partial.metadata) == ("a", None, {"k": 1})
    assert shared.cancel(["a", "never", "b"]) == ["never"]
    rollouts = read(shared, 2)
    assert {rollout.finish_reason for rollout in rollouts.values()} == {FinishReason.ABORT}
    assert rollouts["a"].token_ids[: len(partial.token_ids)] == partial.token_ids
    shared.call(worker_jobs.full_speed).result(20)


def test_an_engine_that_dies_in_its_worker_comes_back_and_its_rollouts_go_on(shared: Worker) -> None:
    shared.call(worker_jobs.slow_down).result(20)
    shared.submit([item("a", tokens=100)])
    wait_until(lambda: [len(rollout.token_ids) > 0 for rollout in shared.snapshot()] == [True])
    shared.call(worker_jobs.kill_loop).result(20)
    failed = read(shared, 1)["a"]
    assert failed.finish_reason == FinishReason.ERROR
    assert "a step failed" in str(failed.error)
    assert failed.token_ids, "the tokens before the death"
    shared.call(worker_jobs.full_speed).result(20)
    assert shared.submit([item("a", tokens=100, attempt=1, resume_from=failed)]) == [], "submit waits for the engine"
    rollout = read(shared, 1)["a"]
    assert rollout.token_ids == greedy_reference(tiny_llama(), [5, 6, 7], 100)
    assert rollout.versions == [0] * 100


# ----------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (worker_jobs.raise_manifest_error, ManifestError, "missing: lm_head.weight"),
        (worker_jobs.raise_unpicklable, RolloutError, "UnpicklableError: it holds a lock"),
        (worker_jobs.exit_process, RolloutError, "SystemExit: 3"),
    ],
)
def test_an_error_in_a_call_arrives_as_its_own_type_with_its_message(
    shared: Worker, fn: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        shared.call(fn).result(20)
    assert (type(caught.value), str(caught.value)) == (kind, message)
    assert f"in {fn.__name__}" in "\n".join(caught.value.__notes__), "where it was raised"
    assert shared.call(worker_jobs.version_of).result(20) == 0, "the worker lives on"


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so(shared: Worker) -> None:
    with pytest.raises(RolloutError, match=r"cannot pickle '_thread\.lock' object"):
        shared.call(worker_jobs.return_lock).result(20)
    assert shared.call(worker_jobs.version_of).result(20) == 0


def test_a_function_that_cannot_be_sent_is_refused(shared: Worker) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidRequestError, match="cannot be sent to worker shared"):
        shared.call(lambda engine: lock)


def test_a_copy_of_the_handle_reaches_the_worker_and_cannot_end_it(shared: Worker) -> None:
    copy: Worker = pickle.loads(pickle.dumps(shared))
    assert copy.call(worker_jobs.version_of).result(20) == 0
    assert copy.wait_for(WorkerState.HEALTHY, timeout_s=20).pid == shared.health().pid
    for end in (copy.stop, copy.restart):
        with pytest.raises(RolloutError, match="this is a copy"):
            end()
    assert shared.health().state == WorkerState.HEALTHY
    pending = copy.call(worker_jobs.pause_for_s, 1.0)
    copy.disconnect()
    with pytest.raises(WorkerDiedError, match="its handle was disconnected"):
        pending.result(20)
    with pytest.raises(RolloutError, match="is for copies of its handle"):
        shared.disconnect()
    assert shared.call(worker_jobs.version_of).result(20) == 0, "the worker goes on"


# ------------------------------------------------------------------------------------------------- silence and death


def test_a_stopped_process_is_suspect_and_every_wait_for_it_ends_and_names_it(victim: Worker) -> None:
    with impatient(victim) as handle:
        handle.wait_for(WorkerState.HEALTHY, timeout_s=20)
        send(victim, signal.SIGSTOP)
        try:
            call = handle.call(worker_jobs.version_of)
            for phase, ask in {
                "submit": lambda: handle.submit([item("a")]),
                "poll": lambda: handle.poll(timeout_s=0.1),
                "cancel": lambda: handle.cancel(["a"]),
                "snapshot": handle.snapshot,
                "call": lambda: call.result(20),
            }.items():
                with pytest.raises(WorkerUnreachableError, match=rf"victim \(incarnation \d+\) did not answer {phase}"):
                    ask()
            suspect = handle.wait_for(WorkerState.SUSPECT, timeout_s=20)
            assert suspect.heartbeat_age_s > 0.5
        finally:
            send(victim, signal.SIGCONT)
    victim.wait_for(WorkerState.HEALTHY, timeout_s=20)
    victim.submit([item("a")])  # again: nobody knows whether it was taken
    assert read(victim, 1).keys() == {"a"}
    assert victim.poll(timeout_s=0.1) == [], "it was taken twice"


def test_a_killed_process_fails_all_who_wait_for_it_and_the_next_incarnation_is_stale_until_it_is_published_to(
    victim: Worker,
) -> None:
    version = victim.version + 3
    victim.call(worker_jobs.publish, version).result(20)
    before = victim.health()
    joined: Future[Worker] = Future()
    permit = threading.Event()

    def on_join(worker: Worker) -> None:
        if joined.done():
            return
        joined.set_result(worker)
        assert permit.wait(60)
        worker.call(worker_jobs.publish, version).result(20)

    victim.on_join(on_join)
    call = victim.call(worker_jobs.block)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(victim.poll, 8, 60.0)
        send(victim, signal.SIGKILL)
        for waiting in (call, poll):
            with pytest.raises(WorkerDiedError, match="victim"):
                waiting.result(20)
    dead = victim.wait_for(WorkerState.DEAD, timeout_s=20)
    assert "victim" in str(dead.reason)
    with pytest.raises(WorkerDiedError, match="is dead"):
        victim.submit([item("a")])

    victim.restart()
    assert joined.result(20) is victim
    stale = victim.health()
    assert (stale.state, stale.incarnation, stale.version) == (WorkerState.STALE, before.incarnation + 1, 0)
    assert [type(r.error) for r in victim.submit([item("a")])] == [WorkerStaleError]
    permit.set()
    assert victim.wait_for(WorkerState.HEALTHY, timeout_s=20).version == version
    assert victim.submit([item("a")]) == []
    (finished,) = victim.poll(timeout_s=20)
    assert (finished.incarnation, finished.rollout.versions) == (before.incarnation + 1, [version] * 4)
    assert finished.rollout.token_ids == [version] * 4


def test_a_worker_that_is_stale_when_somebody_registers_is_told_at_once(victim: Worker) -> None:
    version = victim.version + 1
    victim.require_version(version)
    assert [type(r.error) for r in victim.submit([item("a")])] == [WorkerStaleError]
    told: Future[Worker] = Future()
    victim.on_join(lambda worker: told.done() or told.set_result(worker))
    assert told.result(20) is victim


def test_a_model_that_cannot_be_hosted_is_refused_in_the_packages_own_words_and_a_failed_restart_leaves_it_dead(
    victim: Worker,
) -> None:
    old, good = victim.health().pid, victim.config
    send(victim, signal.SIGSTOP)  # which does not keep it from being ended
    victim.config = replace(good, model="worker_jobs:failing_model")
    with pytest.raises(InvalidRequestError) as caught:
        victim.restart()
    victim.config = good
    assert str(caught.value) == "this model needs 3 heads, got 4"
    health = victim.health()
    assert (health.state, health.reason) == (WorkerState.DEAD, "its restart failed: this model needs 3 heads, got 4")
    assert not psutil.pid_exists(old)


# ------------------------------------------------------------------------------------------------------------ ending


def test_a_worker_that_finds_no_room_is_an_error_within_its_limit(local_ray: str) -> None:
    with pytest.raises(WorkerUnreachableError, match=r"big \(incarnation 0\) did not answer start within 0.5 s"):
        Worker.start("big", config(num_cpus=1000, start_timeout_s=0.5))


def test_stop_hands_over_what_is_left_and_leaves_no_process_and_no_thread(local_ray: str) -> None:
    threads = set(threading.enumerate())
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    worker = Worker.start("brief", config(model=tiny_llama, scheduling=here, env={"ROLLSYNC_TEST": "given"}))
    assert worker.call(worker_jobs.environment, "ROLLSYNC_TEST").result(20) == "given"
    worker.call(worker_jobs.slow_down).result(20)
    worker.submit([item("short", tokens=1), item("long", tokens=400)])
    wait_until(lambda: (stats := worker.health().engine) is not None and stats.finished == 1)
    pid = worker.health().pid
    left = {finished.rollout.rollout_id: finished.rollout.finish_reason for finished in worker.stop()}
    assert left == {"short": FinishReason.LENGTH, "long": FinishReason.ABORT}, "each once"
    assert not psutil.pid_exists(pid)
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert worker.stop() == []
    assert worker.health().state == WorkerState.DEAD
    for method in (worker.poll, worker.snapshot, worker.restart):
        with pytest.raises(WorkerDiedError, match="stopped"):
            method()


@pytest.mark.parametrize("ending", ["killed", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_worker_ends_with_its_driver_however_that_ends(local_ray: str, ending: str) -> None:
    script = Path(__file__).with_name("worker_driver.py")
    driver = subprocess.Popen([sys.executable, script, local_ray, ending], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        _, pid = driver.stdout.readline().split()
    worker = psutil.Process(int(pid))
    if ending == "killed":
        driver.kill()
    assert driver.wait(60) == (-signal.SIGKILL if ending == "killed" else 0)
    worker.wait(30)

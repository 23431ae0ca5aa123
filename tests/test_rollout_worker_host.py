"""What a worker does in its process, without Ray: it refuses what it cannot serve, keeps what was not read, and brings its
engine back."""

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import worker_jobs
from fakes import greedy_reference, tiny_llama, wait_until

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineFencedError,
    FinishReason,
    InvalidRequestError,
    Rollout,
    RolloutError,
    SamplingParams,
    VersionSpan,
    WorkerBusyError,
    WorkerDiedError,
    WorkerStaleError,
    WorkerUnreachableError,
)
from rollout.worker_config import WorkerConfig
from rollout.workers.host import WorkerHost
from rollout.workers.wire import Finished, Kept, Refusal, WorkerState, WorkItem, pack, to_parcel, unpack

ENGINE = EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64, num_threads=1)


def config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**{"model": "worker_jobs:tiny_llama", "engine": ENGINE, "num_cpus": 0, **changes})


def opened(settings: WorkerConfig, *, serve_from_version: int = 0) -> WorkerHost:
    host = WorkerHost("w0", settings, incarnation=2, serve_from_version=serve_from_version)
    host.open()
    return host


@pytest.fixture
def host() -> Iterator[WorkerHost]:
    host = opened(config(max_outstanding=8))
    yield host
    host.close(20)


def item(name: str, prompt: Any = (5, 6, 7), *, tokens: int = 4, **fields: Any) -> WorkItem:
    params = SamplingParams(max_new_tokens=tokens, temperature=0, stop_token_ids=())
    return WorkItem(request_id=name, prompt_ids=prompt, params=params, **fields)


def submit(host: WorkerHost, *items: WorkItem, read_up_to: int = 0) -> list[Refusal]:
    return host.submit([to_parcel(position, item) for position, item in enumerate(items)], read_up_to)


def read(host: WorkerHost, count: int, read_up_to: int = 0) -> tuple[list[Finished], int]:
    """`count` results and the number of the last."""
    results: list[Finished] = []
    while len(results) < count:
        batch, last = host.poll(read_up_to, count - len(results), 20)
        assert last > read_up_to, "no result came"
        results, read_up_to = results + unpack(batch), last
    return results, read_up_to


# -------------------------------------------------------------------------------------------------------- requests


def test_a_bad_item_is_refused_alone_and_the_others_run(host: WorkerHost) -> None:
    bad = [item("empty", []), item("text", "words"), item("far", [10**6]), item("long", [1] * 3, tokens=5000)]
    refusals = submit(host, item("a"), *bad, item("b", [9], attempt=3, metadata={"k": 1}))
    assert [(r.position, r.request_id) for r in refusals] == [(1, "empty"), (2, "text"), (3, "far"), (4, "long")]
    assert {type(r.error) for r in refusals} == {InvalidRequestError}
    results, _ = read(host, 2)
    by_id = {finished.rollout.rollout_id: finished for finished in results}
    assert by_id.keys() == {"a", "b"}
    a, b = by_id["a"].rollout, by_id["b"].rollout
    assert a.token_ids == greedy_reference(tiny_llama(), [5, 6, 7], 4)
    assert (a.worker_id, a.attempt, a.prompt_ids) == ("w0", 0, [5, 6, 7])
    assert (b.attempt, b.metadata, by_id["b"].attempt, by_id["b"].incarnation) == (3, {"k": 1}, 3, 2)


def test_results_stay_until_the_reader_says_that_it_has_them(host: WorkerHost) -> None:
    submit(host, item("a"), item("b"), item("c"))
    wait_until(lambda: host.report().engine.finished == 3)
    first, last = read(host, 2)
    again, _ = read(host, 2)  # the answer was lost on its way
    assert [f.rollout.rollout_id for f in first] == [f.rollout.rollout_id for f in again]
    rest, _ = read(host, 1, read_up_to=last)
    assert {f.rollout.rollout_id for f in first + rest} == {"a", "b", "c"}


def test_the_same_attempt_twice_is_taken_once_and_another_one_is_refused_while_it_runs(host: WorkerHost) -> None:
    host.call(worker_jobs.slow_down, (), {}, 20)
    long = item("a", tokens=200)
    assert submit(host, long) == []
    assert submit(host, long) == []
    (refusal,) = submit(host, item("a", tokens=200, attempt=1))
    assert "already in flight" in str(refusal.error)
    assert host.cancel(["a"]) == []
    results, last = read(host, 1)
    assert (results[0].rollout.finish_reason, results[0].attempt) == (FinishReason.ABORT, 0)
    assert host.poll(last, 8, 0.01)[1] == last, "a second result of one request"


def test_what_is_held_is_bounded_and_reading_makes_room(host: WorkerHost) -> None:
    refusals = submit(host, item("group", size=6), *(item(f"r{n}") for n in range(4)))
    assert [(r.request_id, type(r.error)) for r in refusals] == [("r2", WorkerBusyError), ("r3", WorkerBusyError)]
    wait_until(lambda: host.report().engine.finished == 8)
    assert [type(r.error) for r in submit(host, item("late"))] == [WorkerBusyError], "unread results count"
    results, last = read(host, 8)
    assert {f.rollout.rollout_id for f in results} == {*(f"group-{n}" for n in range(6)), "r0", "r1"}
    assert submit(host, item("late"), read_up_to=last) == []
    assert len(submit(host, *(item(f"bad{n}", []) for n in range(20)), read_up_to=last)) == 20, (
        "refused ones hold nothing"
    )
    # a name whose results have been read may be used again
    assert submit(host, item("r0"), read_up_to=last) == []


def test_cancel_ends_all_of_a_group_or_one_of_it_and_names_what_it_did_not_find(host: WorkerHost) -> None:
    host.call(worker_jobs.slow_down, (), {}, 20)
    submit(host, item("g", size=3, tokens=300), item("h", size=2, tokens=300))
    assert host.cancel(["g", "h-1", "never"]) == ["never"]
    results, _ = read(host, 4)
    assert {f.rollout.rollout_id for f in results} == {"g-0", "g-1", "g-2", "h-1"}
    assert {f.rollout.finish_reason for f in results} == {FinishReason.ABORT}
    (partial,) = unpack(host.snapshot())
    assert (partial.rollout.rollout_id, partial.rollout.finish_reason) == ("h-0", None)


def test_poll_wakes_with_the_first_result_and_is_empty_at_its_limit(host: WorkerHost) -> None:
    batch, last = host.poll(0, 8, 0.01)
    assert (unpack(batch), last) == ([], 0)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(host.poll, 0, 8, 500.0)
        submit(host, item("a"))
        batch, _ = poll.result(20)
    assert [f.rollout.rollout_id for f in unpack(batch)] == ["a"]


class OnlyHere:
    """What a worker may not be able to import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in_thread, (threading.get_ident(),)


def _only_in_thread(thread: int) -> str:
    assert thread == threading.get_ident(), "read in the worker"
    return "read by its owner"


def test_metadata_is_never_read_in_the_worker(host: WorkerHost) -> None:
    parcel = to_parcel(0, item("a", metadata={"what": OnlyHere()}))
    with ThreadPoolExecutor(1) as worker:  # its thread stands for its process
        assert worker.submit(host.submit, [parcel], 0).result(20) == []
        batch, _ = worker.submit(host.poll, 0, 8, 20.0).result(30)
    assert unpack(batch)[0].rollout.metadata == {"what": "read by its owner"}


class Unreadable:
    """Can be pickled, but not read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize("value", [threading.Lock(), Unreadable()])
def test_what_cannot_be_sent_or_read_again_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'a' cannot be sent"):
        to_parcel(0, item("a", metadata={"value": value}))


def test_a_partial_rollout_goes_on_in_the_worker(host: WorkerHost) -> None:
    submit(host, item("a", tokens=3, metadata={"k": 1}))
    results, last = read(host, 1)
    submit(host, item("a", tokens=9, attempt=1, resume_from=results[0].rollout), read_up_to=last)
    resumed = read(host, 1, last)[0][0].rollout
    assert resumed.token_ids == greedy_reference(tiny_llama(), [5, 6, 7], 9)
    assert (resumed.attempt, resumed.metadata) == (1, {"k": 1})


def test_close_leaves_what_was_in_flight_and_what_was_not_read_to_be_polled() -> None:
    host = opened(config())
    host.call(worker_jobs.slow_down, (), {}, 20)
    submit(host, item("read", tokens=1), item("short", tokens=1), item("long", tokens=300))
    _, last = read(host, 1)
    read(host, 1, last)
    host.close(20)
    left = {f.rollout.rollout_id: f.rollout.finish_reason for f in unpack(host.poll(last, 8, 500)[0])}
    assert left == {"short": FinishReason.LENGTH, "long": FinishReason.ABORT}
    with ThreadPoolExecutor(1) as pool:
        assert unpack(pool.submit(host.poll, last + 2, 8, 500.0).result(20)[0]) == [], "it waits for what cannot come"
    assert [type(r.error) for r in submit(host, item("late"))] == [WorkerDiedError]
    assert not any(thread.name == "rollsync-keeper" for thread in threading.enumerate())


# ----------------------------------------------------------------------------------------------- versions and state


def test_a_stale_worker_serves_nothing_until_an_update_brings_it_to_its_version() -> None:
    host = opened(config(model="worker_jobs:marker_llama"), serve_from_version=5)
    assert host.report().state == WorkerState.STALE
    assert [type(r.error) for r in submit(host, item("a"))] == [WorkerStaleError]
    host.call(worker_jobs.publish, (4,), {}, 20)
    assert [type(r.error) for r in submit(host, item("a"))] == [WorkerStaleError], "an older version is not enough"
    host.call(worker_jobs.publish, (7,), {}, 20)
    assert (host.report().state, host.report().version) == (WorkerState.HEALTHY, 7)
    assert submit(host, item("a")) == []
    rollout = read(host, 1)[0][0].rollout
    assert (rollout.token_ids, rollout.versions) == ([7] * 4, [7] * 4)
    host.require_version(8)
    host.require_version(2)
    assert host.report().state == WorkerState.STALE
    host.close(20)


def test_a_fenced_engine_makes_the_worker_stale_until_an_update_succeeds(host: WorkerHost) -> None:
    with pytest.raises(OSError, match="broke off"):
        host.call(worker_jobs.fence, (), {}, 20)
    assert host.report().state == WorkerState.STALE
    assert [type(r.error) for r in submit(host, item("a"))] == [EngineFencedError]
    host.call(worker_jobs.publish, (1,), {}, 20)
    assert host.report().state == WorkerState.HEALTHY


def test_a_heartbeat_waits_for_a_change_and_for_no_longer_than_told(host: WorkerHost) -> None:
    assert host.beat(None, 500).state == WorkerState.HEALTHY
    assert host.beat((WorkerState.HEALTHY, 0), 0.01).version == 0
    with ThreadPoolExecutor(1) as pool:
        beat = pool.submit(host.beat, (WorkerState.HEALTHY, 0), 500)
        host.call(worker_jobs.publish, (1,), {}, 20)
        assert beat.result(20).version == 1


def test_a_call_that_takes_too_long_says_so_and_one_that_has_not_begun_is_not_run(host: WorkerHost) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(host.call, lambda _: release.wait(30), (), {}, 0.2)
        with pytest.raises(WorkerUnreachableError, match="is still running there"):
            begun.result(20)
        ran: list[int] = []
        with pytest.raises(WorkerUnreachableError, match="had not begun and will not"):
            host.call(lambda _: ran.append(1), (), {}, 0.05)
        release.set()
    assert host.call(worker_jobs.version_of, (), {}, 20) == 0
    assert ran == []


# ------------------------------------------------------------------------------------------------ the engine's death


def test_a_dead_engine_comes_back_at_its_version_and_its_partials_can_go_on(host: WorkerHost) -> None:
    host.call(worker_jobs.publish, (3,), {}, 20)
    host.call(worker_jobs.slow_down, (), {}, 20)
    submit(host, item("a", tokens=200), item("b", tokens=200))
    wait_until(lambda: [bool(f.rollout.token_ids) for f in unpack(host.snapshot())] == [True, True])
    host.call(worker_jobs.kill_loop, (), {}, 20)
    failed, last = read(host, 2)
    assert {f.rollout.finish_reason for f in failed} == {FinishReason.ERROR}
    assert all("a step failed" in str(f.rollout.error) for f in failed)
    assert all(f.rollout.token_ids for f in failed), "the tokens before the death"
    host.call(worker_jobs.full_speed, (), {}, 20)
    again = [item(f.rollout.rollout_id, tokens=200, attempt=1, resume_from=f.rollout) for f in failed]
    assert submit(host, *again, read_up_to=last) == [], "submit waits for the engine"
    for finished in read(host, 2, last)[0]:
        assert (finished.rollout.versions, finished.attempt) == ([3] * 200, 1)
    assert (host.report().version, host.report().state) == (3, WorkerState.HEALTHY)


def test_an_engine_without_requests_is_brought_back_too(host: WorkerHost) -> None:
    host.call(worker_jobs.kill_loop, (), {}, 20)
    submit(host, item("a"))
    read(host, 1)
    wait_until(lambda: host.report().state == WorkerState.HEALTHY)


def test_the_keeper_tries_again_whatever_kept_the_engine_from_coming_back(host: WorkerHost) -> None:
    restart, tries = host._engine.restart, []

    def fail_once() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        restart()

    host._engine.restart = fail_once
    host.call(worker_jobs.kill_loop, (), {}, 20)
    submit(host, item("a"))
    read(host, 1)
    wait_until(lambda: len(tries) == 2 and host.report().state == WorkerState.HEALTHY)


def test_deaths_count_only_in_a_row() -> None:
    host = opened(config(max_engine_restarts=1))
    last = 0
    for number in range(3):
        host.call(worker_jobs.kill_loop, (), {}, 20)
        for name in (f"dies{number}", f"ends-well{number}"):
            assert submit(host, item(name), read_up_to=last) == []
            last = read(host, 1, last)[1]
    assert host.report().state == WorkerState.HEALTHY
    host.close(20)


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    host = opened(config(max_engine_restarts=1))
    last = 0
    for number in range(2):
        host.call(worker_jobs.kill_loop, (), {}, 20)
        assert submit(host, item(f"r{number}"), read_up_to=last) == []
        last = read(host, 1, last)[1]
    wait_until(lambda: host.report().state == WorkerState.DEAD)
    assert [type(r.error) for r in submit(host, item("late"))] == [EngineDeadError]
    host.close(20)


# ------------------------------------------------------------------------------------------------------- the wire


def test_results_come_back_as_they_were_with_float32_logprobs() -> None:
    logprobs = [float(value) for value in torch.randn(5).neg_().tolist()]
    common: dict[str, Any] = {"prefill_version": 2**40, "finish_reason": FinishReason.LENGTH, "metadata": {}}
    rollouts = [
        Rollout(
            rollout_id="spans",
            prompt_ids=[2**31 - 1, 0],
            token_ids=[1, 2, 3, 4, 5],
            logprobs=logprobs,
            loss_mask=[1, 1, 0, 1, 0],
            version_spans=[VersionSpan(0, 3), VersionSpan(2, 2**40)],
            **common,
        ),
        Rollout(
            rollout_id="empty", prompt_ids=[7], token_ids=[], logprobs=[], loss_mask=[], version_spans=[], error="e", **common
        ),
        Rollout(
            rollout_id="last", prompt_ids=[8], token_ids=[9], logprobs=logprobs[:1], loss_mask=[1], version_spans=[VersionSpan(0, 0)], **common
        ),
    ]  # fmt: skip
    results = [Finished(rollout=rollout, attempt=number, incarnation=4) for number, rollout in enumerate(rollouts)]
    packed = pack([Kept(finished=finished, metadata=pickle.dumps({"of": n})) for n, finished in enumerate(results)])
    expected = [replace(f, rollout=replace(f.rollout, metadata={"of": n})) for n, f in enumerate(results)]
    assert unpack(pickle.loads(pickle.dumps(packed))) == expected
    assert unpack(pack([])) == []


# ------------------------------------------------------------------------------------------------------- settings


def test_a_function_of_a_module_becomes_its_name() -> None:
    assert WorkerConfig(model=tiny_llama).model == "fakes:tiny_llama"
    assert pickle.loads(pickle.dumps(WorkerConfig(model=tiny_llama))) == WorkerConfig(model="fakes:tiny_llama")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": tiny_llama()}, "objects are not sent"),
        ({"model": lambda: None}, "at the top level of a module"),
        ({"model": ""}, "model"),
        ({"engine": EngineConfig(max_waiting=3)}, "max_outstanding"),
        ({"max_outstanding": 0}, "max_outstanding"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"call_timeout_s": 0}, "call_timeout_s"),
        ({"call_timeout_s": float("inf")}, "call_timeout_s"),
        ({"heartbeat_s": 5.0, "suspect_after_s": 5.0}, "suspect_after_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        config(**changes)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("worker_jobs:no_such_model", "cannot be imported in the worker"),
        ("no_such_module:model", "cannot be imported in the worker"),
        ("worker_jobs:linear_model", "must return a transformers PreTrainedModel, got Linear"),
        ("worker_jobs:failing_model", "3 heads"),
        ("no/such/folder/or/name", "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(model: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        opened(config(model=model))


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"request_id": ""}, "request_id"), ({"request_id": None}, "request_id"), ({"attempt": -1}, "attempt")],
)
def test_an_item_needs_a_name_and_a_valid_attempt(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        WorkItem(**{"request_id": "a", "prompt_ids": [1], **fields})


def test_worker_errors_are_rollout_errors() -> None:
    for kind in (WorkerDiedError, WorkerStaleError, WorkerBusyError, WorkerUnreachableError):
        assert issubclass(kind, RolloutError)
    assert issubclass(WorkerUnreachableError, TimeoutError)

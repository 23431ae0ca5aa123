"""Every request ends in one result, however it ends: cancelled, timed out, evicted on the way, or called back."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    AlarmsByHand,
    StepGate,
    forward_logprobs,
    greedy_reference,
    random_prompts,
    tiny_llama,
    wait_until,
)

from rollout import (
    EngineConfig,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    SamplingParams,
)
from rollout.requests.results import RequestQueue

TINY_CACHE = EngineConfig(page_size=4, num_blocks=12, max_batch_tokens=32)  # 48 tokens


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


ENDLESS = greedy(400)


# ----------------------------------------------------------------------------------------------- cancel and timeout


def test_cancelling_a_waiting_request_resolves_it_at_once_without_tokens() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=1))
    gate = StepGate(engine)
    with engine:
        active = engine.submit([5], greedy(3))
        gate.wait_for_arrival()
        waiting = engine.submit([6], greedy(3), request_id="waiting")
        engine.cancel("waiting")
        rollout = waiting.result(30)  # though no step can end
        assert (rollout.finish_reason, rollout.token_ids, rollout.error) == (FinishReason.ABORT, [], None)
        assert (rollout.prefill_version, rollout.version_spans, rollout.timings.started_at) == (None, [], None)
        gate.open()
        assert active.result(30).finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("by_future", [True, False])
def test_cancelling_an_active_request_resolves_it_with_what_it_has(by_future: bool) -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)
    gate = StepGate(engine)
    with engine:
        future, other = engine.submit([5, 6], ENDLESS, request_id="a"), engine.submit([7], greedy(9))
        gate.step(3)
        gate.wait_for_arrival()
        if by_future:
            assert future.cancel() is True
        else:
            engine.cancel("a")
        gate.open()
        rollout = future.result(30)
        assert rollout.finish_reason == FinishReason.ABORT
        assert rollout.token_ids == greedy_reference(model, [5, 6], len(rollout.token_ids))
        assert len(rollout.token_ids) in (3, 4), "the step that stood before the gate may still count"
        expected = forward_logprobs(model, [5, 6], rollout.token_ids)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)
        assert not future.cancelled()
        assert future.cancel() is False, "it has ended"
        assert other.result(30).token_ids == greedy_reference(model, [7], 9)


def test_cancelling_twice_is_one_cancel() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], ENDLESS, request_id="a")
        gate.wait_for_arrival()
        engine.cancel("a")
        engine.cancel("a")  # not yet ended
        gate.open()
        assert future.result(30).finish_reason == FinishReason.ABORT
        assert engine.stats().finished == 1


def test_cancelling_an_id_that_is_not_in_flight_is_an_error() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        for unknown in ("nobody", "", "rollsync-0", None, 5):
            with pytest.raises(InvalidRequestError, match=f"no request {unknown!r} is in flight"):
                engine.cancel(unknown)
        engine.submit([5], greedy(2), request_id="a").result(30)
        with pytest.raises(InvalidRequestError, match="no request 'a' is in flight: it has ended"):
            engine.cancel("a")


class QueueThatTells(RequestQueue):
    """Calls back, once, right after it was found empty."""

    when_empty: Callable[[], None] | None = None

    def empty(self) -> bool:
        was_empty = super().empty()
        if was_empty and self.when_empty is not None:
            call, self.when_empty = self.when_empty, None
            call()
        return was_empty


def test_a_cancel_between_the_loops_two_looks_is_not_lost() -> None:
    """The loop drains new requests first and cancels second: both may come in between."""
    engine = GenerationEngine(tiny_llama())
    inbox = QueueThatTells()
    engine.manager.input_queue = engine.manager.batch_processor.input_queue = inbox
    futures: list[Future[Rollout]] = []
    told = threading.Event()

    def submit_and_cancel() -> None:  # on the loop's thread
        futures.append(engine.submit([5], ENDLESS, request_id="a"))
        engine.cancel("a")
        told.set()

    with engine:
        inbox.when_empty = submit_and_cancel
        assert told.wait(30)
        rollout = futures[0].result(30)
        assert rollout.finish_reason == FinishReason.ABORT
        assert rollout.token_ids == []


def test_a_request_that_takes_too_long_ends_with_what_it_has() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model, EngineConfig(max_requests=1))
    alarms, gate = AlarmsByHand(engine), StepGate(engine)
    with engine:
        active = engine.submit([5], ENDLESS, timeout_s=100)
        gate.step(2)
        gate.wait_for_arrival()
        waiting = engine.submit([6], ENDLESS, timeout_s=100)
        alarms.ring()
        assert waiting.result(30).finish_reason == FinishReason.TIMEOUT
        assert waiting.result(30).token_ids == []
        gate.open()
        rollout = active.result(30)
    assert rollout.finish_reason == FinishReason.TIMEOUT
    assert rollout.token_ids == greedy_reference(model, [5], len(rollout.token_ids))
    assert len(rollout.token_ids) in (2, 3)
    assert len(rollout.logprobs) == len(rollout.token_ids)


def test_a_timeout_that_does_not_come_to_pass_leaves_nothing_behind() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        future = engine.submit([5], greedy(2), timeout_s=1000)
        assert future.result(30).finish_reason == FinishReason.LENGTH
        wait_until(lambda: len(engine._tracker.alarms) == 0)


def test_a_cancel_before_the_timeout_stays_a_cancel() -> None:
    engine = GenerationEngine(tiny_llama())
    alarms, gate = AlarmsByHand(engine), StepGate(engine)
    with engine:
        active = engine.submit([5], ENDLESS, timeout_s=100)
        gate.wait_for_arrival()
        active.cancel()
        alarms.ring()
        gate.open()
        assert active.result(30).finish_reason == FinishReason.ABORT


def test_cancels_that_race_with_the_end_resolve_every_future_once() -> None:
    model = tiny_llama()
    expected = greedy_reference(model, [5], 12)
    resolved: list[str] = []
    with GenerationEngine(model, EngineConfig(max_requests=4)) as engine:
        futures = [engine.submit([5], greedy(12)) for _ in range(80)]
        for future in futures:
            future.add_done_callback(lambda f: resolved.append(f.request_id))
        for index, future in enumerate(futures):
            if index % 3 == 0:
                future.cancel()
            if index % 3 == 1:
                futures[-1 - index].cancel()
        for future in futures:
            rollout = future.result(60)
            assert rollout.token_ids == expected[: len(rollout.token_ids)]
            if len(rollout.token_ids) < 12:
                assert rollout.finish_reason == FinishReason.ABORT
        wait_until(lambda: len(resolved) == 80)
        assert len(set(resolved)) == 80
        assert engine.stats().finished == 80
        assert engine.generate([[5]], greedy(12))[0].token_ids == expected


# --------------------------------------------------------------------------------------------------- a full KV cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_requests_that_lose_their_cache_still_say_what_generate_says(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    prompts = random_prompts([5, 9, 3, 7, 6, 8])
    with GenerationEngine(model, TINY_CACHE) as engine:
        room = min(engine.manager.max_request_tokens - 9, 30)
        rollouts = engine.generate(prompts, greedy(room))
        preemptions = engine.stats().preemptions
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == greedy_reference(model, prompt, room)
        expected = forward_logprobs(model, prompt, rollout.token_ids)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)
        assert rollout.versions == [0] * room
        assert rollout.prompt_ids == prompt
    assert preemptions > 0, "the cache was too large to test anything"
    assert sum(rollout.num_reprefills for rollout in rollouts) == preemptions


def test_a_seeded_request_draws_the_same_though_it_loses_its_cache() -> None:
    params = SamplingParams(max_new_tokens=30, temperature=1, stop_token_ids=(), seed=5)
    prompts = random_prompts([5, 9, 3, 7, 6, 8])
    drawn = []
    for config in (TINY_CACHE, EngineConfig()):
        with GenerationEngine(tiny_llama(), config) as engine:
            drawn.append([rollout.token_ids for rollout in engine.generate(prompts, params)])
            assert (engine.stats().preemptions > 0) == (config is TINY_CACHE)
    assert drawn[0] == drawn[1]


def until_preempted(engine: GenerationEngine, gate: StepGate, count: int) -> list[Future[Rollout]]:
    """Starts `count` requests and steps until one of them loses its cache; a forward stands before the gate."""
    futures = [engine.submit(prompt, greedy(30)) for prompt in random_prompts([5] * count)]
    for _ in range(40):
        gate.wait_for_arrival()
        if engine.stats().preemptions:
            return futures
        gate.step()
    raise AssertionError("nobody lost its cache")


def test_after_an_eviction_and_a_cancel_of_all_the_next_request_is_served() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model, TINY_CACHE)
    gate = StepGate(engine)
    with engine:
        futures = until_preempted(engine, gate, 4)
        for future in futures:
            future.cancel()
        gate.open()
        for future in futures:
            assert future.result(30).finish_reason == FinishReason.ABORT
        assert engine.submit([5], greedy(5)).result(30).token_ids == greedy_reference(model, [5], 5)


def test_after_an_eviction_and_a_cancel_of_the_others_the_evicted_one_goes_on() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model, TINY_CACHE)
    gate = StepGate(engine)
    with engine:
        futures = until_preempted(engine, gate, 4)
        gate.is_open = True
        snapshot = engine.call(lambda engine: [(r.rollout_id, r.num_reprefills) for r in engine.snapshot()])
        gate.open()
        evicted = {name for name, reprefills in snapshot.result(30) if reprefills}
        assert evicted
        for future in futures:
            if future.request_id not in evicted:
                future.cancel()
        for future, prompt in zip(futures, random_prompts([5] * 4), strict=True):
            rollout = future.result(30)
            if future.request_id in evicted:
                assert rollout.token_ids == greedy_reference(model, prompt, 30)


def test_cancelling_an_evicted_request_keeps_the_tokens_it_had() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model, TINY_CACHE)
    gate = StepGate(engine)
    with engine:
        futures = until_preempted(engine, gate, 4)
        for future in futures:
            future.cancel()
        gate.open()
        for future, prompt in zip(futures, random_prompts([5] * 4), strict=True):
            rollout = future.result(30)
            assert len(rollout.token_ids) > 3
            assert rollout.token_ids == greedy_reference(model, prompt, len(rollout.token_ids))
            assert rollout.prompt_ids == prompt
            assert rollout.prefill_version == 0


# ---------------------------------------------------------------------------------------------------------- callbacks


def test_a_callback_may_call_any_method_that_does_not_wait_for_a_result() -> None:
    said: dict[str, object] = {}
    done = threading.Event()
    with GenerationEngine(tiny_llama()) as engine:
        long = engine.submit([6], ENDLESS)

        def callback(future: Future[Rollout]) -> None:
            said["version"] = engine.version
            with engine.update() as model:
                said["model"] = model
            said["stats"] = engine.stats()
            said["snapshot"] = engine.snapshot()
            said["call"] = engine.call(lambda engine: engine.version).result(30)
            engine.cancel(long.request_id)
            said["submitted"] = engine.submit([7], greedy(2))
            done.set()

        engine.submit([5], greedy(2)).add_done_callback(callback)
        assert done.wait(30)
        assert long.result(30).finish_reason == FinishReason.ABORT
        assert len(said["submitted"].result(30).token_ids) == 2
    assert (said["version"], said["call"], said["stats"].version) == (0, 1, 1)
    assert [rollout.prompt_ids for rollout in said["snapshot"]] == [[6]]


def test_generate_in_a_callback_would_wait_for_itself_and_is_refused() -> None:
    caught: Future[BaseException] = Future()
    with GenerationEngine(tiny_llama()) as engine:

        def callback(_: Future[Rollout]) -> None:
            try:
                engine.generate([[6]], greedy(2))
            except EngineStateError as error:
                caught.set_result(error)

        engine.submit([5], greedy(2)).add_done_callback(callback)
        assert "callback would wait for itself; use submit()" in str(caught.result(30))


def test_a_chain_of_callbacks_can_go_on_for_long() -> None:
    left = [300]
    done = threading.Event()
    with GenerationEngine(tiny_llama(), EngineConfig(max_requests=1, max_waiting=1)) as engine:

        def again(_: Future[Rollout]) -> None:
            left[0] -= 1
            if left[0]:
                engine.submit([5], greedy(1)).add_done_callback(again)
            else:
                done.set()

        engine.submit([5], greedy(1)).add_done_callback(again)
        assert done.wait(60)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_hurts_no_other_future(error: type[BaseException]) -> None:
    def callback(_: Future[Rollout]) -> None:
        raise error("from a callback")

    with GenerationEngine(tiny_llama()) as engine:
        engine.submit([5], greedy(1)).add_done_callback(callback)
        assert len(engine.submit([6], greedy(3)).result(30).token_ids) == 3

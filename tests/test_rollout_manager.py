"""What the manager adds to upstream's: bounded pauses, a hold; and upstream's own API beside the engine's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import StepGate, greedy_reference, random_prompts, tiny_llama, wait_until
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching import requests as states

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineState,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    PauseTimeoutError,
    SamplingParams,
)
from rollout.manager import RolloutManager


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


# ----------------------------------------------------------------------------------------------------------- pauses


def test_the_loop_is_a_daemon_with_a_name() -> None:
    with GenerationEngine(tiny_llama()):
        (loop,) = [thread for thread in threading.enumerate() if thread.name == "rollsync-loop"]
        assert loop.daemon


def test_a_pause_that_comes_too_late_leaves_the_loop_running() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        for _ in range(3):
            with pytest.raises(PauseTimeoutError, match=r"did not end within 0\.02 s.*lower max_batch_tokens"):
                engine.manager.pause_within(0.02).__enter__()
        gate.open()
        assert future.result(30).finish_reason == FinishReason.LENGTH


def test_a_pause_whose_wait_is_broken_off_leaves_the_loop_running() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        with pytest.raises(OverflowError):  # as an interrupt would, it strikes inside the wait
            engine.manager.pause_within(float("inf")).__enter__()
        gate.open()
        assert future.result(30).finish_reason == FinishReason.LENGTH


def test_pauses_given_up_at_any_moment_never_park_the_loop() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        future = engine.submit([5], greedy(300))
        entered = 0
        for attempt in range(200):
            try:
                with engine.manager.pause_within(attempt % 20 * 1e-4):
                    entered += 1
            except PauseTimeoutError:
                pass
        assert future.result(60).token_ids == greedy_reference(model, [5], 300)
        assert 0 < entered < 200, "both ends were met"


def test_pauses_nest_and_overlap_and_upstreams_own_works_beside_ours() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        future = engine.submit([5], greedy(100))
        with engine.manager.pause_within(30), engine.manager.pause(), engine.manager.pause_within(30):
            tokens = engine.stats().generated_tokens
            assert threading.Event().wait(0.05) is False
            assert engine.stats().generated_tokens == tokens

        def pause(_: int) -> None:
            with engine.manager.pause_within(30):
                pass

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(pause, range(40)))
        assert future.result(30).token_ids == greedy_reference(model, [5], 100)


def test_an_exception_inside_a_pause_resumes_the_loop() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with pytest.raises(KeyError), engine.manager.pause_within(30):
            raise KeyError("mine")
        assert len(engine.generate([[5]], greedy(3))[0].token_ids) == 3


def test_pausing_a_loop_that_has_ended_is_an_error_at_once() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        pass
    with pytest.raises(EngineDeadError, match="not running"):
        engine.manager.pause_within(1000).__enter__()


def test_a_held_loop_runs_nothing_and_answers_pauses_and_cancels() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine, is_open=True)
    with engine:
        engine.manager.hold()
        futures = [engine.submit([5], greedy(3)) for _ in range(2)]
        with engine.manager.pause_within(30):
            assert gate.steps == 0
        futures[0].cancel()
        assert futures[0].result(30).finish_reason == FinishReason.ABORT
        assert gate.steps == 0
        engine.manager.release()
        assert futures[1].result(30).finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("to_the_cpu", [True, False])
def test_an_evicted_request_stays_unshareable_only_if_its_kv_comes_back(to_the_cpu: bool) -> None:
    """The steps of upstream's eviction, by hand: moving KV to the CPU needs pinned memory."""
    engine = GenerationEngine(tiny_llama())
    processor = engine.manager.batch_processor
    scheduler, kv = processor.scheduler, processor.cache
    state = states.RequestState(request_id="a", initial_tokens=[5, 6], _true_initial_tokens=1)
    scheduler.active_requests["a"] = state
    kv.unshareable.add("a")  # there was an update
    kv.free_blocks("a", no_cache=True)
    state.is_cpu_offloaded = to_the_cpu
    scheduler.finish_request("a")
    scheduler.add_waiting_request(state)
    assert ("a" in kv.unshareable) == to_the_cpu
    assert engine.stats().preemptions == (not to_the_cpu)
    scheduler.waiting_requests.clear()
    scheduler.finish_request("a")
    assert kv.unshareable == set()
    engine.stop()


@pytest.mark.parametrize(
    ("prompt", "before", "booked", "processed", "sampled"),
    [
        (4, 0, 0, 0, 0),  # not started
        (4, 0, 0, 2, 0),  # half prefilled
        (4, 0, 0, 4, 1),  # prefilled, its first token sampled and not yet booked
        (4, 0, 1, 4, 1),  # booked
        (4, 0, 1, 5, 2),  # asynchronous batching: the step after has run as well
        (4, 3, 0, 0, 3),  # evicted after three tokens, or resumed with them
        (4, 3, 0, 5, 3),  # half prefilled again
        (4, 3, 0, 7, 4),
        (4, 3, 2, 8, 5),
        (4, 3, 2, 9, 6),
    ],
)
def test_progress_counts_every_token_that_is_sampled_booked_or_not(
    prompt: int, before: int, booked: int, processed: int, sampled: int
) -> None:
    manager = GenerationEngine(tiny_llama()).manager
    state = states.RequestState(
        request_id="a", initial_tokens=[5] * (prompt + before), _true_initial_tokens=prompt if before else 0
    )
    state.generated_tokens, state.position_offset = [6] * booked, processed
    manager.batch_processor.scheduler.active_requests["a"] = state
    assert manager.progress()["a"].num_sampled == sampled


@pytest.mark.parametrize("status", [states.RequestStatus.FAILED, states.RequestStatus.DECODING])
def test_a_batch_that_ends_after_its_request_was_cancelled_marks_no_blocks(status: states.RequestStatus) -> None:
    cache = GenerationEngine(tiny_llama(), EngineConfig(page_size=4)).manager.batch_processor.cache
    state = states.RequestState(request_id="gone", initial_tokens=[5] * 8)
    state._status = status  # asynchronous batching books the batch that was under way when the blocks were freed
    cache.mark_complete_blocks(state, dict.fromkeys(cache.cache_allocators, 2))
    assert all(not allocator.ledger.hash_to_block for allocator in cache.cache_allocators.values())


# ---------------------------------------------------------------------------------------------------- upstream's API


def upstream_result(engine: GenerationEngine, request_id: str) -> states.GenerationOutput:
    found: list[states.GenerationOutput] = []

    def look() -> bool:
        result = engine.manager.get_result(request_id, timeout=0.1)
        if result is not None:
            found.append(result)
        return bool(found)

    wait_until(look)
    return found[0]


def test_requests_of_upstreams_own_api_run_beside_ours() -> None:
    model = tiny_llama()
    prompts = random_prompts([4, 9])
    with GenerationEngine(model) as engine:
        ours = engine.submit(prompts[0], greedy(20))
        theirs = engine.manager.add_request(prompts[1], max_new_tokens=20, eos_token_id=-1, temperature=0.0)
        result = upstream_result(engine, theirs)
        assert result.generated_tokens == greedy_reference(model, prompts[1], 20)
        assert result.status == states.RequestStatus.FINISHED
        assert ours.result(30).token_ids == greedy_reference(model, prompts[0], 20)
        assert engine.manager.output_router.output_queue.empty(), "ours never get into upstream's queue"


def test_upstream_streaming_still_streams() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        name = engine.manager.add_request([5], max_new_tokens=4, eos_token_id=-1, streaming=True, temperature=0.0)
        streamed = [len(output.generated_tokens) for output in engine.manager.request_id_iter(name)]
        assert streamed == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 1.1},
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_k": -1},
        {"seed": -1},
        {"sample_index": -1},
    ],
    ids=str,
)
def test_a_wrong_parameter_of_an_upstream_request_is_refused(wrong: dict[str, object]) -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)
    gate = StepGate(engine)
    with engine:
        ours = engine.submit([5], greedy(10))
        gate.wait_for_arrival()
        try:
            with pytest.raises(InvalidRequestError):
                engine.manager.add_request([6], max_new_tokens=3, **wrong)
        finally:
            gate.open()
        assert ours.result(30).token_ids == greedy_reference(model, [5], 10)
        assert engine.state == EngineState.RUNNING


def test_the_manager_is_one_of_upstreams() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(num_blocks=16, page_size=16))
    assert isinstance(engine.manager, RolloutManager)
    assert isinstance(engine.manager, continuous_api.ContinuousBatchingManager)
    assert engine.manager.max_request_tokens == 256
    engine.stop()

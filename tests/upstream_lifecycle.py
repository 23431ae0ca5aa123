"""Rules of how upstream's manager starts, pauses and stops."""

import contextlib
import threading

import pytest
from fakes import greedy_reference, mark, marker_llama, random_prompts, tiny_llama, wait_until
from transformers.generation.continuous_batching.requests import RequestStatus
from upstream_rows import assert_still_right, finished, gated, greedy, row

from rollout import (
    EngineConfig,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
)


@row("is_running")
def follows_the_loop() -> None:
    engine = GenerationEngine(tiny_llama())
    assert not engine.manager.is_running()
    with engine:
        assert engine.manager.is_running()
    assert not engine.manager.is_running()


@row("start")
def starts_the_engine_once() -> None:
    engine = GenerationEngine(tiny_llama())
    engine.manager.start()
    assert engine.state == EngineState.RUNNING
    loop = [thread for thread in threading.enumerate() if thread.name == "rollsync-loop"]
    engine.manager.start()
    assert [thread for thread in threading.enumerate() if thread.name == "rollsync-loop"] == loop
    assert_still_right(engine)
    engine.stop()
    with pytest.raises(EngineStateError, match="stopped; make a new one"):
        engine.manager.start()


@row("start")
def after_a_kept_stop_goes_on_with_an_empty_cache() -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([40])
    with GenerationEngine(model, EngineConfig(page_size=4)) as engine:
        engine.generate([prompt], greedy(4))
        for start in (engine.manager.start, engine.start):
            engine.manager.stop(keep_for_next_session=True)
            assert engine.state == EngineState.CREATED
            with pytest.raises(EngineStateError, match="not started"):
                engine.submit([5])
            start()
            before = engine.stats().prefix_hits
            assert engine.generate([prompt], greedy(4))[0].token_ids == greedy_reference(model, prompt, 4)
            assert engine.stats().prefix_hits == before, "KV of another session was found"


@row("start")
def after_weights_have_changed_between_sessions_fences_rather_than_mislabel() -> None:
    model = marker_llama()
    with GenerationEngine(model) as engine:
        engine.manager.stop(keep_for_next_session=True)
        mark(model, 3)
        engine.manager.start()
        assert engine.submit([5], greedy(3)).result(30).token_ids == []
        assert engine.state == EngineState.FENCED
        with engine.update() as shell:
            mark(shell, 1)
        rollout = engine.submit([5], greedy(3)).result(30)
        assert rollout.token_ids == rollout.versions == [1, 1, 1]


@row("start")
def while_the_last_session_still_finishes_is_refused() -> None:
    with gated() as (engine, gate):
        future = engine.submit([5], greedy(3))
        gate.wait_for_arrival()
        engine.manager.stop(block=False, keep_for_next_session=True)
        with pytest.raises(EngineStateError, match="still finishing"):
            engine.start()
        gate.open()
        assert future.result(30).finish_reason == FinishReason.LENGTH
        engine.manager.join(0.0)
        engine.start()
        assert_still_right(engine)


@row("stop")
def lets_what_is_queued_and_in_flight_run_to_its_end() -> None:
    with gated(EngineConfig(max_requests=2)) as (engine, gate):
        ours = [engine.submit([n], greedy(5)) for n in range(2, 9)]  # most of them still wait their turn
        theirs = engine.manager.add_request([9], max_new_tokens=5, eos_token_id=-1)
        gate.wait_for_arrival()
        stopper = threading.Thread(target=engine.manager.stop)
        stopper.start()
        wait_until(lambda: engine.state == EngineState.STOPPED)
        with pytest.raises(EngineStateError, match="stopped"):
            engine.submit([5])
        gate.open()
        stopper.join(30)
        assert not engine.manager.is_running()
        for n, future in enumerate(ours, start=2):
            assert future.result(30).token_ids == greedy_reference(tiny_llama(), [n], 5)
        finished(engine, theirs, 5)


@row("stop")
def that_does_not_wait_or_waits_too_short_kills_nothing() -> None:
    for arguments in ({"block": False}, {"timeout": 0.01}):
        with gated() as (engine, gate):
            future = engine.submit([5], greedy(8))
            theirs = engine.manager.add_request([6], max_new_tokens=8, eos_token_id=-1)
            gate.step(2)
            engine.manager.stop(**arguments)
            assert engine.manager.is_running()
            assert engine.stats().state == EngineState.STOPPED
            gate.open()
            assert future.result(30).token_ids == greedy_reference(tiny_llama(), [5], 8)
            finished(engine, theirs, 8)
            engine.manager.join(0.0)
            assert not engine.manager.is_running()
            assert engine.stats().active == 0


@row("stop")
def that_is_hard_ends_everything_with_what_it_has() -> None:
    with gated() as (engine, gate):
        future = engine.submit([5], greedy(100))
        theirs = engine.manager.add_request([6], max_new_tokens=100, eos_token_id=-1)
        gate.step(3)
        gate.wait_for_arrival()
        engine.manager.stop(hard_stop=True, block=False)
        gate.open()
        engine.manager.join(0.0)
        rollout = future.result(30)
        assert (rollout.finish_reason, len(rollout.token_ids) in (3, 4)) == (FinishReason.ABORT, True)
        output = engine.manager.get_result(theirs)
        assert output is not None
        assert (output.status, len(output.generated_tokens) in (3, 4)) == (RequestStatus.FAILED, True)


@row("stop")
def of_a_fenced_engine_ends_what_could_never_finish() -> None:
    with gated() as (engine, gate):
        gate.open()
        future = engine.submit([5], greedy(200))
        with contextlib.suppress(KeyError), engine.update():
            raise KeyError
        assert engine.state == EngineState.FENCED
        engine.manager.stop(timeout=30)
        assert not engine.manager.is_running()
        assert future.result(30).finish_reason == FinishReason.ABORT


@row("stop")
def where_it_would_wait_for_itself_is_an_error() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with engine.manager.pause(), pytest.raises(EngineStateError, match="inside a pause"):
            engine.manager.stop()
        for wait in (engine.manager.stop, engine.manager.destroy, lambda: engine.model.generate_batch([[5]])):
            with engine.update(), pytest.raises(EngineStateError, match=r"inside update\(\) would wait for itself"):
                wait()
        assert engine.state == EngineState.RUNNING
        raised: list[Exception] = []

        def on_the_loop(*_: object) -> None:
            try:
                engine.manager.stop()
            except EngineStateError as error:
                raised.append(error)

        engine.model.register_forward_hook(on_the_loop)
        engine.generate([[5]], greedy(1))
        assert len(raised) == 1
        assert "own thread" in str(raised[0])


@row("stop")
def twice_and_before_the_start_changes_nothing() -> None:
    others = set(threading.enumerate())
    engine = GenerationEngine(tiny_llama())
    engine.manager.stop()
    assert engine.state == EngineState.CREATED
    with engine:
        assert_still_right(engine)
        engine.manager.stop()
        engine.manager.stop()
    assert engine.state == EngineState.STOPPED
    left = set(threading.enumerate()) - others
    assert [thread for thread in left if thread.name.startswith("rollsync")] == []


@row("join")
def waits_for_the_end_of_the_loop_within_its_limit() -> None:
    engine = GenerationEngine(tiny_llama())
    engine.manager.join(0.0)
    with engine:
        engine.manager.join(0.0, timeout=0.01)
        assert engine.manager.is_running()
        engine.manager.stop(block=False)
        engine.manager.join(0.0, timeout=30)
        assert not engine.manager.is_running()


@row("destroy")
def stops_for_good_and_may_be_called_again() -> None:
    for started in (True, False):
        engine = GenerationEngine(tiny_llama())
        if started:
            engine.start()
        engine.manager.destroy()
        engine.manager.destroy()
        assert engine.state == EngineState.STOPPED
        with pytest.raises(EngineStateError, match="stopped; make a new one"):
            engine.start()
        engine.stop()


@row("pause")
def holds_the_loop_between_two_steps() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        future = engine.submit([5], greedy(60))
        with engine.manager.pause():
            before = engine.stats().generated_tokens
            assert not threading.Event().wait(0.05)
            assert engine.stats().generated_tokens == before
        assert future.result(30).token_ids == greedy_reference(tiny_llama(), [5], 60)


@row("pause")
def of_a_loop_that_does_not_run_is_an_error() -> None:
    engine = GenerationEngine(tiny_llama())
    with pytest.raises(RuntimeError, match="no generation loop is running"), engine.manager.pause():
        pass
    engine.stop()


@row("pause")
def on_the_loops_own_thread_is_an_error_instead_of_a_deadlock() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        raised: list[Exception] = []

        def on_the_loop(*_: object) -> None:
            for pause in (engine.manager.pause, lambda: engine.manager.pause_within(30)):
                try:
                    with pause():
                        pass
                except EngineStateError as error:
                    raised.append(error)

        engine.model.register_forward_hook(on_the_loop)
        engine.generate([[5]], greedy(1))
        assert len(raised) == 2


@row("pause")
def in_which_weights_change_fences_the_engine() -> None:
    model = marker_llama()
    with GenerationEngine(model) as engine:
        with engine.manager.pause():
            mark(model, 1)
        assert engine.submit([5], greedy(3)).result(30).token_ids == []
        assert engine.state == EngineState.FENCED


@row("warmup")
def is_for_before_the_start_and_harmless_later() -> None:
    engine = GenerationEngine(tiny_llama())
    engine.manager.warmup()
    assert engine.manager.warmed_up
    with engine:
        future = engine.submit([5], greedy(60))
        engine.manager.warmup()
        assert future.result(30).token_ids == greedy_reference(tiny_llama(), [5], 60)


@row("switch_to_cb_friendly_attn")
def leaves_the_engines_model_and_switches_another() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        before = engine.model.config._attn_implementation
        engine.manager.switch_to_cb_friendly_attn(engine.model)
        assert engine.model.config._attn_implementation == before
        other = tiny_llama()
        other.set_attn_implementation("eager")
        engine.manager.switch_to_cb_friendly_attn(other, auto_switch_to_flash=False)
        assert other.config._attn_implementation == "paged|eager"
        assert_still_right(engine)


@row("init_continuous_batching")
def of_the_engines_model_gives_the_engines_manager() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.model.init_continuous_batching() is engine.manager
        with engine.model.continuous_batching_context_manager(persistent_manager=True) as manager:
            assert manager is engine.manager
            finished(engine, manager.add_request([5], max_new_tokens=2, eos_token_id=-1), 2)
        assert engine.state == EngineState.CREATED

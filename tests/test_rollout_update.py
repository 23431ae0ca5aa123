"""The live update: exclusive, bounded, in place, and fenced when it goes wrong."""

import threading
from concurrent.futures import Future

import pytest
import torch
from fakes import AlarmsByHand, StandsStill, StepGate, mark, marker_llama, tiny_llama, tiny_qwen2

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineFencedError,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    PauseTimeoutError,
    SamplingParams,
)
from rollout.control import ControlThread
from rollout.manager.pausing import RolloutThreadStatus

ENDLESS = SamplingParams(max_new_tokens=400, temperature=0, stop_token_ids=())
SHORT = SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=())


class BodyError(Exception):
    """What goes wrong inside an update in these tests."""


def wait_for_tokens(engine: GenerationEngine, count: int) -> None:
    """The loop then waits for a pause."""
    seen = engine.stats().generated_tokens
    StandsStill(engine, lambda: engine.stats().generated_tokens >= seen + count).wait()


def in_thread(function: "callable") -> Future:
    """Runs `function` on a thread of its own."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_versions_count_up_from_zero_unless_given() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.version == 0
        with engine.update():
            pass
        assert engine.version == 1
        with engine.update(version=7):
            pass
        assert engine.version == 7
        for bad in (7, 3, -1, True, 8.0, "8"):
            with pytest.raises(InvalidRequestError, match="versions only grow"), engine.update(version=bad):
                pytest.fail("the body must not run")
        assert (engine.version, engine.state) == (7, EngineState.RUNNING)


def test_the_version_moves_only_when_the_body_is_done() -> None:
    with GenerationEngine(tiny_llama()) as engine, engine.update():
        assert engine.version == 0


def test_writers_take_turns() -> None:
    events: list[str] = []
    first_in, go_on = threading.Event(), threading.Event()
    with GenerationEngine(tiny_llama()) as engine:

        def first() -> None:
            with engine.update():
                events.append("first in")
                first_in.set()
                assert go_on.wait(30)
                events.append("first out")

        def second() -> None:
            with engine.update():
                events.append("second in")

        one = in_thread(first)
        assert first_in.wait(30)
        two = in_thread(second)
        three = engine.call(lambda engine: events.append("call"))
        go_on.set()
        for future in (one, two, three):
            future.result(30)
        assert engine.version == 2
    assert events[:2] == ["first in", "first out"]
    assert sorted(events[2:]) == ["call", "second in"]


def test_a_writer_that_waits_too_long_for_another_gives_up_and_changes_nothing() -> None:
    first_in, go_on = threading.Event(), threading.Event()
    with GenerationEngine(tiny_llama()) as engine:

        def first() -> None:
            with engine.update():
                first_in.set()
                assert go_on.wait(30)

        one = in_thread(first)
        assert first_in.wait(30)
        with (
            pytest.raises(PauseTimeoutError, match="another update or call is in progress"),
            engine.update(timeout_s=0.05),
        ):
            pytest.fail("the body must not run")
        go_on.set()
        one.result(30)
        assert (engine.version, engine.state) == (1, EngineState.RUNNING)
        with engine.update():
            pass
        assert engine.version == 2


class InterruptedControl(ControlThread):
    """Ctrl-C strikes whoever queues a job, right after it is queued."""

    interrupts = 1

    def submit_to(self, future: Future, function: "callable") -> None:
        super().submit_to(future, function)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt


def test_an_interrupt_right_after_the_pause_was_asked_for_leaves_nothing_behind() -> None:
    engine = GenerationEngine(tiny_llama())
    with engine:
        engine._control.__class__ = InterruptedControl
        with pytest.raises(KeyboardInterrupt), engine.update():
            pytest.fail("the body must not run")
        assert len(engine.generate([[5]], SHORT)[0].token_ids) == 3, "the loop is parked"
        with engine.update(timeout_s=5):
            pass
        assert (engine.version, engine.state) == (1, EngineState.RUNNING)


def test_an_interrupted_snapshot_pauses_for_nobody() -> None:
    engine = GenerationEngine(tiny_llama())
    with engine:
        busy, go_on = threading.Event(), threading.Event()

        def occupy(_: GenerationEngine) -> None:
            busy.set()
            assert go_on.wait(30)

        occupied = engine.call(occupy)
        assert busy.wait(30)
        engine._control.__class__ = InterruptedControl
        with pytest.raises(KeyboardInterrupt):
            engine.snapshot()
        go_on.set()
        occupied.result(30)
        engine.call(lambda _: None).result(30)  # whatever was queued has been done by now
        assert engine.stats().pause_waits.num_pauses == 0


def test_a_snapshot_that_nobody_waits_for_any_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.SNAPSHOT_TIMEOUT_S", 0.01)
    with GenerationEngine(tiny_llama()) as engine:
        busy, go_on = threading.Event(), threading.Event()

        def occupy(_: GenerationEngine) -> None:
            busy.set()
            assert go_on.wait(30)

        occupied = engine.call(occupy)
        assert busy.wait(30)
        with pytest.raises(PauseTimeoutError, match="the snapshot was not taken"):
            engine.snapshot()
        go_on.set()
        occupied.result(30)
        engine.call(lambda _: None).result(30)
        assert engine.stats().pause_waits.num_pauses == 0


def test_a_pause_that_comes_too_late_is_an_error_and_never_parks_the_loop() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], SHORT)
        gate.wait_for_arrival()  # a step that does not end
        with pytest.raises(PauseTimeoutError, match="step in progress"), engine.update(timeout_s=0.05):
            pytest.fail("the body must not run")
        assert (engine.version, engine.state) == (0, EngineState.RUNNING)
        gate.open()
        assert future.result(30).finish_reason == FinishReason.LENGTH
        with engine.update():
            pass
        assert engine.generate([[5]], SHORT)[0].versions == [1, 1, 1]


def test_an_exception_in_the_body_fences_until_an_update_succeeds_and_loses_nothing() -> None:
    with GenerationEngine(marker_llama()) as engine:
        future = engine.submit([5], ENDLESS)
        wait_for_tokens(engine, 5)
        with pytest.raises(BodyError), engine.update() as model:  # noqa: PT012
            mark(model, 50)  # half an update
            raise BodyError("the writer failed")
        assert (engine.version, engine.state) == (0, EngineState.FENCED)
        with pytest.raises(EngineFencedError, match="BodyError: the writer failed"):
            engine.submit([5], SHORT)
        tokens = engine.stats().generated_tokens
        (held,) = engine.snapshot()  # two pauses apart, nothing has moved
        assert engine.stats().generated_tokens == tokens
        with pytest.raises(BodyError), engine.update():
            raise BodyError("again")
        assert engine.state == EngineState.FENCED
        with engine.update() as model:
            mark(model, 1)
        assert (engine.version, engine.state) == (1, EngineState.RUNNING)
        rollout = future.result(60)
    assert rollout.finish_reason == FinishReason.LENGTH
    assert rollout.token_ids == rollout.versions, "a token was sampled under weights that nobody vouches for"
    assert rollout.version_spans[1].start == len(held.token_ids)


def test_a_held_request_can_be_cancelled_and_times_out() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        cancelled = engine.submit([5], ENDLESS)
        timed_out = engine.submit([6], ENDLESS, timeout_s=0.2)
        with pytest.raises(BodyError), engine.update():
            raise BodyError
        engine.cancel(cancelled.request_id)
        assert cancelled.result(30).finish_reason == FinishReason.ABORT
        assert timed_out.result(30).finish_reason == FinishReason.TIMEOUT


def test_a_body_that_overruns_its_limit_ends_the_requests_and_keeps_others_out() -> None:
    events: list[str] = []
    with GenerationEngine(marker_llama()) as engine:
        alarms = AlarmsByHand(engine)
        future = engine.submit([5], ENDLESS)
        wait_for_tokens(engine, 5)
        go_on, entered = threading.Event(), threading.Event()

        def slow() -> None:
            with engine.update(timeout_s=30) as model:
                entered.set()
                mark(model, 50)
                assert go_on.wait(30)
                events.append("slow writer leaves")

        writer = in_thread(slow)
        assert entered.wait(30)
        assert alarms.limits_s == [30]
        alarms.ring()
        rollout = future.result(30)  # resolves while the writer is still inside
        assert not writer.done()
        assert rollout.finish_reason == FinishReason.ERROR
        assert "longer than its limit" in (rollout.error or "")
        assert len(rollout.token_ids) >= 5
        assert rollout.token_ids == rollout.versions
        assert engine.state == EngineState.FENCED

        def repair() -> None:
            with engine.update() as model:
                events.append("repair enters")
                mark(model, 1)

        repairer = in_thread(repair)
        go_on.set()
        with pytest.raises(PauseTimeoutError, match=r"its limit was 30 s"):
            writer.result(30)
        repairer.result(30)
        assert events == ["slow writer leaves", "repair enters"]
        assert engine.generate([[5]], SHORT)[0].token_ids == [1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())),
        lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.detach().clone()),
        lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.detach()[:-1]),
        lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.detach().to(torch.bfloat16)),
        lambda m: m.to(torch.bfloat16),
    ],
    ids=["replaced", "re-pointed", "other shape", "other dtype", "cast"],
)
def test_parameters_must_stay_where_they_are(change: "callable") -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with pytest.raises(EngineFencedError, match="in place"), engine.update() as model:
            change(model)
        assert (engine.version, engine.state) == (0, EngineState.FENCED)


def test_tied_weights_stay_tied_and_untying_them_is_refused() -> None:
    with GenerationEngine(tiny_qwen2(), copy_weights=True) as engine:
        with engine.update() as model, torch.no_grad():
            model.model.embed_tokens.weight.mul_(2.0)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        with pytest.raises(EngineFencedError), engine.update() as model:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(1.5),
        lambda p: p.data.mul_(1.5),
        lambda p: setattr(p, "data", p.data * 1.5),
    ],
    ids=["in place", "through .data", "re-pointed"],
)
def test_a_change_outside_an_update_is_noticed_at_the_next_step(change: "callable") -> None:
    model = marker_llama()
    engine = GenerationEngine(model)
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], ENDLESS)
        gate.step(4)
        gate.wait_for_arrival()
        with torch.no_grad():
            mark(model, 9)
            change(model.lm_head.weight)
        gate.open()
        rollout = future.result(30)
        assert engine.state == EngineState.FENCED
        assert rollout.finish_reason == FinishReason.ERROR
        assert rollout.token_ids == [0, 0, 0, 0], "a token sampled under an unannounced change was let out"
        for remedy in ("outside update()", "with engine.update(): optimizer.step()", "copy_weights=True"):
            assert remedy in (rollout.error or "")
        with pytest.raises(EngineFencedError, match="outside update"):
            engine.submit([5], SHORT)
        with engine.update() as shell:
            mark(shell, 1)
        assert engine.generate([[5]], SHORT)[0].token_ids == [1, 1, 1]


def test_a_change_while_nothing_runs_is_noticed_by_the_next_request() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        engine.generate([[5]], SHORT)
        with torch.no_grad():
            model.lm_head.weight.add_(0.1)
        rollout = engine.submit([5], SHORT).result(30)
    assert rollout.finish_reason == FinishReason.ERROR
    assert rollout.token_ids == []


def test_an_engine_with_its_own_weights_does_not_mind_the_trainer() -> None:
    model = marker_llama()
    with GenerationEngine(model, copy_weights=True) as engine:
        mark(model, 9)
        assert engine.generate([[5]], SHORT)[0].token_ids == [0, 0, 0]
        assert engine.state == EngineState.RUNNING


def test_what_would_wait_for_itself_inside_an_update_is_refused() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with engine.update():
            for call in (
                lambda: engine.update().__enter__(),
                lambda: engine.generate([[5]], SHORT),
                engine.snapshot,
                engine.stop,
            ):
                with pytest.raises(EngineStateError, match="would wait for itself"):
                    call()
            future = engine.submit([5], SHORT)
        assert engine.version == 1
        assert future.result(30).versions == [1, 1, 1]


def test_call_runs_on_the_control_thread_and_may_update() -> None:
    with GenerationEngine(marker_llama()) as engine:

        def commit(engine: GenerationEngine, token: int, *, version: int) -> str:
            with engine.update(version) as model:
                mark(model, token)
            return threading.current_thread().name

        assert engine.call(commit, 3, version=3).result(30) == "rollsync-control"
        assert engine.generate([[5]], SHORT)[0].token_ids == [3, 3, 3]
        failed = engine.call(commit, 4, version=3)
        with pytest.raises(InvalidRequestError, match="versions only grow"):
            failed.result(30)


def test_an_overrun_on_the_control_thread_is_bounded_too() -> None:
    entered, go_on = threading.Event(), threading.Event()
    with GenerationEngine(marker_llama()) as engine:
        future = engine.submit([5], ENDLESS)
        wait_for_tokens(engine, 2)
        alarms = AlarmsByHand(engine)

        def commit(engine: GenerationEngine) -> None:
            with engine.update(timeout_s=30):
                entered.set()
                assert go_on.wait(30)

        done = engine.call(commit)
        assert entered.wait(30)
        alarms.ring()
        assert future.result(30).finish_reason == FinishReason.ERROR
        go_on.set()
        with pytest.raises(PauseTimeoutError):
            done.result(30)


def test_a_callback_of_a_future_may_update() -> None:
    updated = threading.Event()
    with GenerationEngine(tiny_llama()) as engine:

        def callback(_: Future) -> None:
            with engine.update():
                pass
            updated.set()

        engine.submit([5], SHORT).add_done_callback(callback)
        assert updated.wait(30)
        assert engine.version == 1


def test_updating_a_dead_or_stopped_engine_is_an_error_with_the_reason() -> None:
    engine = GenerationEngine(tiny_llama())
    with pytest.raises(EngineStateError, match="not started"), engine.update():
        pytest.fail("the body must not run")

    def fail(*_: object) -> None:
        raise BodyError("out of memory, say")

    with engine:
        engine.model.register_forward_pre_hook(fail)
        assert engine.submit([5], SHORT).result(30).finish_reason == FinishReason.ERROR
        with pytest.raises(EngineDeadError, match="out of memory, say"), engine.update():
            pytest.fail("the body must not run")
    with pytest.raises(EngineStateError, match="stopped"), engine.update():
        pytest.fail("the body must not run")


def test_stopping_during_another_threads_update_ends_both() -> None:
    engine = GenerationEngine(marker_llama())
    engine.start()
    future = engine.submit([5], ENDLESS)
    wait_for_tokens(engine, 2)
    entered, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with engine.update() as model:
            mark(model, 50)
            entered.set()
            assert go_on.wait(30)

    writer = in_thread(write)
    assert entered.wait(30)
    stopper = in_thread(engine.stop)
    rollout = future.result(30)
    stopper.result(30)
    go_on.set()
    with pytest.raises(EngineStateError, match="stopped during an update"):
        writer.result(30)
    assert rollout.finish_reason == FinishReason.ABORT
    assert 50 not in rollout.token_ids
    assert engine.state == EngineState.STOPPED


def test_an_update_reports_its_wait_its_pause_and_who_straddles_it() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.last_update is None
        futures = [engine.submit([5], ENDLESS) for _ in range(3)]
        wait_for_tokens(engine, 6)
        with engine.update(version=4):
            pass
        record = engine.last_update
        assert record is not None
        assert (record.version, record.straddlers) == (4, 3)
        assert 0 <= record.wait_s < 30
        assert 0 <= record.held_s < 30
        assert engine.stats().updates == 1
        for future in futures:
            future.cancel()


def test_the_loop_never_parks_when_whoever_asked_has_given_up() -> None:
    status = RolloutThreadStatus()
    booked = threading.Event()
    status.before_pause = booked.set
    loop = threading.Thread(target=status.pause_and_wait, daemon=True)
    loop.start()
    loop.join(30)
    assert not loop.is_alive(), "parked, and nobody is there to wake it"
    assert booked.is_set()


def test_what_waits_when_an_engine_is_fenced_is_ended_too_and_never_comes_back() -> None:
    model = marker_llama()
    engine = GenerationEngine(model, EngineConfig(max_requests=2))
    gate = StepGate(engine)
    with engine:
        futures = [engine.submit([5], ENDLESS) for _ in range(6)]  # two run, four wait
        gate.wait_for_arrival()
        with torch.no_grad():
            model.lm_head.weight.add_(0.0)
        gate.open()
        assert [future.result(30).finish_reason for future in futures] == [FinishReason.ERROR] * 6
        with engine.update():
            pass
        steps = gate.steps
        assert engine.generate([[5]], SHORT)[0].finish_reason == FinishReason.LENGTH
        assert gate.steps == steps + 3, "requests that had ended were run again"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), 1e300, "5", None, True], ids=str)
def test_a_limit_that_no_clock_can_wait_is_refused_and_parks_nobody(limit: object) -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], SHORT)
        gate.wait_for_arrival()  # so that an update would have to wait
        with pytest.raises(InvalidRequestError, match="timeout_s must be a positive, finite number of seconds, got"):
            engine.update(timeout_s=limit)
        with pytest.raises(InvalidRequestError, match="timeout_s must be a positive, finite number of seconds, got"):
            engine.stop(timeout_s=limit)
        gate.open()
        assert future.result(30).finish_reason == FinishReason.LENGTH
        assert engine.state == EngineState.RUNNING


def test_an_alarm_that_rings_after_the_body_is_done_fences_nothing() -> None:
    with GenerationEngine(marker_llama()) as engine:
        alarms = AlarmsByHand(engine)
        future = engine.submit([5], ENDLESS)
        with engine.update() as model:
            mark(model, 1)
        (late,) = alarms.calls
        late()
        assert (engine.version, engine.state) == (1, EngineState.RUNNING)
        assert future.result(60).finish_reason == FinishReason.LENGTH


def test_an_alarm_that_rings_as_the_body_ends_fences_whatever_the_body_thinks() -> None:
    with GenerationEngine(marker_llama()) as engine:
        alarms = AlarmsByHand(engine)
        with pytest.raises(PauseTimeoutError, match=r"took .* its limit was"), engine.update():
            alarms.calls[0]()
        assert (engine.version, engine.state) == (0, EngineState.FENCED)

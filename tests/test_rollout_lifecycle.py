"""An engine ends cleanly, whatever happened to it, and lets nobody wait for ever."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from fakes import StepGate, greedy_reference, tiny_llama, wait_until
from transformers import LlamaForCausalLM

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    Rollout,
    SamplingParams,
)

ROOT = Path(__file__).resolve().parent.parent


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


ENDLESS = greedy(400)


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("rollsync"))


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    before = set(threading.enumerate())
    yield
    new = [t for t in set(threading.enumerate()) - before if t.name.startswith("rollsync")]
    wait_until(lambda: not any(thread.is_alive() for thread in new))


class FailsOnDemand(LlamaForCausalLM):
    """A forward raises while `fail` is set, and waits while `wait` is clear."""

    fail = threading.Event()
    wait = threading.Event()
    arrived = threading.Event()

    def forward(self, *args: object, **kwargs: object) -> object:
        self.arrived.set()
        assert self.wait.wait(60)
        if self.fail.is_set():
            raise ArithmeticError("the disk is on fire")
        return super().forward(*args, **kwargs)


@pytest.fixture
def failing() -> FailsOnDemand:
    plain = tiny_llama()
    model = FailsOnDemand(plain.config)
    model.load_state_dict(plain.state_dict())
    FailsOnDemand.fail.clear()
    FailsOnDemand.wait.set()
    return model.eval()


# --------------------------------------------------------------------------------------------------------- the order


def test_each_call_out_of_order_says_what_to_do() -> None:
    engine = GenerationEngine(tiny_llama())
    assert engine.state == EngineState.CREATED
    for call in (lambda: engine.submit([5]), lambda: engine.generate([[5]]), engine.snapshot, engine.update):
        with pytest.raises(EngineStateError, match="not started; use `with engine:`"):
            call()
    engine.start()
    assert engine.state == EngineState.RUNNING
    with pytest.raises(EngineStateError, match="running already"):
        engine.start()
    engine.stop()
    assert engine.state == EngineState.STOPPED
    calls = (lambda: engine.submit([5]), lambda: engine.generate([[5]]), engine.snapshot, engine.update, engine.start)
    for call in calls:
        with pytest.raises(EngineStateError, match="stopped; make a new one"):
            call()
    with pytest.raises(EngineStateError, match="stopped; make a new one"):
        engine.call(lambda engine: None)


def test_an_engine_that_never_started_stops() -> None:
    engine = GenerationEngine(tiny_llama())
    engine.stop()
    engine.stop()
    assert engine.state == EngineState.STOPPED


def test_what_a_stopped_engine_knows_can_still_be_read() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        engine.generate([[5]], greedy(3))
    assert (engine.version, engine.state, engine.stats().finished) == (0, EngineState.STOPPED, 1)
    assert engine.last_update is None


def test_two_engines_at_once_and_one_after_the_other() -> None:
    model = tiny_llama()
    expected = greedy_reference(model, [5], 8)
    with GenerationEngine(model) as one, GenerationEngine(model) as two:
        futures = [engine.submit([5], greedy(8)) for engine in (one, two) for _ in range(3)]
        assert [future.result(30).token_ids for future in futures] == [expected] * 6
    with GenerationEngine(model) as three:
        assert three.generate([[5]], greedy(8))[0].token_ids == expected


def test_an_engine_may_start_and_stop_on_other_threads() -> None:
    engine = GenerationEngine(tiny_llama())
    for call in (engine.start, lambda: engine.generate([[5]], greedy(2)), engine.stop):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)
    assert engine.state == EngineState.STOPPED
    assert engine.stats().finished == 1


def test_an_engine_started_in_inference_mode_runs_and_updates_outside_it() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)
    modes: set[bool] = set()
    engine.model.register_forward_pre_hook(lambda *_: modes.add(torch.is_inference_mode_enabled()))
    with torch.inference_mode():
        engine.start()
        assert len(engine.generate([[5]], greedy(3))[0].token_ids) == 3
    with engine.update():
        pass
    assert engine.generate([[5]], greedy(3))[0].token_ids == greedy_reference(model, [5], 3)
    engine.stop()
    assert modes == {False}


# ------------------------------------------------------------------------------------------------------------- stops


def test_stopping_resolves_what_is_in_flight_with_what_it_has() -> None:
    model = tiny_llama()
    expected = greedy_reference(model, [5], 10)
    engine = GenerationEngine(model, EngineConfig(max_requests=2))
    gate = StepGate(engine)
    with engine:
        futures = [engine.submit([5], ENDLESS) for _ in range(4)]
        gate.step(3)
        gate.wait_for_arrival()
        stopper = threading.Thread(target=engine.stop)
        stopper.start()
        wait_until(lambda: engine.state == EngineState.STOPPED)
        gate.open()
        stopper.join(30)
        rollouts = [future.result(30) for future in futures]
    for rollout in rollouts:
        assert (rollout.finish_reason, rollout.error) == (FinishReason.ABORT, "the engine was stopped")
        assert rollout.token_ids == expected[: len(rollout.token_ids)]
    assert [len(rollout.token_ids) >= 3 for rollout in rollouts] == [True, True, False, False]
    assert own_threads() == []


def test_an_exception_in_the_body_of_with_ends_the_engine_and_goes_on() -> None:
    futures = []
    with pytest.raises(KeyError, match="mine"), GenerationEngine(tiny_llama()) as engine:  # noqa: PT012
        futures.append(engine.submit([5], ENDLESS))
        raise KeyError("mine")
    assert own_threads() == []
    assert futures[0].result(0).finish_reason == FinishReason.ABORT


def test_every_future_has_its_result_when_stop_returns() -> None:
    engine = GenerationEngine(tiny_llama())
    engine.start()
    futures = [engine.submit([5], ENDLESS) for _ in range(50)]
    called = []
    for future in futures:
        future.add_done_callback(called.append)
    engine.stop()
    assert all(future.done() for future in futures)
    assert len(called) == 50


def test_stop_in_a_callback_ends_everything() -> None:
    stopped = threading.Event()
    with GenerationEngine(tiny_llama()) as engine:
        other = engine.submit([6], ENDLESS)

        def callback(_: Future[Rollout]) -> None:
            engine.stop()
            stopped.set()

        engine.submit([5], greedy(2)).add_done_callback(callback)
        assert stopped.wait(30)
        assert other.result(30).finish_reason == FinishReason.ABORT
    assert own_threads() == [], "leaving `with` waits for a stop that is under way elsewhere"


def test_a_second_stop_returns_when_the_first_is_done() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    engine.start()
    engine.submit([5], ENDLESS)
    gate.wait_for_arrival()
    stoppers = [threading.Thread(target=engine.stop) for _ in range(3)]
    for stopper in stoppers:
        stopper.start()
    wait_until(lambda: engine.state == EngineState.STOPPED)
    for stopper in stoppers:
        stopper.join(0.05)
        assert stopper.is_alive(), "the loop still runs"
    gate.open()
    for stopper in stoppers:
        stopper.join(30)
    assert own_threads() == []


def test_stop_on_the_control_thread_ends_everything() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        future = engine.submit([5], ENDLESS)
        engine.call(lambda engine: engine.stop()).result(30)
        assert future.result(30).finish_reason == FinishReason.ABORT


def test_submits_that_race_with_stop_are_refused_or_resolved() -> None:
    for _ in range(5):
        engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=2, max_waiting=20))
        engine.start()
        accepted: list[Future[Rollout]] = []
        refused: list[EngineStateError] = []

        def client(engine: GenerationEngine = engine, accepted: list = accepted, refused: list = refused) -> None:
            while True:
                try:
                    accepted.append(engine.submit([5], greedy(3), timeout_s=100))
                except EngineStateError as error:
                    refused.append(error)
                    return

        clients = [threading.Thread(target=client) for _ in range(4)]
        for thread in clients:
            thread.start()
        wait_until(lambda accepted=accepted: len(accepted) > 20)
        engine.stop()
        for thread in clients:
            thread.join(30)
        assert len(refused) == 4
        for future in accepted:
            rollout = future.result(30)
            assert rollout.finish_reason == (FinishReason.LENGTH if len(rollout.token_ids) == 3 else FinishReason.ABORT)


def test_a_stop_that_cannot_wait_any_longer_resolves_what_is_in_flight(failing: FailsOnDemand) -> None:
    engine = GenerationEngine(failing)
    engine.start()
    FailsOnDemand.wait.clear()
    future = engine.submit([5], ENDLESS)
    FailsOnDemand.arrived.clear()
    assert FailsOnDemand.arrived.wait(30)
    engine.stop(timeout_s=0.1)  # a forward that never ends
    assert future.result(30).finish_reason == FinishReason.ABORT
    FailsOnDemand.wait.set()


# ------------------------------------------------------------------------------------------------------- a dead loop


def test_when_the_loop_dies_every_future_resolves_and_the_engine_says_why(failing: FailsOnDemand) -> None:
    with GenerationEngine(failing, EngineConfig(max_requests=2)) as engine:
        gate = StepGate(engine)
        futures = [engine.submit([5], ENDLESS) for _ in range(4)]
        gate.step(3)
        gate.wait_for_arrival()
        FailsOnDemand.fail.set()
        gate.open()
        rollouts = [future.result(30) for future in futures]
        assert engine.state == EngineState.DEAD
        for rollout in rollouts:
            assert rollout.finish_reason == FinishReason.ERROR
            assert "the disk is on fire" in rollout.error
            assert len(rollout.logprobs) == len(rollout.token_ids)
        assert [len(rollout.token_ids) for rollout in rollouts] == [3, 3, 0, 0]
        for call in (lambda: engine.submit([5]), lambda: engine.generate([[5]]), engine.snapshot, engine.update):
            with pytest.raises(EngineDeadError, match="the disk is on fire") as death:
                call()
            assert isinstance(death.value.__cause__, ArithmeticError)
        assert engine.stats().state == EngineState.DEAD
        assert engine.stats().finished == 4
    assert engine.state == EngineState.STOPPED


class WaitsAtTheEnd(logging.Handler):
    """Keeps the loop from its last act until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.go_on = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "background thread exited" in record.getMessage():
            assert self.go_on.wait(30)


def test_whoever_sees_a_request_fail_sees_that_the_engine_is_dead(failing: FailsOnDemand) -> None:
    slow = WaitsAtTheEnd()
    upstream_log = logging.getLogger("ContinuousBatchingLogger")
    level = upstream_log.level
    upstream_log.addHandler(slow)
    upstream_log.setLevel(logging.INFO)
    try:
        with GenerationEngine(failing) as engine:
            FailsOnDemand.fail.set()
            future = engine.submit([5], ENDLESS)
            assert future.result(30).finish_reason == FinishReason.ERROR
            assert engine.state == EngineState.DEAD
            with pytest.raises(EngineDeadError, match="disk is on fire"):
                engine.submit([5], ENDLESS)
            slow.go_on.set()
    finally:
        upstream_log.removeHandler(slow)
        upstream_log.setLevel(level)


def test_tokens_before_a_death_are_the_right_ones(failing: FailsOnDemand) -> None:
    expected = greedy_reference(failing, [5, 6], 5)
    with GenerationEngine(failing) as engine:
        gate = StepGate(engine)
        future = engine.submit([5, 6], ENDLESS)
        gate.step(5)
        gate.wait_for_arrival()
        FailsOnDemand.fail.set()
        gate.open()
        assert future.result(30).token_ids == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_death_in_which_upstreams_own_handling_fails_loses_nothing(failing: FailsOnDemand) -> None:
    def fail_too(*_: object) -> None:
        raise ArithmeticError("and so is the fire brigade")

    with GenerationEngine(failing) as engine:
        gate = StepGate(engine)
        future = engine.submit([5, 6], ENDLESS)
        gate.step(5)
        gate.wait_for_arrival()
        engine.manager._fail_all_remaining_requests = fail_too
        FailsOnDemand.fail.set()
        gate.open()
        rollout = future.result(30)
        assert (rollout.finish_reason, len(rollout.token_ids)) == (FinishReason.ERROR, 5)
        assert "on fire" in (rollout.error or "")
        assert engine.state == EngineState.DEAD


def test_a_submit_that_waits_for_room_learns_of_the_death(failing: FailsOnDemand) -> None:
    outcome: Future[Rollout] = Future()
    with GenerationEngine(failing, EngineConfig(max_requests=1, max_waiting=1)) as engine:
        gate = StepGate(engine)
        for _ in range(2):
            engine.submit([5], ENDLESS)
        gate.wait_for_arrival()

        def submit() -> None:
            try:
                outcome.set_result(engine.submit([5], ENDLESS).result(30))
            except EngineDeadError as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=submit)
        thread.start()
        FailsOnDemand.fail.set()
        gate.open()
        with pytest.raises(EngineDeadError, match="disk is on fire"):
            outcome.result(30)
        thread.join(30)


def test_an_update_that_waits_for_a_dying_loop_learns_of_it(failing: FailsOnDemand) -> None:
    with GenerationEngine(failing) as engine:
        FailsOnDemand.wait.clear()
        FailsOnDemand.arrived.clear()
        engine.submit([5], ENDLESS)
        assert FailsOnDemand.arrived.wait(30)
        FailsOnDemand.fail.set()

        def release() -> None:
            FailsOnDemand.wait.set()

        threading.Timer(0.1, release).start()
        with pytest.raises(EngineDeadError, match="disk is on fire"), engine.update():
            pytest.fail("the body must not run")


# --------------------------------------------------------------------------------------------------- a whole process

SCRIPT = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it, as a job of a script's shell does
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from fakes import tiny_llama
from rollout import *
model = tiny_llama()
endless = SamplingParams(max_new_tokens=400, temperature=0, stop_token_ids=())
short = SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=())
"""


def script(body: str) -> list[str]:
    head = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"))
    return [sys.executable, "-c", head + textwrap.dedent(body)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_script(body: str) -> subprocess.CompletedProcess:
    return subprocess.run(script(body), timeout=120, capture_output=True, text=True, env=ENVIRONMENT, check=False)


def test_a_script_that_forgets_to_stop_exits_by_itself() -> None:
    done = run_script(
        """
        created, running, stopped, dead = (GenerationEngine(model) for _ in range(4))
        def fail(*_):
            raise RuntimeError("broken forward")
        dead.model.register_forward_pre_hook(fail)
        for engine in (running, stopped, dead):
            engine.start()
        running.submit([5], endless)
        print(stopped.generate([[5]], short)[0].finish_reason)
        stopped.stop()
        print(dead.submit([5], endless).result(30).finish_reason)
        """
    )
    assert (done.returncode, done.stdout) == (0, "length\nerror\n"), done.stderr
    assert "rollsync-" not in done.stderr


def interrupted(body: str) -> tuple[int, str, str]:
    """Runs a script until it prints "ready", interrupts it as Ctrl-C does, and returns (exit code, stdout, stderr)."""
    process = subprocess.Popen(
        script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def test_ctrl_c_ends_generate_at_once_and_leaves_no_trace_of_our_threads() -> None:
    code, out, err = interrupted(
        """
        class Slow:
            calls = 0
            def __call__(self, *_):
                self.calls += 1
                if self.calls == 5:
                    print("ready", flush=True)
                threading.Event().wait(0.02)
        engine = GenerationEngine(model)
        engine.model.register_forward_pre_hook(Slow())
        with engine:
            try:
                engine.generate([[5]] * 100, endless)
            finally:
                print("left generate", flush=True)
        print("never printed")
        """
    )
    assert code != 0
    assert out == "left generate\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert "rollsync-" not in err


def test_an_engine_goes_on_after_an_interrupted_generate() -> None:
    code, out, err = interrupted(
        """
        class Slow:
            calls = 0
            def __call__(self, *_):
                self.calls += 1
                if self.calls == 5:
                    print("ready", flush=True)
                if self.calls < 1000:
                    threading.Event().wait(0.02)
        slow = Slow()
        engine = GenerationEngine(model)
        engine.model.register_forward_pre_hook(slow)
        with engine:
            try:
                engine.generate([[5]] * 100, endless)
            except KeyboardInterrupt:
                slow.calls = 1000
            print([len(r.token_ids) for r in engine.generate([[5]] * 3, short)])
            with engine.update():
                pass
            print(engine.version, engine.state, engine.stats().active)
            print("the interrupted ones", "ran on" if engine.stats().generated_tokens > 20_000 else "ended")
        """
    )
    assert (code, out) == (0, "[3, 3, 3]\n1 running 0\nthe interrupted ones ended\n"), err
    assert "Traceback" not in err


def test_everything_in_process_works_where_ray_is_not_installed() -> None:
    packages = [name for name in ("rollout", "sync", "trainer_adapters") if (ROOT / name / "__init__.py").exists()]
    done = run_script(
        f"""
        # the head has imported rollout already: start over, without ray
        for name in [name for name in sys.modules if name.split(".")[0] in ("rollout", "fakes", "ray")]:
            del sys.modules[name]
        sys.modules["ray"] = None
        import {", ".join(packages)}
        from rollout import GenerationEngine, SamplingParams
        with GenerationEngine(model) as engine:
            print(len(engine.generate([[5]], SamplingParams(max_new_tokens=3, stop_token_ids=()))[0].token_ids))
        """
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


# ------------------------------------------------------------------------------------------------------- a long life


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    model = tiny_llama(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    with GenerationEngine(model, EngineConfig(max_requests=64, max_batch_tokens=256)) as engine:
        engine.generate([[5]], greedy(1))
        threads, held = threading.active_count(), sizes_of(engine)
        for _ in range(10):
            futures = [
                engine.submit([5 + i % 50, 6], greedy(1 + i % 2), request_id=f"r{i}", timeout_s=1000, metadata={"i": i})
                for i in range(1000)
            ]
            for i in range(0, 1000, 100):
                futures[i].cancel()
            with engine.update():
                pass
            for future in futures:
                future.result(60)
        wait_until(lambda: sizes_of(engine) == held)
        assert threading.active_count() == threads
        assert engine.stats().finished == 10_001


def sizes_of(engine: GenerationEngine) -> dict[str, int]:
    """How much the parts of an idle engine hold."""
    tracker, manager = engine._tracker, engine.manager
    processor = manager.batch_processor
    scheduler, cache = processor.scheduler, processor.cache
    sizes = {
        "in flight": len(tracker._in_flight),
        "running": len(tracker._running),
        "backlog": len(tracker._backlog),
        "alarms": len(tracker.alarms),
        "results": tracker._delivery._queue.qsize(),
        "input": manager.input_queue.qsize(),
        "cancels": manager.cancel_queue.qsize(),
        "outputs": manager.output_router.output_queue.qsize(),
        "handlers": len(manager.output_router.result_handlers),
        "names": len(manager.names._keys) + len(manager.names._names),
        "active": len(scheduler.active_requests),
        "waiting": len(scheduler.waiting_requests),
        "order": len(scheduler.waiting_requests_order),
        "asked to cancel": len(scheduler._requests_to_cancel),
        "unmatched cancels": len(scheduler.unmatched),
        "unshareable": len(cache.unshareable),
    }
    for name, allocator in cache.cache_allocators.items():
        sizes[f"{name} tables"] = len(allocator.block_table)
    return sizes

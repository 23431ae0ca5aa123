"""An engine's statistics count the right things, and add up."""

import threading
import time

import pytest
from fakes import StepGate, random_prompts, tiny_llama

from rollout import EngineConfig, GenerationEngine, SamplingParams
from rollout.meters import PAUSES, STEPS, Meters


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


# ---------------------------------------------------------------------------------------------------------- the meters


def test_step_times_are_means_over_the_last_steps() -> None:
    meters = Meters()
    assert meters.step_times().total_s == meters.step_times().num_steps == 0
    for n in range(STEPS + 10):
        meters.step(prepare_s=float(n), forward_s=10.0, sample_s=1.0, deliver_s=2.0 * n)
    times = meters.step_times()
    mean = 10 + (STEPS - 1) / 2  # of the last STEPS numbers
    assert (times.num_steps, times.prepare_s, times.deliver_s) == (STEPS, mean, 2 * mean)
    assert times.total_s == times.prepare_s + times.forward_s + times.sample_s + times.deliver_s == 3 * mean + 11


def test_pause_waits_have_the_last_the_mean_and_the_longest() -> None:
    meters = Meters()
    waits = meters.pause_waits()
    assert (waits.num_pauses, waits.last_s, waits.mean_s, waits.max_s) == (0, None, None, None)
    for wait_s in [100.0] + [1.0] * (PAUSES - 1) + [3.0]:
        meters.pause(wait_s)
    waits = meters.pause_waits()
    assert (waits.num_pauses, waits.last_s, waits.max_s) == (PAUSES + 1, 3.0, 3.0), "the first has left the window"
    assert waits.mean_s == (PAUSES - 1 + 3) / PAUSES


# ----------------------------------------------------------------------------------------------------------- an engine


def test_each_step_is_measured_once_and_the_parts_fit_into_the_time_there_was() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine, is_open=True)
    forward_s = 0.01

    def take_time(*_: object) -> None:
        threading.Event().wait(forward_s)

    engine.model.register_forward_pre_hook(take_time)
    with engine:
        began_at = time.perf_counter()
        engine.generate(random_prompts([4, 9]), greedy(20))
        engine.generate([[5]], SamplingParams(max_new_tokens=10, stop_token_ids=()))
        elapsed = time.perf_counter() - began_at
        with engine.manager.pause_within(30):
            times = engine.stats().step_times
    assert times.num_steps == gate.steps
    for part in (times.prepare_s, times.forward_s, times.sample_s, times.deliver_s):
        assert part > 0
    assert times.num_steps * times.total_s <= elapsed
    assert times.forward_s >= forward_s


def test_waiting_for_work_pauses_and_holds_are_no_part_of_a_step() -> None:
    def spent() -> float:
        times = engine.stats().step_times
        return times.num_steps * times.total_s

    with GenerationEngine(tiny_llama()) as engine:
        engine.generate([[5]], greedy(3))
        with engine.manager.pause_within(30):
            before, began_at = spent(), time.perf_counter()
        future = engine.submit([5], greedy(30))
        with engine.update():
            assert not threading.Event().wait(0.3)
        engine.manager.hold()
        with engine.manager.pause_within(30):
            pass  # the step in progress runs to its end
        assert not threading.Event().wait(0.3)
        engine.manager.release()
        future.result(30)
        elapsed = time.perf_counter() - began_at
        assert spent() - before <= elapsed - 0.6


def test_prefix_hits_count_requests_and_the_tokens_that_they_found() -> None:
    prompt, other = random_prompts([33, 30])
    hits: list[tuple[int, int]] = []
    with GenerationEngine(tiny_llama(), EngineConfig(page_size=4)) as engine:

        def note() -> None:
            hits.append((engine.stats().prefix_hits, engine.stats().prefix_hit_tokens))

        engine.generate([prompt], greedy(2))
        note()
        engine.generate([prompt, other], greedy(2))
        note()
        engine.generate([prompt[:20] + other], greedy(2))
        note()
        with engine.update():
            pass
        engine.generate([prompt], greedy(2))
        note()
        for future in engine.submit_group(random_prompts([40], seed=5)[0], greedy(2), size=4):
            future.result(30)
        note()
    assert hits == [(0, 0), (1, 32), (2, 52), (2, 52), (2, 52)]


def test_nothing_is_found_where_prefixes_are_not_shared() -> None:
    with GenerationEngine(tiny_llama(), EngineConfig(page_size=4, prefix_sharing=False)) as engine:
        for _ in range(2):
            engine.generate(random_prompts([33]), greedy(2))
        assert (engine.stats().prefix_hits, engine.stats().prefix_hit_tokens) == (0, 0)


def test_pauses_of_updates_snapshots_and_upstreams_own_are_counted_and_failed_ones_not() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5], greedy(5))
        gate.wait_for_arrival()
        with pytest.raises(TimeoutError):
            engine.manager.pause_within(0.01).__enter__()
        assert engine.stats().pause_waits.num_pauses == 0
        gate.open()
        with engine.update():
            pass
        assert engine.last_update is not None
        waits = engine.stats().pause_waits
        assert waits.last_s is not None
        assert 0 <= waits.last_s <= engine.last_update.wait_s
        engine.snapshot()
        with engine.manager.pause():
            pass
        waits = engine.stats().pause_waits
        assert waits.num_pauses == 3
        assert waits.last_s is not None
        assert waits.mean_s is not None
        assert waits.max_s is not None
        assert 0 <= waits.mean_s <= waits.max_s
        assert waits.last_s <= waits.max_s
        future.result(30)


def test_statistics_survive_a_restart_and_may_be_read_by_anyone_meanwhile() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off")

    stopping = threading.Event()
    with GenerationEngine(tiny_llama(), EngineConfig(page_size=4)) as engine:

        def read() -> None:
            while not stopping.wait(0.001):
                seen.append(engine.stats().step_times.num_steps)

        seen: list[int] = []
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(2):
            engine.generate(random_prompts([33]), greedy(2))
        handle = engine.model.register_forward_hook(fail)
        engine.generate([[5]], greedy(2))
        handle.remove()
        engine.restart()
        stats = engine.stats()
        engine.generate([[5]], greedy(2))
        stopping.set()
        reader.join(30)
    assert (stats.prefix_hits, stats.prefix_hit_tokens, stats.step_times.num_steps) == (1, 32, 4)
    assert seen == sorted(seen)
    assert engine.stats().step_times.num_steps == 6

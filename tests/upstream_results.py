"""Rules of upstream's cancels and results."""

import asyncio
import threading

import pytest
from fakes import StepGate, greedy_reference, tiny_llama, wait_until
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from upstream_rows import (
    assert_still_right,
    finished,
    gated,
    row,
)

from rollout import (
    EngineConfig,
    GenerationEngine,
)


@row("cancel_request")
def of_an_active_request_delivers_its_partial() -> None:
    with gated() as (engine, gate):
        name = engine.manager.add_request([5], max_new_tokens=100, eos_token_id=-1)
        gate.step(3)
        gate.wait_for_arrival()
        engine.manager.cancel_request(name)
        gate.open()
        output = engine.manager.get_result(name, timeout=30)
        assert output is not None
        assert (output.status, output.error) == (RequestStatus.FAILED, "cancelled")
        assert output.generated_tokens == greedy_reference(tiny_llama(), [5], len(output.generated_tokens))
        assert len(output.generated_tokens) == len(output.logprobs) in (3, 4)
        assert_still_right(engine)


@row("cancel_request")
def of_a_waiting_request_ends_it_and_of_an_unknown_one_does_nothing() -> None:
    with gated(EngineConfig(max_requests=1)) as (engine, gate):
        first = engine.manager.add_request([5], max_new_tokens=3, eos_token_id=-1)
        waiting = engine.manager.add_request([6], max_new_tokens=3, eos_token_id=-1)
        engine.manager.cancel_request(waiting)
        engine.manager.cancel_request("nobody")
        engine.manager.add_request([7], request_id="nobody", max_new_tokens=3, eos_token_id=-1)
        gate.open()
        output = engine.manager.get_result(waiting, timeout=30)
        assert output is not None
        assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, [])
        finished(engine, first, 3)
        finished(engine, "nobody", 3)


@row("cancel_request")
def that_comes_late_spares_the_next_request_of_that_id() -> None:
    with gated() as (engine, gate):
        for _ in range(5):
            engine.manager.add_request([5], request_id="a", max_new_tokens=2, eos_token_id=-1)
            gate.step(2)
            output = engine.manager.get_result("a", timeout=30)
            engine.manager.cancel_request("a")
            assert output is not None
            assert len(output.generated_tokens) == 2


@row("cancel_request")
def tells_the_handler_and_forgets_it() -> None:
    async def serve(engine: GenerationEngine, gate: StepGate) -> GenerationOutput:
        got: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        engine.manager.register_result_handler("a", got.put_nowait)
        engine.manager.add_request([5], request_id="a", max_new_tokens=100, eos_token_id=-1)
        await asyncio.to_thread(gate.step, 2)
        engine.manager.cancel_request("a")
        gate.open()
        return await asyncio.wait_for(got.get(), 30)

    with gated() as (engine, gate):
        assert asyncio.run(serve(engine, gate)).status == RequestStatus.FAILED
        assert engine.manager.output_router.result_handlers == {}


@row("get_result")
def waits_for_its_own_and_leaves_others_alone() -> None:
    with pytest.MonkeyPatch.context() as patch, gated() as (engine, gate):
        patch.setattr("rollout.requests.results.PULSE_S", 100.0)  # who is to be told must not depend on looking again
        manager = engine.manager
        manager.add_request([5], request_id="short", max_new_tokens=1, eos_token_id=-1)
        manager.add_request([6], request_id="long", max_new_tokens=5, eos_token_id=-1)
        assert manager.get_result("long", timeout=0.05) is None
        found: list[str] = []

        def read(name: str) -> None:
            output = manager.get_result(name)
            assert output is not None
            found.append(output.request_id)

        readers = [threading.Thread(target=read, args=[name], daemon=True) for name in ("long", "short")]
        for reader in readers:
            reader.start()
            assert not threading.Event().wait(0.05)  # so that the one whose result comes last has waited longest
        gate.open()
        for reader in readers:
            reader.join(30)
        assert found == ["short", "long"]


@row("get_result")
def returns_at_once_when_no_result_can_come() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.manager.get_result("nobody") is None
        name = engine.manager.add_request([5], max_new_tokens=1)
        finished(engine, name, 1)
        assert engine.manager.get_result(name) is None, "it was handed over already"
    assert engine.manager.get_result() is None
    assert engine.manager.get_result(name) is None


@row("get_result")
def of_a_loop_that_ends_meanwhile_returns() -> None:
    engine = GenerationEngine(tiny_llama())
    got: list[object] = []
    with engine:
        reader = threading.Thread(target=lambda: got.append(engine.manager.get_result()))
        reader.start()
    reader.join(30)
    assert got == [None]


@row("request_id_iter")
def ends_with_its_request_however_that_ends() -> None:
    with gated() as (engine, gate):
        names = [engine.manager.add_request([n], max_new_tokens=50, eos_token_id=-1, streaming=True) for n in (5, 6)]
        seen: list[list[GenerationOutput]] = []
        reader = threading.Thread(target=lambda: seen.append(list(engine.manager.request_id_iter(names[0]))))
        reader.start()
        gate.step(3)
        engine.manager.cancel_request(names[0])
        gate.open()
        reader.join(30)
        assert [output.status for output in seen[0]][-1] == RequestStatus.FAILED
        assert {output.request_id for output in seen[0]} == {names[0]}
        assert len(list(engine.manager.request_id_iter(names[1]))) == 50


@row("request_id_iter")
def gives_what_came_before_a_stop_also_after_it() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        name = engine.manager.add_request([5], max_new_tokens=3, eos_token_id=-1, streaming=True)
        engine.manager.stop()
        assert len(list(engine.manager.request_id_iter(name))) == 3


@row("register_result_handler")
def hands_each_result_to_its_own_event_loop() -> None:
    async def serve(engine: GenerationEngine, name: str) -> list[tuple[str, int]]:
        done = asyncio.Event()
        got: list[tuple[str, int]] = []
        mine = asyncio.get_running_loop()

        def take(output: GenerationOutput) -> None:
            assert asyncio.get_running_loop() is mine
            got.append((output.request_id, len(output.generated_tokens)))
            if output.is_finished():
                done.set()

        engine.manager.register_result_handler(name, take)
        engine.manager.add_request([5], request_id=name, max_new_tokens=3, eos_token_id=-1, streaming=True)
        await asyncio.wait_for(done.wait(), 30)
        return got

    with GenerationEngine(tiny_llama()) as engine:
        heard: dict[str, list[tuple[str, int]]] = {}
        threads = [
            threading.Thread(target=lambda n=n: heard.update({n: asyncio.run(serve(engine, n))})) for n in ("a", "b")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert heard == {n: [(n, 1), (n, 2), (n, 3)] for n in ("a", "b")}
        assert engine.manager.output_router.result_handlers == {}


@row("register_result_handler")
def whose_event_loop_is_closed_leaves_the_result_to_be_fetched() -> None:
    async def register(engine: GenerationEngine) -> None:
        engine.manager.register_result_handler("a", print)

    with GenerationEngine(tiny_llama()) as engine:
        asyncio.run(register(engine))
        engine.manager.add_request([5], request_id="a", max_new_tokens=3, eos_token_id=-1)
        finished(engine, "a", 3)
        assert engine.manager.output_router.result_handlers == {}
        assert_still_right(engine)


@row("register_result_handler")
def that_comes_after_the_result_gets_it() -> None:
    async def serve(engine: GenerationEngine) -> list[int]:
        name = engine.manager.add_request([5], max_new_tokens=3, eos_token_id=-1, streaming=True)
        await asyncio.to_thread(wait_until, lambda: engine.manager.counts() == (0, 0))
        got: asyncio.Queue[int] = asyncio.Queue()
        engine.manager.register_result_handler(name, lambda output: got.put_nowait(len(output.generated_tokens)))
        return [await asyncio.wait_for(got.get(), 30) for _ in range(3)]

    with GenerationEngine(tiny_llama()) as engine:
        assert asyncio.run(serve(engine)) == [1, 2, 3]
        assert engine.manager.output_router.result_handlers == {}

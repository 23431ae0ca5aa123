"""Upstream's documented API, row by row: every method of its manager and every field of its config, through an engine.

`docs/upstream_api.md` has a line for each. A rule stands under the row that it is about; what needs a GPU is marked so.
"""

import asyncio
import contextlib
import copy
import io
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fakes import StepGate, greedy_reference, mark, marker_llama, random_prompts, tiny_llama, wait_until
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    SamplingParams,
)
from rollout.requests.results import RequestQueue

Rule = Callable[[], None]
ROWS: list[tuple[str, Rule, str]] = []
DOC = Path(__file__).parent.parent / "docs" / "upstream_api.md"
SMALL = {"page_size": 4, "num_blocks": 24, "max_batch_tokens": 32}


def row(member: str, mark: str = "") -> Callable[[Rule], Rule]:
    """The decorated function is a rule about that member of upstream's API; the mark is "gpu" or "slow"."""

    def add(rule: Rule) -> Rule:
        ROWS.append((member, rule, mark))
        return rule

    return add


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def configured(**settings: object) -> EngineConfig:
    """An engine's config with that of upstream in it."""
    return EngineConfig(
        continuous_batching=ContinuousBatchingConfig(**{"page_size": 16, "max_batch_tokens": 64, **settings})
    )


@contextlib.contextmanager
def gated(config: EngineConfig | None = None) -> Iterator[tuple[GenerationEngine, StepGate]]:
    """A running engine before whose forwards a gate stands; open at the end."""
    engine = GenerationEngine(tiny_llama(), config)
    gate = StepGate(engine)
    with engine:
        try:
            yield engine, gate
        finally:
            gate.open()


def finished(engine: GenerationEngine, request_id: str, tokens: int) -> GenerationOutput:
    output = engine.manager.get_result(request_id, timeout=30)
    assert output is not None
    assert (output.status, output.request_id) == (RequestStatus.FINISHED, request_id)
    assert len(output.generated_tokens) == len(output.logprobs) == tokens
    return output


def assert_still_right(engine: GenerationEngine) -> None:
    assert engine.state == EngineState.RUNNING
    assert engine.generate([[5, 6]], greedy(4))[0].token_ids == greedy_reference(tiny_llama(), [5, 6], 4)


# ---------------------------------------------------------------------------------------------------- generate_batch


@row("generate_batch")
def says_what_generate_says_in_the_order_of_the_inputs() -> None:
    model = tiny_llama()
    prompts = random_prompts([9, 3, 17, 1])
    config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1)
    own = model.generate_batch(
        prompts, config, ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    )
    with GenerationEngine(model) as engine:
        ours = engine.model.generate_batch(prompts, config)
        assert list(ours) == list(own) == ["req_0", "req_1", "req_2", "req_3"]
        for prompt, mine, theirs in zip(prompts, ours.values(), own.values(), strict=True):
            assert mine.generated_tokens == theirs.generated_tokens == greedy_reference(model, prompt, 6)
            assert mine.prompt_ids == prompt
        assert engine.model.generate_batch([]) == {}
        assert_still_right(engine)


@row("generate_batch")
def of_the_users_model_beside_an_engine_disturbs_neither() -> None:
    model = tiny_llama()
    prompts = random_prompts([5, 8])
    settings = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    with GenerationEngine(model) as engine:
        future = engine.submit(prompts[0], greedy(150))
        config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1)
        outputs = model.generate_batch(prompts, config, settings)
        assert [o.generated_tokens for o in outputs.values()] == [greedy_reference(model, p, 6) for p in prompts]
        assert future.result(30).token_ids == greedy_reference(model, prompts[0], 150)


@row("generate_batch")
def shows_a_progress_bar_when_asked() -> None:
    for shown in (True, False):
        with GenerationEngine(tiny_llama()) as engine, contextlib.redirect_stderr(io.StringIO()) as stderr:
            engine.model.generate_batch([[5], [6]], progress_bar=shown, max_new_tokens=2)
        assert ("Solving 2 requests" in stderr.getvalue()) == shown


@row("generate_batch")
def records_the_time_of_each_token_also_of_a_request_that_lost_its_cache() -> None:
    config = GenerationConfig(max_new_tokens=16, eos_token_id=-1)
    with GenerationEngine(tiny_llama(), EngineConfig(**SMALL, prefix_sharing=False)) as engine:
        outputs = engine.model.generate_batch(random_prompts([8] * 8), config, record_timestamps=True).values()
        assert engine.stats().preemptions > 0, "the cache was not small enough to test anything"
    for output in outputs:
        assert len(output.timestamps) == 16
        assert output.timestamps == sorted(output.timestamps)


@row("generate_batch")
def keeps_the_engines_manager_whatever_is_said_about_persistence_and_warm_up() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        manager = engine.manager
        for persistent in (True, False):
            for warmup in (True, False):
                outputs = engine.model.generate_batch(
                    [[5]], persistent_manager=persistent, warmup=warmup, max_new_tokens=3
                )
                assert [len(output.generated_tokens) for output in outputs.values()] == [3]
                assert engine.manager is manager
        assert_still_right(engine)


@row("generate_batch")
def of_the_users_model_keeps_and_destroys_a_manager_of_its_own() -> None:
    model = tiny_llama()
    settings = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    with GenerationEngine(model) as engine:
        for warmup in (True, False):
            model.generate_batch(
                [[5]], continuous_batching_config=settings, persistent_manager=True, warmup=warmup, max_new_tokens=2
            )
            assert type(model._cached_continuous_batching_manager) is continuous_api.ContinuousBatchingManager
        model.destroy_cached_continuous_batching_manager()
        assert_still_right(engine)


@row("generate_batch")
def takes_a_generation_config_a_call() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        sampled = GenerationConfig(do_sample=True, temperature=5.0, max_new_tokens=12, num_return_sequences=3)
        outputs = engine.model.generate_batch([[5, 6], [7]], sampled)
        assert list(outputs) == [
            name for n in (0, 1) for name in (f"req_{n}__child#0", f"req_{n}__child#1", f"req_{n}")
        ]
        assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 6
        (output,) = engine.model.generate_batch([[5, 6]], GenerationConfig(max_new_tokens=4, eos_token_id=-1)).values()
        assert output.generated_tokens == greedy_reference(model, [5, 6], 4)


@row("generate_batch")
def refuses_what_cannot_work_before_anything_is_queued() -> None:
    engine = GenerationEngine(tiny_llama())
    with pytest.raises(EngineStateError, match="not running"):
        engine.model.generate_batch([[5]])
    with engine:
        for inputs, arguments, message in [
            ([[5], []], {}, r"inputs\[1\]: the prompt is empty"),
            ([[5], [64]], {}, r"inputs\[1\].*vocabulary"),
            ([[5]], {"continuous_batching_config": ContinuousBatchingConfig()}, "EngineConfig"),
            ([[5]], {"top_k": 3}, "takes no top_k"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                engine.model.generate_batch(inputs, **arguments)
        assert engine.stats().generated_tokens == 0
        assert_still_right(engine)


@row("generate_batch")
def that_is_interrupted_leaves_nothing_behind() -> None:
    class InterruptedError_(BaseException):
        pass

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if "1/2" in text:
                raise InterruptedError_
            return len(text)

    with GenerationEngine(tiny_llama()) as engine:
        with contextlib.redirect_stderr(Interrupting()), pytest.raises(InterruptedError_):
            engine.model.generate_batch([[5], [6]], GenerationConfig(eos_token_id=-1), progress_bar=True)
        wait_until(lambda: engine.manager.counts() == (0, 0))
        assert_still_right(engine)


@row("generate_batch")
def of_a_dead_engine_returns_what_there_is() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off")

    with GenerationEngine(tiny_llama()) as engine:
        engine.model.register_forward_hook(fail)
        (output,) = engine.model.generate_batch([[5]]).values()
        assert (output.status, output.error) == (RequestStatus.FAILED, "the device fell off")
        with pytest.raises(EngineStateError, match="not running"):
            engine.model.generate_batch([[5]])


@row("generate_batch")
def of_a_copy_of_the_engines_model_is_not_the_engines() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        other = copy.deepcopy(engine.model)
        with pytest.raises(EngineStateError, match="copied from an engine's"):
            other.generate_batch([[5]])


# -------------------------------------------------------------------------------------------------------- add_request

REFUSED: dict[str, tuple[object, dict[str, object], str]] = {
    "no tokens": ([], {}, "empty"),
    "out of vocabulary": ([64], {}, "vocabulary"),
    "negative": ([-1], {}, "vocabulary"),
    "huge": ([2**40], {}, "vocabulary"),
    "a float": ([5.5], {}, "not a token id"),
    "text": ("hello", {}, "text"),
    "nested": ([[5, 6]], {}, "flat list"),
    "too long": ([5] * 600, {}, "beyond the model's 512"),
    "no new tokens": ([5], {"max_new_tokens": 0}, "max_new_tokens"),
    "negative new tokens": ([5], {"max_new_tokens": -3}, "max_new_tokens"),
    "more than fits": ([5], {"max_new_tokens": 10_000}, "beyond the model's 512"),
    "an id that is no string": ([5], {"request_id": 7}, "request_id"),
    "an EOS that is no id": ([5], {"eos_token_id": "</s>"}, "eos_token_id"),
    "an unknown argument": ([5], {"repetition_penalty": 1.2}, "repetition_penalty"),
    "a temperature that is none": ([5], {"temperature": "hot"}, "temperature"),
    "a negative temperature": ([5], {"temperature": -1.0}, "temperature"),
    "a top_p of nothing": ([5], {"top_p": 0.0}, "top_p"),
}


@row("add_request")
def refuses_what_would_kill_the_loop_before_it_gets_there() -> None:
    with gated() as (engine, gate):
        ours = engine.submit([5], greedy(10))
        gate.wait_for_arrival()
        for inputs, arguments, message in REFUSED.values():
            with pytest.raises(InvalidRequestError, match=message):
                engine.manager.add_request(inputs, **arguments)
        assert engine.manager.input_queue.empty()
        gate.open()
        assert ours.result(30).token_ids == greedy_reference(tiny_llama(), [5], 10)
        assert_still_right(engine)


@row("add_request")
def takes_tensors_and_every_form_of_eos() -> None:
    (greedy_token,) = greedy_reference(tiny_llama(), [5, 6], 1)
    with GenerationEngine(tiny_llama()) as engine:
        for prompt in ([5, 6], torch.tensor([5, 6])):
            for eos, tokens in [(-1, 4), ([-1], 4), ([], 4), (greedy_token, 1), ([63, greedy_token], 1)]:
                finished(engine, engine.manager.add_request(prompt, eos_token_id=eos, max_new_tokens=4), tokens)


@row("add_request")
def without_a_limit_is_bounded_by_the_default_and_by_the_cache() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        finished(engine, engine.manager.add_request([5], eos_token_id=-1), 256)
    with GenerationEngine(tiny_llama(), EngineConfig(**SMALL)) as engine:
        finished(engine, engine.manager.add_request([5, 6], eos_token_id=-1), 24 * 4 - 1)
        assert_still_right(engine)
    model = tiny_llama()
    model.generation_config.max_new_tokens = 7
    with GenerationEngine(model) as engine:
        finished(engine, engine.manager.add_request([5], eos_token_id=-1), 7)


@row("add_request")
def refuses_an_id_in_flight_queued_or_active_and_takes_it_again_afterwards() -> None:
    with gated() as (engine, gate):
        manager = engine.manager
        manager.add_request([5], request_id="a", max_new_tokens=3, eos_token_id=-1)
        manager.add_request([6], request_id="b", max_new_tokens=3, eos_token_id=-1)
        for _ in range(2):
            for name in "ab":
                with pytest.raises(InvalidRequestError, match=f"'{name}' is already in flight"):
                    manager.add_request([7], request_id=name)
            gate.wait_for_arrival()
        gate.open()
        for name, prompt in {"a": [5], "b": [6]}.items():
            assert finished(engine, name, 3).generated_tokens == greedy_reference(tiny_llama(), prompt, 3)
        manager.add_request([7], request_id="a", max_new_tokens=2, eos_token_id=-1)
        assert finished(engine, "a", 2).generated_tokens == greedy_reference(tiny_llama(), [7], 2)


@row("add_request")
def may_be_given_any_id_also_one_that_the_engine_makes_up() -> None:
    with gated() as (engine, gate):
        names = ["rollsync-0", "rollsync-1", "upstream-0", "req_0", "x__child#0"]
        ours = engine.submit([5], greedy(4))
        for name in names:
            engine.manager.add_request([6], request_id=name, max_new_tokens=3, eos_token_id=-1)
        made_up = engine.manager.add_request([6], max_new_tokens=3, eos_token_id=-1)
        assert made_up not in names
        gate.open()
        for name in [*names, made_up]:
            assert finished(engine, name, 3).generated_tokens == greedy_reference(tiny_llama(), [6], 3)
        assert ours.result(30).token_ids == greedy_reference(tiny_llama(), [5], 4)


@row("add_request")
def is_greedy_unless_the_config_or_the_request_samples() -> None:
    greedy_tokens = greedy_reference(tiny_llama(), [5], 20)
    with GenerationEngine(tiny_llama()) as engine:

        def says(**arguments: object) -> list[int]:
            name = engine.manager.add_request([5], max_new_tokens=20, eos_token_id=-1, **arguments)
            return finished(engine, name, 20).generated_tokens

        assert says() == says(temperature=0.0) == says(top_k=1) == greedy_tokens
        assert says(temperature=1) != greedy_tokens
        assert says(temperature=5.0, top_k=0) != greedy_tokens, "top_k=0 is off, not greedy"
        assert says(temperature=1.0, seed=3) == says(temperature=1.0, seed=3) != says(temperature=1.0, seed=4)


@row("add_request")
def before_the_start_waits_for_it_and_after_the_end_is_an_error() -> None:
    engine = GenerationEngine(tiny_llama())
    name = engine.manager.add_request([5], max_new_tokens=2, eos_token_id=-1)
    with engine:
        finished(engine, name, 2)
    with pytest.raises(EngineStateError, match="takes no more requests"):
        engine.manager.add_request([5])


@row("add_request")
def on_a_dead_loop_is_an_error_with_its_cause() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off")

    with GenerationEngine(tiny_llama()) as engine:
        engine.model.register_forward_hook(fail)
        name = engine.manager.add_request([5])
        output = engine.manager.get_result(name, timeout=30)
        assert output is not None
        assert output.status == RequestStatus.FAILED
        wait_until(lambda: not engine.manager.is_running())
        with pytest.raises(EngineDeadError, match="fell off"):
            engine.manager.add_request([5])


@row("add_request")
def streams_each_token() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        name = engine.manager.add_request([5], max_new_tokens=4, eos_token_id=-1, streaming=True)
        seen = [len(output.generated_tokens) for output in engine.manager.request_id_iter(name)]
    assert seen == [1, 2, 3, 4]


@row("add_request")
def of_one_token_with_children_works_alone_and_on_a_prompt_seen_before() -> None:
    model = tiny_llama()
    model.generation_config.num_return_sequences = 3
    with GenerationEngine(model, EngineConfig(page_size=4)) as engine:
        model = tiny_llama()
        for prompt in ([5], [6, 7, 8, 9, 10], [6, 7, 8, 9, 10]):
            name = engine.manager.add_request(prompt, max_new_tokens=3, eos_token_id=-1)
            for sample in (name, f"{name}__child#0", f"{name}__child#1"):
                assert finished(engine, sample, 3).generated_tokens == greedy_reference(model, prompt, 3)


@row("add_requests")
def queues_all_or_none_and_names_them_in_order() -> None:
    prompts = random_prompts([3, 9, 5])
    with gated() as (engine, gate):
        with pytest.raises(InvalidRequestError, match=r"inputs\[2\]: the prompt is empty"):
            engine.manager.add_requests([*prompts[:2], []])
        with pytest.raises(InvalidRequestError, match="list of prompts"):
            engine.manager.add_requests(5)
        assert engine.manager.input_queue.empty()
        gate.open()
        names = engine.manager.add_requests(prompts, max_new_tokens=3)
        assert names == ["req_0", "req_1", "req_2"]
        for name, prompt in zip(names, prompts, strict=True):
            output = engine.manager.get_result(name, timeout=30)
            assert output is not None
            assert output.prompt_ids == prompt


@row("add_requests")
def passes_on_streaming_timestamps_and_sampling() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        (name,) = engine.manager.add_requests(
            [[5]], max_new_tokens=3, streaming=True, record_timestamps=True, temperature=1.0, seed=7
        )
        outputs = list(engine.manager.request_id_iter(name))
        assert [len(output.timestamps) for output in outputs] == [len(output.generated_tokens) for output in outputs]
        assert len(outputs) == len(outputs[-1].generated_tokens)


# ---------------------------------------------------------------------------------------------- cancels and results


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
            reader.join(10)
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


# ------------------------------------------------------------------------------------------------------- start and stop


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


# --------------------------------------------------------------------------------------------------------- the fields


def assert_says_what_generate_says(config: EngineConfig) -> GenerationEngine:
    """With an engine of that config; it is stopped when it comes back."""
    model = tiny_llama()
    prompts = random_prompts([7, 20, 33])
    with GenerationEngine(model, config) as engine:
        for _ in range(2):
            rollouts = engine.generate(prompts, greedy(8))
            assert [r.token_ids for r in rollouts] == [greedy_reference(model, prompt, 8) for prompt in prompts]
    return engine


def resolved(engine: GenerationEngine) -> ContinuousBatchingConfig:
    return engine.manager.continuous_batching_config


@row("page_size")
def is_the_tokens_of_a_block_and_at_least_four() -> None:
    engine = assert_says_what_generate_says(configured(page_size=8, num_blocks=32))
    assert engine.manager.batch_processor.cache.num_blocks == 32
    with pytest.raises(InvalidRequestError, match="page_size must be at least 4"):
        GenerationEngine(tiny_llama(), configured(page_size=3))


@row("block_size")
def is_the_old_name_of_page_size() -> None:
    engine = assert_says_what_generate_says(configured(block_size=8, num_blocks=32))
    assert resolved(engine).page_size == 8


@row("num_blocks")
def bounds_the_cache_and_fails_in_the_constructor_when_absurd() -> None:
    engine = assert_says_what_generate_says(configured(num_blocks=12))
    assert engine.manager.batch_processor.cache.num_blocks == 12
    with pytest.raises(InvalidRequestError, match="num_blocks=1000000000"):
        GenerationEngine(tiny_llama(), configured(num_blocks=10**9))


@row("max_batch_tokens")
def bounds_the_tokens_of_a_step() -> None:
    sizes: list[int] = []
    engine = GenerationEngine(tiny_llama(), configured(max_batch_tokens=16))
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with engine:
        engine.generate(random_prompts([40, 30]), greedy(4))
    assert max(sizes) == 16


@row("max_memory_percent")
def is_the_share_of_memory_that_the_cache_must_fit_into() -> None:
    assert resolved(assert_says_what_generate_says(configured(max_memory_percent=0.3))).max_memory_percent == 0.3
    with pytest.raises(InvalidRequestError, match="available memory"):
        GenerationEngine(tiny_llama(), configured(max_memory_percent=1e-9))


@row("max_requests_per_batch")
def bounds_the_requests_of_a_step() -> None:
    active: list[int] = []
    engine = GenerationEngine(tiny_llama(), configured(max_requests_per_batch=3))
    engine.model.register_forward_hook(lambda _, args, output: active.append(output.logits.shape[1]))
    with engine:
        engine.generate(random_prompts([4] * 8), greedy(4))
    assert max(active) == 3


@row("max_blocks_per_request")
def sizes_a_table_of_the_flash_decode_path_and_is_off_on_a_cpu() -> None:
    assert resolved(assert_says_what_generate_says(configured(max_blocks_per_request=4))).max_blocks_per_request == 0


@row("allow_block_sharing")
def shares_equal_beginnings_or_does_not() -> None:
    for allowed in (True, False):
        engine = assert_says_what_generate_says(configured(allow_block_sharing=allowed))
        assert (engine.stats().prefix_hits > 0) == allowed
    config = EngineConfig(prefix_sharing=False, continuous_batching=ContinuousBatchingConfig(page_size=16))
    assert assert_says_what_generate_says(config).stats().prefix_hits == 0


@row("use_async_batching")
def needs_streams_and_says_so_on_a_cpu() -> None:
    for off in (False, None):
        assert resolved(assert_says_what_generate_says(configured(use_async_batching=off))).use_async_batching is False
    with pytest.raises(InvalidRequestError, match=r"Async batching requires a device type in \('cuda', 'xpu'\)"):
        GenerationEngine(tiny_llama(), configured(use_async_batching=True))


@row("use_cuda_graph")
def is_off_where_there_are_no_graphs() -> None:
    for wanted in (True, False, (True, False)):
        engine = assert_says_what_generate_says(configured(use_cuda_graph=wanted))
        assert not engine.manager.uses_graphs


@row("q_padding_interval_size")
def of_queries_reaches_upstream() -> None:
    assert (
        resolved(assert_says_what_generate_says(configured(q_padding_interval_size=16))).q_padding_interval_size == 16
    )
    assert resolved(assert_says_what_generate_says(configured())).q_padding_interval_size == 64


@row("kv_padding_interval_size")
def of_keys_reaches_upstream() -> None:
    engine = assert_says_what_generate_says(configured(kv_padding_interval_size=512))
    assert resolved(engine).kv_padding_interval_size == 512
    assert resolved(assert_says_what_generate_says(configured())).kv_padding_interval_size == 64 * 256


@row("scheduler_type")
def is_one_of_two() -> None:
    for kind in ("fifo", "prefill_first"):
        assert_says_what_generate_says(configured(scheduler_type=kind))
    with pytest.raises(InvalidRequestError, match=r"scheduler_type must be one of .*got 'lifo'"):
        GenerationEngine(tiny_llama(), configured(scheduler_type="lifo"))


@row("safety_margin")
def keeps_room_for_those_that_decode() -> None:
    most: dict[float, int] = {}
    for margin in (0.0, 0.9):
        engine = GenerationEngine(tiny_llama(), configured(safety_margin=margin, num_blocks=20))
        active: list[int] = []
        engine.model.register_forward_hook(lambda *_, e=engine, a=active: a.append(e.manager.counts()[0]))
        with engine:
            engine.generate(random_prompts([40] * 4), greedy(20))
        most[margin] = max(active)
    assert most[0.9] < most[0.0]
    with pytest.raises(InvalidRequestError, match="safety_margin"):
        GenerationEngine(tiny_llama(), configured(safety_margin=2.0))


@row("return_logprobs")
def is_always_on() -> None:
    for wanted in (True, False):
        with GenerationEngine(tiny_llama(), configured(return_logprobs=wanted)) as engine:
            finished(engine, engine.manager.add_request([5], max_new_tokens=3, eos_token_id=-1), 3)


@row("seed")
def seeds_the_engines_own_draws_and_nobody_elses() -> None:
    said: dict[int, list[list[int]]] = {3: [], 4: []}
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        undisturbed = torch.rand(4)
        torch.manual_seed(0)
        with GenerationEngine(tiny_llama(), configured(seed=seed)) as engine:
            name = engine.manager.add_request([5], max_new_tokens=20, temperature=1.0, eos_token_id=-1)
            said[seed].append(finished(engine, name, 20).generated_tokens)
        assert torch.equal(torch.rand(4), undisturbed)
    assert said[3][0] == said[3][1] != said[4][0]


@row("auto_switch_to_flash")
def never_switches_where_there_is_no_flash() -> None:
    for switch in (True, False):
        engine = assert_says_what_generate_says(configured(auto_switch_to_flash=switch))
        assert "flash" not in engine.model.config._attn_implementation


@row("cpu_offload_space")
def of_a_model_on_the_cpu_is_refused() -> None:
    for space in (1.0, None):
        with pytest.raises(InvalidRequestError, match="cpu_offload_space"):
            GenerationEngine(tiny_llama(), configured(cpu_offload_space=space))
    assert_says_what_generate_says(configured(cpu_offload_space=0.0))


@row("cpu_offload_space_safety_threshold")
def of_zero_turns_offloading_off() -> None:
    engine = assert_says_what_generate_says(configured(cpu_offload_space=1.0, cpu_offload_space_safety_threshold=0.0))
    assert resolved(engine).cpu_offload_space_safety_threshold == 0.0


@row("max_queue_size")
def makes_upstreams_own_requests_wait_for_room_and_never_the_engines() -> None:
    with gated(configured(max_queue_size=2)) as (engine, gate):
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        for _ in range(2):
            engine.manager.add_request([6], max_new_tokens=2, eos_token_id=-1)
        added = threading.Thread(
            target=lambda: engine.manager.add_request([7], request_id="third", max_new_tokens=2, eos_token_id=-1)
        )
        added.start()
        futures = [engine.submit([8], greedy(2)) for _ in range(4)]
        added.join(0.05)
        assert added.is_alive()
        gate.open()
        added.join(30)
        finished(engine, "third", 2)
        assert [len(future.result(30).token_ids) for future in futures] == [2] * 4


@row("max_queue_size")
def gives_up_after_upstreams_ten_seconds() -> None:
    with pytest.MonkeyPatch.context() as patch, gated(configured(max_queue_size=1)) as (engine, gate):
        patch.setattr("rollout.requests.upstream_api.QUEUE_WAIT_S", 0.05)
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        engine.manager.add_request([6])
        with pytest.raises(queue.Full, match="max_queue_size"):
            engine.manager.add_request([7])


@row("max_queue_size")
def a_wait_for_room_ends_at_once_when_none_can_come_any_more() -> None:
    asked, is_open = threading.Event(), threading.Event()
    is_open.set()

    def check() -> None:
        asked.set()
        if not is_open.is_set():
            raise EngineStateError("closed")

    waiting = RequestQueue()
    waiting.put("one")
    with ThreadPoolExecutor(1) as pool:
        room = pool.submit(waiting.wait_for_room, 1, 30, check)
        assert asked.wait(30)
        waiting.get()
        assert room.result(30)
        waiting.put("another")
        asked.clear()
        room = pool.submit(waiting.wait_for_room, 1, 30, check)
        assert asked.wait(30)
        is_open.clear()
        waiting.wake()
        assert isinstance(room.exception(10), EngineStateError)


@row("max_queue_size")
def nobody_waits_for_room_with_a_loop_that_stops() -> None:
    with gated(configured(max_queue_size=1)) as (engine, gate):
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        engine.manager.add_request([6])
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(engine.manager.add_request, [7])
            wait_until(lambda: len(engine.manager.names._names) == 2)  # it waits, or is about to
            engine.manager.stop(block=False, hard_stop=True)
            assert isinstance(refused.exception(5), EngineStateError)


@row("per_request_processors")
def are_always_on() -> None:
    for wanted in (True, False):
        with GenerationEngine(tiny_llama(), configured(per_request_processors=wanted)) as engine:
            names = [
                engine.manager.add_request([5], max_new_tokens=8, eos_token_id=-1, temperature=t) for t in (0.0, 5.0)
            ]
            cold, hot = (finished(engine, name, 8).generated_tokens for name in names)
            assert cold == greedy_reference(tiny_llama(), [5], 8) != hot


@row("drop_unsupported_processors")
def drops_with_a_warning_or_refuses() -> None:
    model = tiny_llama()
    model.generation_config.repetition_penalty = 1.3
    with GenerationEngine(model, configured()) as engine:
        engine.generate([[5]], greedy(2))
    model.generation_config.suppress_tokens = [7]
    with pytest.raises(InvalidRequestError, match="has no RepetitionPenaltyLogitsProcessor, SuppressTokens"):
        GenerationEngine(model, configured(drop_unsupported_processors=False))


@row("disable_nccl_graph_mixing")
def matters_under_tensor_parallelism_only() -> None:
    for disabled in (True, False):
        engine = assert_says_what_generate_says(configured(disable_nccl_graph_mixing=disabled))
        assert resolved(engine).disable_nccl_graph_mixing == disabled


@row("cpu_group_timeout")
def of_the_group_matters_under_tensor_parallelism_only() -> None:
    for timeout in (5.0, None):
        assert (
            resolved(assert_says_what_generate_says(configured(cpu_group_timeout=timeout))).cpu_group_timeout == timeout
        )


@row("max_cached_graphs")
def is_taken_and_means_nothing() -> None:
    assert_says_what_generate_says(configured(max_cached_graphs=3))


# --------------------------------------------------------------------------------------------------- compiled forwards


def plain(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    """A compiler that compiles nothing."""
    return graph.forward


def broken(*_: object) -> Callable[..., object]:
    raise RuntimeError("no compiler here")


@row("varlen_compile_config", "slow")
def is_used_on_a_cpu_with_upstreams_attention_whose_shapes_are_fixed() -> None:
    config = configured(num_blocks=8, varlen_compile_config=CompileConfig(backend=plain, mode=None, dynamic=True))
    model = tiny_llama()
    with GenerationEngine(model, config) as engine:
        (rollout,) = engine.generate([[5, 6, 7]], greedy(3))
        assert rollout.token_ids == greedy_reference(model, [5, 6, 7], 3)
        assert engine.model.config._attn_implementation == "sdpa"


@row("varlen_compile_config", "slow")
def computes_with_the_weights_of_the_last_update_and_labels_tokens_with_it() -> None:
    config = configured(num_blocks=24, varlen_compile_config=CompileConfig(backend=plain, mode=None, dynamic=True))
    engine = GenerationEngine(marker_llama(), config)
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5, 6, 7], greedy(6))
        gate.step(3)
        gate.wait_for_arrival()
        updated = engine.call(lambda engine: mark_inside_an_update(engine, 1))
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        updated.result(60)
        rollout = future.result(60)
        assert rollout.token_ids == rollout.versions == [0, 0, 0, 0, 1, 1]


def mark_inside_an_update(engine: GenerationEngine, version: int) -> None:
    with engine.update(version) as model:
        mark(model, version)


@row("varlen_compile_config")
def that_cannot_be_compiled_fails_in_the_constructor() -> None:
    config = configured(num_blocks=8, varlen_compile_config=CompileConfig(backend=broken, mode=None))
    with pytest.raises(InvalidRequestError, match="no compiler here"):
        GenerationEngine(tiny_llama(), config)


@row("decode_compile_config")
def is_of_the_flash_decode_path_and_ignored_on_a_cpu() -> None:
    engine = assert_says_what_generate_says(configured(decode_compile_config=CompileConfig(backend=broken)))
    assert resolved(engine).decode_compile_config is None


@row("default_compile_level")
def of_zero_compiles_nothing() -> None:
    assert resolved(assert_says_what_generate_says(configured(default_compile_level=0))).varlen_compile_config is None


@row("default_compile_level", "slow")
def above_zero_compiles_on_a_cpu_that_has_a_compiler() -> None:
    for level, mode in [(1, "default"), (2, "max-autotune-no-cudagraphs")]:
        engine = assert_says_what_generate_says(configured(num_blocks=24, default_compile_level=level))
        assert resolved(engine).varlen_compile_config.mode == mode


@row("use_default_compile_configs")
def is_the_old_name_of_the_lowest_and_the_highest_level() -> None:
    assert ContinuousBatchingConfig(use_default_compile_configs=True).default_compile_level == 3
    engine = assert_says_what_generate_says(configured(use_default_compile_configs=False))
    assert resolved(engine).default_compile_level == 0


# ------------------------------------------------------------------------------------------------------------- on a GPU


def assert_says_it_on_the_gpu(model: torch.nn.Module, **settings: object) -> GenerationEngine:
    """Greedy tokens of a bfloat16 model are those of a plain forward up to its rounding, also after an update."""
    prompts = random_prompts([7, 20, 33])
    with GenerationEngine(model, configured(**settings)) as engine:
        for version in (0, 1):
            for rollout, prompt in zip(engine.generate(prompts, greedy(16)), prompts, strict=True):
                with torch.no_grad():
                    ids = torch.tensor([prompt + rollout.token_ids], device="cuda")
                    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
                said = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
                assert (logits.max(-1).values - said).max() < 0.25
                assert rollout.versions == [version] * 16
            if not version:
                with engine.update() as shell, torch.no_grad():
                    for parameter in shell.parameters():
                        parameter.mul_(1.01)
    return engine


def on_gpu(attention: str = "sdpa") -> torch.nn.Module:
    model = tiny_llama(hidden_size=256).to("cuda", torch.bfloat16)  # heads of 64, as flash wants them
    model.set_attn_implementation(attention)
    return model


def flash() -> str:
    """The name of the flash attention that is installed; skips without."""
    pytest.importorskip("flash_attn", reason="needs flash-attn")
    return "flash_attention_2"


@row("use_cuda_graph", "gpu")
def captures_graphs_that_follow_updates() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), use_cuda_graph=True).manager.uses_graphs


@row("q_padding_interval_size", "gpu")
def of_queries_turns_graphs_on() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), q_padding_interval_size=16).manager.uses_graphs


@row("kv_padding_interval_size", "gpu")
def of_keys_turns_graphs_on() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), kv_padding_interval_size=512).manager.uses_graphs


@row("use_async_batching", "gpu")
def prepares_the_next_batch_while_this_one_runs() -> None:
    for graphs in (False, True):
        engine = assert_says_it_on_the_gpu(on_gpu(), use_async_batching=True, use_cuda_graph=graphs)
        assert resolved(engine).use_async_batching is True


@row("max_blocks_per_request", "gpu")
def gives_flash_its_decode_path() -> None:
    engine = assert_says_it_on_the_gpu(on_gpu(flash()), page_size=256, max_blocks_per_request=4)
    assert resolved(engine).max_blocks_per_request == 4


@row("auto_switch_to_flash", "gpu")
def switches_to_flash_where_it_is_installed() -> None:
    flash()
    for switch in (True, False):
        engine = assert_says_it_on_the_gpu(on_gpu(), auto_switch_to_flash=switch, page_size=256)
        assert ("flash" in engine.model.config._attn_implementation) == switch


@row("decode_compile_config", "gpu")
def compiles_the_flash_decode_path() -> None:
    config = CompileConfig(mode="default", dynamic=True)
    assert_says_it_on_the_gpu(on_gpu(flash()), page_size=256, max_blocks_per_request=4, decode_compile_config=config)


@row("default_compile_level", "gpu")
def above_zero_compiles_on_a_gpu() -> None:
    assert_says_it_on_the_gpu(on_gpu(), default_compile_level=1)


@row("cpu_offload_space", "gpu")
def moves_kv_to_host_memory_instead_of_dropping_it() -> None:
    engine = assert_says_it_on_the_gpu(on_gpu(), cpu_offload_space=0.1, num_blocks=6)
    assert engine.stats().preemptions == 0


# ------------------------------------------------------------------------------------------------------------- the rows


MARKS = {
    "": [],
    "slow": [pytest.mark.slow],
    "gpu": [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
}


@pytest.mark.parametrize(
    ("member", "rule"),
    [
        pytest.param(
            member,
            rule,
            id=f"{member}-{rule.__name__}",
            marks=MARKS[mark],
        )
        for member, rule, mark in ROWS
    ],
)
def test_row(member: str, rule: Rule) -> None:
    rule()


def documented() -> dict[str, str]:
    """Of each member with a line in the document: where its rules run."""
    lines = re.findall(r"^\| `(\w+)` \|[^|]+\| ([A-Z, ]+) \|", DOC.read_text(), flags=re.MULTILINE)
    assert len(lines) == len(dict(lines)), "a member has two lines"
    return dict(lines)


def test_the_document_has_a_line_for_each_row_that_says_where_it_runs() -> None:
    devices: dict[str, set[str]] = {}
    for member, _, marked in ROWS:
        devices.setdefault(member, set()).add("GPU" if marked == "gpu" else "CPU")
    assert f"](docs/{DOC.name})" in (DOC.parent.parent / "README.md").read_text()
    assert documented() == {member: ", ".join(sorted(kinds)) for member, kinds in devices.items()}


def test_no_field_and_no_method_of_upstreams_is_left_out() -> None:
    manager = continuous_api.ContinuousBatchingManager
    methods = {name for name in vars(manager) if not name.startswith("_")}
    wanted = {field.name for field in fields(ContinuousBatchingConfig)} | methods | {"generate_batch"}
    assert wanted - {member for member, _, _ in ROWS} == set()


def test_no_two_rules_of_a_row_have_one_name() -> None:
    names = [(member, rule.__name__) for member, rule, _ in ROWS]
    assert len(names) == len(set(names))

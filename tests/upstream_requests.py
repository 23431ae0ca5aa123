"""Rules of upstream's `add_request` and `add_requests`."""

import pytest
import torch
from fakes import greedy_reference, random_prompts, tiny_llama, wait_until
from transformers.generation.continuous_batching.requests import RequestStatus
from upstream_rows import SMALL, assert_still_right, finished, gated, greedy, row

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineStateError,
    GenerationEngine,
    InvalidRequestError,
)

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

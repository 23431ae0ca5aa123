"""One request can never hurt another: what cannot work is refused in the caller's face, everything else works."""

import re
from collections import UserList
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from fakes import VOCAB_SIZE, StepGate, greedy_reference, random_prompts, tiny_gemma3, tiny_llama, wait_until

from rollout import EngineConfig, EngineState, FinishReason, GenerationEngine, InvalidRequestError, SamplingParams

GREEDY = SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=())
BYSTANDER = [9, 8, 7]
BYSTANDER_TOKENS = 300


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 3, "temperature": 0, "stop_token_ids": (), **changes})


REFUSED_PROMPTS: dict[str, tuple[object, str]] = {
    "empty": ([], r"empty; it needs at least one token"),
    "an empty tensor": (torch.tensor([], dtype=torch.long), r"empty; it needs at least one token"),
    "None": (None, r"flat list of token ids, got NoneType"),
    "a number": (5, r"flat list of token ids, got int \(5\)"),
    "negative": ([5, -1], r"prompt_ids\[1\] is -1, outside the model's vocabulary of 64 ids"),
    "out of vocabulary": ([5, 6, VOCAB_SIZE], r"prompt_ids\[2\] is 64, outside the model's vocabulary .* tokenizer"),
    "2**40": ([2**40], r"prompt_ids\[0\] is 1099511627776, outside"),
    "2**70": ([2**70], r"prompt_ids\[0\] is 1180591620717411303424, outside"),
    "a float": ([5, 6.0], r"prompt_ids\[1\] is 6.0 \(float\), not a token id; pass one flat list of ints"),
    "nan": ([float("nan")], r"prompt_ids\[0\] is nan \(float\)"),
    "a bool": ([True], r"prompt_ids\[0\] is True, not a token id"),
    "None inside": ([5, None], r"prompt_ids\[1\] is None \(NoneType\)"),
    "strings inside": (["5", "6"], r"prompt_ids\[0\] is '5' \(str\)"),
    "a string": ("hello there", r"the prompt is text \('hello there'\); encode it with the tokenizer"),
    "an empty string": ("", r"the prompt is text"),
    "bytes": (b"hello", r"the prompt is text \(b'hello'\)"),
    "a bytearray": (bytearray(b"\x05\x06"), r"the prompt is text \(b'\\x05\\x06'\)"),
    "a memoryview": (memoryview(b"\x05\x06"), r"the prompt is text"),
    "nested": ([[5, 6]], r"prompt_ids\[0\] is \[5, 6\] \(list\), not a token id; .* one prompt a call"),
    "2-D tensor": (torch.ones(1, 3, dtype=torch.long), r"shape \(1, 3\); .* 1-D .*drop the batch dimension"),
    "0-d tensor": (torch.tensor(5), r"shape \(\); pass one prompt a call, as a 1-D tensor"),
    "2-D array": (np.ones((2, 3), dtype=np.int64), r"shape \(2, 3\)"),
    "a float tensor": (torch.tensor([5.0, 6.0]), r"prompt_ids\[0\] is 5.0 \(float\)"),
    "a bool tensor": (torch.tensor([True]), r"prompt_ids\[0\] is True"),
    "a float array": (np.array([5.0]), r"prompt_ids\[0\] is 5.0 \(float\)"),
    "an object array": (np.array([5, None]), r"prompt_ids\[1\] is None"),
    "a tensor without data": (torch.ones(3, dtype=torch.long, device="meta"), r"cannot be read .*; pass a list"),
    "a set": ({5, 6}, r"flat list of token ids, got set"),
    "a dict": ({5: 6}, r"flat list of token ids, got dict"),
    "what a tokenizer returns": ({"input_ids": [5, 6]}, r"""got dict .*; pass its \["input_ids"\]"""),
    "a generator": ((i for i in [5, 6]), r"flat list of token ids, got generator"),
}

REFUSED_ARGUMENTS: dict[str, tuple[dict[str, object], str]] = {
    "params of another kind": (
        {"params": {"max_new_tokens": 3}},
        r"must be SamplingParams.* got \{'max_new_tokens': 3\}",
    ),
    "max_new_tokens beyond everything": (
        {"params": params(max_new_tokens=10**9)},
        r"=1000000000 .*lower max_new_tokens",
    ),
    "a stop token that cannot come": (
        {"params": params(stop_token_ids=[64])},
        r"stop token id 64 is outside .* 64 ids",
    ),
    "a stop token of 2**40": ({"params": params(stop_token_ids=[2**40])}, r"stop token id 1099511627776 is outside"),
    "request_id a number": ({"request_id": 5}, r"request_id must be a non-empty string or None, got 5"),
    "request_id empty": ({"request_id": ""}, r"request_id must be a non-empty string or None, got ''"),
    "request_id bytes": ({"request_id": b"a"}, r"request_id must be a non-empty string or None, got b'a'"),
    "group_id a number": ({"group_id": 5}, r"group_id must be a non-empty string or None, got 5"),
    "prompt_id a list": ({"prompt_id": ["a"]}, r"prompt_id must be a non-empty string or None, got \['a'\]"),
    "sample_index negative": ({"sample_index": -1}, r"sample_index must be a non-negative integer .*got -1"),
    "sample_index a float": ({"sample_index": 1.0}, r"sample_index must be a non-negative integer .*got 1.0"),
    "sample_index a bool": ({"sample_index": True}, r"sample_index must be a non-negative integer .*got True"),
    "sample_index None": ({"sample_index": None}, r"sample_index must be a non-negative integer .*got None"),
    "sample_index 2**63": ({"sample_index": 2**63}, r"sample_index .* below 2\*\*63, got 9223372036854775808"),
    "metadata a list": ({"metadata": [1]}, r"metadata must be a dict or None, got list"),
    "metadata a string": ({"metadata": "x"}, r"metadata must be a dict or None, got str"),
    "timeout_s 0": ({"timeout_s": 0}, r"timeout_s must be a positive, finite number .*got 0"),
    "timeout_s negative": ({"timeout_s": -1.0}, r"timeout_s must be a positive, finite number .*got -1.0"),
    "timeout_s nan": ({"timeout_s": float("nan")}, r"timeout_s must be a positive, finite number .*got nan"),
    "timeout_s inf": ({"timeout_s": float("inf")}, r"timeout_s .* None for no limit, got inf"),
    "timeout_s 1e300": ({"timeout_s": 1e300}, r"timeout_s .* None for no limit, got 1e\+300"),
    "timeout_s a string": ({"timeout_s": "5"}, r"timeout_s must be a positive, finite number .*got '5'"),
    "timeout_s a bool": ({"timeout_s": True}, r"timeout_s must be a positive, finite number .*got True"),
}

WORKING_PROMPTS: dict[str, object] = {
    "a list": [5, 6],
    "a tuple": (5, 6),
    "a range": range(5, 7),
    "another sequence": UserList([5, 6]),
    "numpy ints": [np.int64(5), np.uint8(6)],
    "a numpy array": np.array([5, 6], dtype=np.int32),
    "a tensor": torch.tensor([5, 6]),
    "a small tensor": torch.tensor([5, 6], dtype=torch.uint8),
    "0-d tensors inside": [torch.tensor(5), torch.tensor(6)],
}

WORKING_ARGUMENTS: dict[str, dict[str, object]] = {
    "one token": {"params": params(max_new_tokens=1)},
    "a numpy sample index": {"sample_index": np.int64(3)},
    "a numpy timeout": {"timeout_s": np.float32(1000)},
    "a timeout of a year": {"timeout_s": 365 * 86400},
    "metadata of any content": {"metadata": {"answer": object()}},
    "names of any kind": {"request_id": "rollsync-7", "group_id": "💡", "prompt_id": "a/b\n"},
    "top_k and top_p of a greedy request": {"params": params(top_k=1, top_p=0.1)},
    "repeated stop tokens": {"params": params(stop_token_ids=[VOCAB_SIZE - 1] * 3)},
}

WORKING_SAMPLING: dict[str, dict[str, object]] = {
    "an int temperature": {"temperature": 1},
    "the lowest temperature": {"temperature": 0.001},
    "an enormous temperature": {"temperature": 1e300},
    "top_k off": {"temperature": 1, "top_k": 0},
    "top_k beyond the vocabulary": {"temperature": 1, "top_k": VOCAB_SIZE + 1},
    "top_k beyond an int32": {"temperature": 1, "top_k": 2**31},
    "top_k beyond an int64": {"temperature": 1, "top_k": 2**80},
    "the smallest top_p": {"temperature": 1, "top_p": 5e-324},
    "top_k and top_p": {"temperature": 1, "top_k": 3, "top_p": 0.5},
    "the largest seed": {"temperature": 1, "seed": 2**63 - 1},
}


def finish(gate: StepGate, future: Future) -> None:
    """Steps the engine, in which another request is always in flight, until the future resolves."""
    for _ in range(20):
        gate.step()
        gate.wait_for_arrival()
        if future.done():
            break
    wait_until(future.done)


def test_every_input_works_or_is_refused_and_the_request_beside_it_never_notices() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)
    gate = StepGate(engine)
    with engine:
        bystander = engine.submit(BYSTANDER, params(max_new_tokens=BYSTANDER_TOKENS))
        gate.wait_for_arrival()
        calls = {
            f"prompt: {name}": ({"prompt_ids": prompt}, match) for name, (prompt, match) in REFUSED_PROMPTS.items()
        }
        calls |= REFUSED_ARGUMENTS
        for name, (arguments, match) in calls.items():
            with pytest.raises(InvalidRequestError) as refusal:
                engine.submit(**{"prompt_ids": [5, 6], "params": GREEDY, **arguments})
            assert re.search(match, str(refusal.value)), f"{name}: {refusal.value}"
            gate.step()
        assert engine.stats().active + engine.stats().waiting == 1, "nothing refused is in flight"
        expected = greedy_reference(model, [5, 6], 3)
        works = {name: {"prompt_ids": prompt} for name, prompt in WORKING_PROMPTS.items()} | WORKING_ARGUMENTS
        for name, arguments in works.items():
            future = engine.submit(**{"prompt_ids": [5, 6], "params": GREEDY, **arguments})
            finish(gate, future)
            rollout = future.result(30)
            wanted = expected[: len(rollout.token_ids)]
            assert (rollout.token_ids, rollout.finish_reason) == (wanted, FinishReason.LENGTH), name
            assert all(type(token) is int for token in rollout.prompt_ids + rollout.token_ids), name
        for name, changes in WORKING_SAMPLING.items():
            future = engine.submit([5, 6], params(max_new_tokens=3, **changes))
            finish(gate, future)
            rollout = future.result(30)
            assert (len(rollout.token_ids), rollout.finish_reason) == (3, FinishReason.LENGTH), name
            assert all(-100 < logprob <= 0 for logprob in rollout.logprobs), name
        assert not bystander.done(), "it was in flight all the time"
        gate.open()
        assert bystander.result(30).token_ids == greedy_reference(model, BYSTANDER, BYSTANDER_TOKENS)
        assert engine.state == EngineState.RUNNING
        assert engine.generate([[5, 6]], GREEDY)[0].token_ids == expected


def test_top_k_off_is_not_greedy_and_top_k_1_is() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        sampled = {
            tuple(r.token_ids) for r in engine.generate([[5]] * 5, SamplingParams(max_new_tokens=5, stop_token_ids=()))
        }
        assert len(sampled) > 1
        first = engine.generate([[5]] * 5, SamplingParams(max_new_tokens=5, top_k=1, stop_token_ids=()))
        assert {tuple(r.token_ids) for r in first} == {tuple(greedy_reference(model, [5], 5))}


def test_a_rollout_stops_at_its_stop_tokens_and_keeps_the_one_it_met() -> None:
    model = tiny_llama()
    tokens = greedy_reference(model, [5], 20)
    stop = tokens[7]
    until = tokens[: tokens.index(stop) + 1]
    model.generation_config.eos_token_id = stop
    with GenerationEngine(model) as engine:
        for stop_token_ids, expected in [([stop], until), (None, until), ([63, stop, stop], until), ((), tokens)]:
            (rollout,) = engine.generate([[5]], params(max_new_tokens=20, stop_token_ids=stop_token_ids))
            reason = FinishReason.STOP if expected is until else FinishReason.LENGTH
            assert (rollout.token_ids, rollout.finish_reason) == (expected, reason)


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    model = tiny_llama()
    tokens = greedy_reference(model, [5], 20)
    length = tokens.index(tokens[7]) + 1
    with GenerationEngine(model) as engine:
        (rollout,) = engine.generate([[5]], params(max_new_tokens=length, stop_token_ids=[tokens[7]]))
        assert (len(rollout.token_ids), rollout.finish_reason) == (length, FinishReason.STOP)


def test_a_model_without_an_eos_stops_at_max_new_tokens_only() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with GenerationEngine(model) as engine:
        (rollout,) = engine.generate([[5]], params(max_new_tokens=50, stop_token_ids=None))
        assert (len(rollout.token_ids), rollout.finish_reason) == (50, FinishReason.LENGTH)


# ------------------------------------------------------------------------------------------------------- request ids


def test_an_id_in_flight_is_refused_while_it_waits_and_while_it_runs_and_is_free_again_afterwards() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=1))
    gate = StepGate(engine)
    with engine:
        active = engine.submit([5], GREEDY, request_id="active")
        gate.wait_for_arrival()
        waiting = engine.submit([5], GREEDY, request_id="waiting")
        for taken in ("active", "waiting"):
            with pytest.raises(InvalidRequestError, match=f"'{taken}' is already in flight; use another or wait"):
                engine.submit([6], GREEDY, request_id=taken)
        gate.open()
        ended = [active.result(30), waiting.result(30)]
        assert [rollout.rollout_id for rollout in ended] == ["active", "waiting"]
        for again in ("active", "waiting"):
            assert engine.submit([5], GREEDY, request_id=again).result(30).token_ids == ended[0].token_ids


def test_a_duplicate_that_was_refused_leaves_the_first_one_alone() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        first = engine.submit([5], params(max_new_tokens=100), request_id="a")
        with pytest.raises(InvalidRequestError, match="already in flight"):
            engine.submit([6], GREEDY, request_id="a")
        assert first.result(30).token_ids == greedy_reference(model, [5], 100)


def test_an_id_that_looks_like_one_made_up_is_in_nobodys_way() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        named = [engine.submit([5], GREEDY, request_id=f"rollsync-{i}") for i in range(1, 6)]
        unnamed = [engine.submit([5], GREEDY) for _ in range(5)]
        gate.open()
        rollouts = [future.result(30) for future in named + unnamed]
    assert len({rollout.rollout_id for rollout in rollouts}) == 10


def test_the_future_of_an_ended_request_never_cancels_a_later_one_of_the_same_id() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine, is_open=True)
    with engine:
        first = engine.submit([5], GREEDY, request_id="a")
        first.result(30)
        gate.is_open = False
        second = engine.submit([5], GREEDY, request_id="a")
        gate.wait_for_arrival()
        assert first.cancel() is False
        gate.open()
        assert second.result(30).finish_reason == FinishReason.LENGTH


# ------------------------------------------------------------------------------------------------------ what fits

SMALL = EngineConfig(num_blocks=4, page_size=16, max_batch_tokens=32)  # 64 tokens


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_request_that_fills_the_cache_exactly_works_and_one_token_more_is_refused(make: type) -> None:
    model = make()
    with GenerationEngine(model, SMALL) as engine:
        places = engine.manager.max_request_tokens
        for prompt_len in (1, places // 2, places):
            (prompt,) = random_prompts([prompt_len])
            room = places - prompt_len + 1  # the last token needs no place
            for _ in range(2):  # the second time its own prefix is in the way
                (rollout,) = engine.generate([prompt], params(max_new_tokens=room))
                assert rollout.token_ids == greedy_reference(model, prompt, room)
            with pytest.raises(
                InvalidRequestError, match=f"holds {places} .*lower max_new_tokens or raise .*num_blocks"
            ):
                engine.submit(prompt, params(max_new_tokens=room + 1))
        assert engine.state == EngineState.RUNNING


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    with GenerationEngine(tiny_llama(), SMALL) as engine:
        with pytest.raises(InvalidRequestError, match=r"200 prompt tokens .* holds 64 "):
            engine.submit([5] * 200, GREEDY)
        assert len(engine.generate([[5]], GREEDY)[0].token_ids) == 3


def test_requests_that_each_fill_the_cache_take_turns() -> None:
    model = tiny_llama()
    prompts = random_prompts([60, 50, 55, 64])
    with GenerationEngine(model, SMALL) as engine:
        futures = [engine.submit(prompt, params(max_new_tokens=65 - len(prompt))) for prompt in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            assert future.result(30).token_ids == greedy_reference(model, prompt, 65 - len(prompt))


def test_positions_beyond_the_models_are_refused_and_the_last_one_works() -> None:
    model = tiny_llama(max_position_embeddings=40)
    with GenerationEngine(model, EngineConfig(num_blocks=8, page_size=16)) as engine:
        prompt = [5] * 30
        assert engine.generate([prompt], params(max_new_tokens=11))[0].token_ids == greedy_reference(model, prompt, 11)
        with pytest.raises(
            InvalidRequestError, match=r"reach position 41, beyond the model's 40; .* shorten the prompt"
        ):
            engine.submit(prompt, params(max_new_tokens=12))


# ------------------------------------------------------------------------------------------------------- generate


def test_one_bad_prompt_refuses_all_and_is_named() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with pytest.raises(InvalidRequestError, match=r"^prompt 2: prompt_ids\[1\] is 64, outside"):
            engine.generate([[5], [6], [7, 64], [8]], GREEDY)
        stats = engine.stats()
        assert (stats.active, stats.waiting, stats.finished) == (0, 0, 0), "not one was submitted"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", r"prompts must be a list of prompts, got str \('hello'\)"),
        (5, r"prompts must be a list of prompts, got int"),
        (None, r"prompts must be a list of prompts, got NoneType"),
        ({"input_ids": [[5]]}, r"prompts must be a list of prompts, got dict"),
        ([5, 6], r"prompt 0: prompt_ids must be a flat list of token ids, got int \(5\)"),
    ],
)
def test_what_is_not_a_list_of_prompts_is_refused(prompts: object, message: str) -> None:
    with GenerationEngine(tiny_llama()) as engine, pytest.raises(InvalidRequestError, match=message):
        engine.generate(prompts, GREEDY)


def test_generate_refuses_params_of_another_kind() -> None:
    with GenerationEngine(tiny_llama()) as engine, pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        engine.generate([[5]], {"max_new_tokens": 3})


def test_prompts_may_come_from_a_generator_or_a_tensor() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        listed = [rollout.token_ids for rollout in engine.generate([[5, 6], [7, 8]], GREEDY)]
        for prompts in ((p for p in [[5, 6], [7, 8]]), torch.tensor([[5, 6], [7, 8]]), np.array([[5, 6], [7, 8]])):
            assert [rollout.token_ids for rollout in engine.generate(prompts, GREEDY)] == listed


def test_no_prompts_give_no_rollouts() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.generate([], GREEDY) == []


# ----------------------------------------------------------------------------------------------- a caller's own data


def test_what_the_caller_changes_after_submit_changes_nothing() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)
    gate = StepGate(engine)
    with engine:
        prompt, metadata = [5, 6, 7], {"answer": 42}
        future = engine.submit(prompt, GREEDY, metadata=metadata)
        prompt[0] = -1
        prompt.append(10**9)
        metadata.clear()
        gate.open()
        rollout = future.result(30)
        assert (rollout.prompt_ids, rollout.metadata) == ([5, 6, 7], {"answer": 42})
        assert rollout.token_ids == greedy_reference(model, [5, 6, 7], 3)


def test_what_the_caller_changes_in_a_result_changes_no_other() -> None:
    prompt = [5, 6, 7]
    with GenerationEngine(tiny_llama()) as engine:
        first, second = engine.generate([prompt, prompt], GREEDY)
        assert first.token_ids == second.token_ids
        first.prompt_ids[0] = 0
        first.token_ids.clear()
        assert second.prompt_ids == prompt
        assert len(second.token_ids) == 3

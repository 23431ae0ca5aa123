"""Streams, stop strings, resuming, restarting, and KV computed again at an update."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fakes import (
    StandsStill,
    StepGate,
    forward_logprobs,
    greedy_reference,
    mark,
    marker_llama,
    random_prompts,
    tiny_llama,
    wait_until,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rollout import (
    EngineConfig,
    EngineDeadError,
    EngineFencedError,
    EngineStaleError,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    SamplingParams,
    VersionSpan,
)
from rollout.requests.stops import find_stop

SEEDED = SamplingParams(max_new_tokens=40, seed=11, stop_token_ids=())
GREEDY = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())


class Letters:
    """A tokenizer of one letter a token, two for every fifth; ids below 2 are special and have no text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.letter(token) for token in token_ids if token >= 2)

    @staticmethod
    def letter(token: int) -> str:
        first = chr(ord("a") + token % 26)
        return first + first.upper() if token % 5 == 0 else first


# ------------------------------------------------------------------------------------------------------------ streams


def test_a_stream_gives_each_token_once_and_in_order_and_then_ends() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        stream = engine.stream([5, 6], GREEDY)
        tokens = list(stream)
        assert list(stream) == []
        assert stream.result(30).token_ids == tokens
        assert len(tokens) == 40


def test_a_stream_gives_tokens_before_the_request_ends() -> None:
    engine = GenerationEngine(tiny_llama())
    gate = StepGate(engine)
    with engine:
        stream = engine.stream([5, 6], GREEDY)
        gate.step(2)
        gate.wait_for_arrival()
        first = next(stream)
        assert stream.future is not None
        assert not stream.future.done()
        gate.open()
        assert [first, *stream] == stream.result(30).token_ids


def test_leaving_a_stream_early_ends_its_request() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with engine.stream([5], SamplingParams(max_new_tokens=400, stop_token_ids=())) as stream:
            next(stream)
        rollout = stream.result(30)
        assert rollout.finish_reason == FinishReason.ABORT
        assert rollout.token_ids


def test_a_stream_ends_when_the_engine_does() -> None:
    engine = GenerationEngine(tiny_llama())
    with engine:
        stream = engine.stream([5], SamplingParams(max_new_tokens=400, stop_token_ids=()))
        next(stream)
    rest = list(stream)
    assert len(rest) + 1 == len(stream.result(30).token_ids)


# ------------------------------------------------------------------------------------------------------- stop strings


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 63), min_size=1, max_size=60),
    st.lists(st.text("abcdeE", min_size=1, max_size=4), min_size=1),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(tokens: list[int], stop: list[str]) -> None:
    decode: Callable[[list[int]], str] = lambda ids: Letters().decode(ids, skip_special_tokens=True)  # noqa: E731
    hits = [n for n in range(1, len(tokens) + 1) if find_stop(tokens[:n], stop, decode) is not None]
    naive = [n for n in range(1, len(tokens) + 1) if any(text in decode(tokens[:n]) for text in stop)]
    assert hits[:1] == naive[:1]


def test_a_stop_string_is_found_where_a_token_is_a_byte() -> None:
    stop = "停止停止停止"
    tokens = [ord("a")] * 30 + list(stop.encode())
    assert find_stop(tokens, [stop], lambda ids: bytes(ids).decode(errors="replace")) == stop


def test_a_stop_string_ends_the_rollout_with_the_token_that_completes_it_and_is_cut_from_the_text() -> None:
    model, tokenizer = tiny_llama(), Letters()
    with GenerationEngine(model, tokenizer=tokenizer) as engine:
        for prompt in random_prompts([3, 9, 20]):
            whole = engine.submit(prompt, GREEDY).result(30)
            text = whole.text(tokenizer)
            stop = text[7:10]
            params = replace(GREEDY, stop=("zzzz", stop))
            for rollout in (
                engine.submit(prompt, params).result(30),
                *(future.result(30) for future in engine.submit_group(prompt, params, size=2)),
            ):
                assert rollout.finish_reason == FinishReason.STOP
                assert rollout.stop_string == stop
                assert rollout.text(tokenizer) == text[: text.index(stop)]
                assert rollout.token_ids == whole.token_ids[: len(rollout.token_ids)]
                kept = tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
                before = tokenizer.decode(rollout.token_ids[:-1], skip_special_tokens=True)
                assert stop in kept
                assert stop not in before
                assert len(rollout.logprobs) == len(rollout.token_ids)


def test_a_stop_string_is_found_across_an_eviction() -> None:
    tokenizer = Letters()
    config = EngineConfig(page_size=4, num_blocks=24, max_batch_tokens=32, max_requests=8, prefix_sharing=False)
    with GenerationEngine(tiny_llama(), config, tokenizer=tokenizer) as engine:
        prompts = random_prompts([6] * 8)
        whole = engine.generate(prompts, GREEDY)
        stops = [rollout.text(tokenizer)[-6:] for rollout in whole]
        futures = [
            engine.submit(prompt, replace(GREEDY, stop=(stop,))) for prompt, stop in zip(prompts, stops, strict=True)
        ]
        rollouts = [future.result(60) for future in futures]
    assert sum(rollout.num_reprefills for rollout in rollouts) > 0
    for rollout, full, stop in zip(rollouts, whole, stops, strict=True):
        text = full.text(tokenizer)
        assert rollout.finish_reason == FinishReason.STOP
        assert rollout.text(tokenizer) == text[: text.index(stop)]


def test_after_an_eviction_a_stop_string_lets_new_requests_in_like_any_other_end() -> None:
    tokenizer = Letters()
    engine = GenerationEngine(tiny_llama(), tokenizer=tokenizer)
    gate = StepGate(engine)
    with engine:
        gate.open()
        stop = engine.submit([5, 6], GREEDY).result(30).text(tokenizer)[5:8]
        gate.is_open = False
        first = engine.submit([5, 6], replace(GREEDY, stop=(stop,)))
        gate.wait_for_arrival()
        engine.manager.batch_processor.scheduler.block_new_requests = True  # as an eviction does
        second = engine.submit([7], GREEDY)
        gate.open()
        assert first.result(30).stop_string == stop
        assert len(second.result(30).token_ids) == 40


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with GenerationEngine(tiny_llama()) as engine, pytest.raises(InvalidRequestError, match="tokenizer"):
        engine.submit([5], SamplingParams(stop=("x",)))


@pytest.mark.parametrize("stop", ["<eos>", "end<turn>", "a<turn>\n"])
def test_a_stop_string_with_a_special_token_in_it_is_refused_with_the_token_to_stop_at(stop: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "<turn>": 2, "b": 3})), eos_token="<eos>"
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<turn>"]})
    with GenerationEngine(tiny_llama(), tokenizer=tokenizer) as engine:
        token_id = 0 if "eos" in stop else 2
        with pytest.raises(InvalidRequestError, match=rf"special token.*use stop_token_ids=\[{token_id}\]"):
            engine.submit([5], SamplingParams(stop=("b", stop)))
        engine.submit([5], SamplingParams(max_new_tokens=2, stop=("b", "turn"))).result(30)


# ----------------------------------------------------------------------------------------------------------- resuming


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 39))
def test_a_partial_rollout_goes_on_as_if_never_interrupted(cut: int) -> None:
    with GenerationEngine(tiny_llama()) as engine:
        whole = engine.submit([5, 6, 7], SEEDED, sample_index=3).result(30)
        partial = replace(
            whole,
            token_ids=whole.token_ids[:cut],
            logprobs=whole.logprobs[:cut],
            loss_mask=whole.loss_mask[:cut],
            version_spans=[VersionSpan(0, 0)] if cut else [],
            finish_reason=FinishReason.ABORT,
        )
        resumed = engine.submit([5, 6, 7], SEEDED, resume_from=partial).result(30)
    assert resumed.token_ids == whole.token_ids
    assert torch.allclose(torch.tensor(resumed.logprobs), torch.tensor(whole.logprobs), atol=1e-4)
    assert resumed.logprobs[:cut] == whole.logprobs[:cut]
    assert (resumed.attempt, resumed.sample_index) == (1, 3)
    assert resumed.version_spans == [VersionSpan(0, 0)]


def interrupted(engine: GenerationEngine, params: SamplingParams) -> Rollout:
    """A rollout that was cancelled after a few tokens."""
    future = engine.submit([5, 6], params, group_id="g", prompt_id="p", sample_index=2, metadata={"k": 1})
    seen = engine.stats().generated_tokens
    wait_until(lambda: engine.stats().generated_tokens > seen + 5)
    future.cancel()
    rollout = future.result(30)
    assert rollout.finish_reason == FinishReason.ABORT
    return rollout


def test_spans_are_joined_when_it_goes_on_under_another_version() -> None:
    long = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())
    with GenerationEngine(marker_llama()) as engine:
        partial = interrupted(engine, long)
        with engine.update() as model:
            mark(model, 1)
        rollout = engine.submit([5, 6], long, resume_from=partial).result(30)
    assert len(rollout.token_ids) == 300
    assert rollout.token_ids == rollout.versions
    assert rollout.version_spans == [VersionSpan(0, 0), VersionSpan(len(partial.token_ids), 1)]
    assert rollout.prefill_version == 0, "its first tokens were sampled from KV of version 0"
    assert (rollout.group_id, rollout.prompt_id, rollout.sample_index, rollout.metadata) == ("g", "p", 2, {"k": 1})


def test_an_update_before_the_second_prefill_counts_for_it() -> None:
    long = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())
    engine = GenerationEngine(marker_llama(), EngineConfig(max_requests=1))
    with engine:
        partial = interrupted(engine, long)
        blocker = engine.submit([7], SamplingParams(max_new_tokens=400, stop_token_ids=()))
        future = engine.submit([5, 6], long, resume_from=partial)
        with engine.update() as model:
            mark(model, 1)
        blocker.cancel()
        rollout = future.result(30)
    assert rollout.prefill_version == 0
    assert rollout.token_ids == rollout.versions


def test_what_was_resumed_and_ends_before_it_runs_still_has_its_tokens() -> None:
    long = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())
    with GenerationEngine(marker_llama(), EngineConfig(max_requests=1)) as engine:
        partial = interrupted(engine, long)
        engine.submit([7], SamplingParams(max_new_tokens=400, stop_token_ids=()))
        future = engine.submit([5, 6], long, resume_from=partial)
        future.cancel()
        again = future.result(30)
    assert again.token_ids == partial.token_ids
    assert again.logprobs == partial.logprobs
    assert again.version_spans == partial.version_spans
    assert again.prefill_version == partial.prefill_version == 0


def test_what_cannot_be_resumed_is_refused() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        partial = interrupted(engine, SamplingParams(max_new_tokens=300, stop_token_ids=()))
        ended = replace(partial, finish_reason=FinishReason.STOP)
        enough = SamplingParams(max_new_tokens=300)
        for rollout, prompt, params, reason in (
            (ended, [5, 6], enough, "ended by itself"),
            (partial, [5, 7], enough, "another prompt"),
            (partial, [5, 6], SamplingParams(max_new_tokens=1), "max_new_tokens"),
            ("partial", [5, 6], enough, "must be a Rollout"),
            (with_token(partial, 64), [5, 6], enough, r"resume_from.token_ids\[0\] is 64, outside .* 64 ids"),
            (with_token(partial, -1), [5, 6], enough, r"resume_from.token_ids\[0\] is -1, outside"),
            (with_token(partial, "5"), [5, 6], enough, r"resume_from.token_ids\[0\] is '5' \(str\), not a token id"),
        ):
            with pytest.raises(InvalidRequestError, match=reason):
                engine.submit(prompt, params, resume_from=rollout)
        assert len(engine.submit([5, 6], GREEDY).result(30).token_ids) == 40, "what was refused has hurt the engine"


def test_an_engine_that_lacks_the_version_of_what_it_is_to_resume_is_to_blame_and_not_the_request() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        partial = interrupted(engine, SamplingParams(max_new_tokens=300, stop_token_ids=()))
        newer = replace(partial, version_spans=[VersionSpan(0, 3)])
        with pytest.raises(
            EngineStaleError, match="of version 3, this engine is at 0; update the engine first"
        ) as caught:
            engine.submit([5, 6], SamplingParams(max_new_tokens=300), resume_from=newer)
        assert not isinstance(caught.value, InvalidRequestError), "a fleet would give the sample up"
        with engine.update(3):
            pass
        assert engine.submit([5, 6], SamplingParams(max_new_tokens=300), resume_from=newer).result(30).token_ids


def with_token(rollout: Rollout, token: object) -> Rollout:
    return replace(rollout, token_ids=[token, *rollout.token_ids[1:]])


# --------------------------------------------------------------------------------------------------------- restarting


class WeightsOnFireError(Exception):
    """What kills the loop in these tests."""


def test_a_dead_engine_is_restarted_at_its_version_and_partials_go_on() -> None:
    model = marker_llama()
    engine = GenerationEngine(model)
    burning = threading.Event()

    def burn(*_: object) -> None:
        if burning.is_set():
            raise WeightsOnFireError

    engine.model.register_forward_pre_hook(burn)
    long = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())
    with engine:
        with engine.update(5) as shell:
            mark(shell, 5)
        for _ in range(2):
            with pytest.raises(EngineStateError, match="running already"):
                engine.restart()
            future = engine.submit([5, 6], long)
            seen = engine.stats().generated_tokens
            wait_until(lambda seen=seen: engine.stats().generated_tokens > seen + 5)
            burning.set()
            partial = future.result(30)
            assert partial.finish_reason == FinishReason.ERROR
            assert "WeightsOnFireError" in (partial.error or "")
            wait_until(lambda: engine.state == EngineState.DEAD)
            with pytest.raises(EngineDeadError, match="restart"):
                engine.submit([5], GREEDY)
            burning.clear()
            engine.restart()
            assert (engine.state, engine.version) == (EngineState.RUNNING, 5)
            rollout = engine.submit([5, 6], long, resume_from=partial).result(30)
            assert rollout.token_ids == rollout.versions == [5] * 300
        with engine.update() as shell:
            mark(shell, 6)
        assert engine.generate([[5]], GREEDY)[0].token_ids == [6] * 40
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollsync")]


def test_a_fenced_engine_whose_loop_died_is_fenced_after_the_restart() -> None:
    with GenerationEngine(marker_llama()) as engine:
        with pytest.raises(WeightsOnFireError), engine.update() as model:  # noqa: PT012
            mark(model, 50)  # half an update
            raise WeightsOnFireError
        kill_loop(engine)
        engine.restart()
        with pytest.raises(EngineFencedError, match="WeightsOnFireError"):
            engine.submit([5], GREEDY)
        with engine.update() as model:
            mark(model, 1)
        assert engine.submit([5], GREEDY).result(30).token_ids == [1] * 40


def kill_loop(engine: GenerationEngine) -> None:
    """Whatever the loop does next, it dies of it."""

    def burn() -> None:
        raise WeightsOnFireError

    engine.manager.batch_processor.scheduler.clear_cancelled_requests = burn
    wait_until(lambda: engine.state == EngineState.DEAD)


# ----------------------------------------------------------------------------------------------- KV policy at an update


@pytest.mark.parametrize("policy", ["keep", "refresh"])
def test_refreshing_makes_logprobs_those_of_the_new_weights_and_keeping_does_not(policy: str) -> None:
    model = tiny_llama()
    engine = GenerationEngine(model, EngineConfig(kv_at_update=policy))
    gate = StepGate(engine)
    (prompt,) = random_prompts([30])
    with engine:
        future = engine.submit(prompt, GREEDY)
        gate.step(9)
        gate.wait_for_arrival()

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as shell, torch.no_grad():
                for parameter in shell.parameters():
                    if parameter.ndim > 1:
                        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)

        done = engine.call(commit)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollout = future.result(30)
    assert rollout.version_spans == [VersionSpan(0, 0), VersionSpan(10, 1)]
    errors = (torch.tensor(rollout.logprobs) - forward_logprobs(model, prompt, rollout.token_ids)).abs()[10:]
    if policy == "refresh":
        assert errors.max() < 1e-4
        assert (rollout.num_reprefills, rollout.prefill_version) == (1, 0)
    else:
        assert errors.max() > 1e-2, "stale KV made no difference, so the refresh is not tested"
        assert (rollout.num_reprefills, rollout.prefill_version) == (0, 0)


def test_refreshing_drops_a_token_that_was_sampled_and_not_booked_and_labels_its_place_anew() -> None:
    engine = GenerationEngine(marker_llama(), EngineConfig(kv_at_update="refresh"))
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5, 6], GREEDY)
        gate.step(4)
        gate.wait_for_arrival()

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as model:
                mark(model, 1)
                (state,) = engine.manager.batch_processor.scheduler.active_requests.values()
                state.position_offset += 1  # as under asynchronous batching: the next step has run, nothing is booked

        done = engine.call(commit)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollout = future.result(30)
    assert rollout.version_spans == [VersionSpan(0, 0), VersionSpan(5, 1)]
    assert rollout.token_ids == rollout.versions


def test_refreshing_loses_nothing_of_groups_and_waiting_requests() -> None:
    config = EngineConfig(kv_at_update="refresh", max_requests=6, max_batch_tokens=16, page_size=4)
    with GenerationEngine(marker_llama(), config) as engine:
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([3, 40, 9])]
        futures += engine.submit_group(random_prompts([37])[0], GREEDY, size=4)
        for version in range(1, 6):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen + 8).wait()
            with engine.update() as model:
                mark(model, version)
        for future in futures:
            rollout = future.result(60)
            assert len(rollout.token_ids) == 40
            assert rollout.token_ids == rollout.versions


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kv_at_update"):
        EngineConfig(kv_at_update="forget")


def test_renormalised_logprobs_are_marked() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        for params, marked in (
            (SamplingParams(max_new_tokens=2), False),
            (SamplingParams(max_new_tokens=2, top_k=3), True),
            (SamplingParams(max_new_tokens=2, top_p=0.5), True),
            (SamplingParams(max_new_tokens=2, top_p=0.5, temperature=0), False),
        ):
            assert engine.submit([5], params).result(30).renormalised is marked


def test_greedy_is_what_generate_says_after_all_that() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        assert engine.submit([5, 6], GREEDY).result(30).token_ids == greedy_reference(model, [5, 6], 40)


def test_logits_that_are_no_numbers_end_only_the_requests_that_meet_them() -> None:
    model = tiny_llama()
    engine = GenerationEngine(model)

    def poison(_: object, args: object, output: object) -> None:
        if output.logits.shape[1] > 1:
            output.logits[0, 1] = float("nan")  # the second request of the batch

    with engine:
        handle = engine.model.register_forward_hook(poison)
        gate = StepGate(engine)
        futures = [engine.submit(prompt, GREEDY) for prompt in ([5, 6], [7, 8])]
        gate.wait_for_arrival()
        gate.open()
        first, second = (future.result(30) for future in futures)
        handle.remove()
        assert engine.submit([7, 8], GREEDY).result(30).token_ids == greedy_reference(model, [7, 8], 40)
    assert first.token_ids == greedy_reference(model, [5, 6], 40)
    assert second.finish_reason == FinishReason.ERROR
    assert "NaN" in (second.error or "")


def test_an_engine_that_was_never_started_has_no_threads() -> None:
    before = threading.active_count()
    engine = GenerationEngine(tiny_llama())
    assert threading.active_count() == before
    with pytest.raises(EngineStateError, match="not started"):
        engine.call(lambda engine: None)
    engine.stop()
    assert threading.active_count() == before

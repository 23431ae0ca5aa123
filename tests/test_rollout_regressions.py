"""What once broke: each test is the smallest form of a failure that random operations or a hostile caller found."""

import math

import numpy
import pytest
import torch
from fakes import StandsStill, mark, marker_llama, random_prompts, tiny_llama, wait_until

from rollout import (
    EngineConfig,
    EngineFencedError,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    SamplingParams,
    VersionSpan,
)

GREEDY = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())


def test_a_refresh_right_after_an_eviction_leaves_nobody_waiting_for_ever() -> None:
    config = EngineConfig(
        page_size=4, num_blocks=24, max_batch_tokens=32, max_requests=8, prefix_sharing=False, kv_at_update="refresh"
    )
    with GenerationEngine(marker_llama(), config) as engine:
        # the queue is closed from an eviction until a request finishes
        closed = StandsStill(engine, lambda: engine.manager.batch_processor.scheduler.block_new_requests)
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        closed.wait()
        with engine.update() as model:
            mark(model, 1)
        for future in futures:
            rollout = future.result(30)
            assert rollout.token_ids == rollout.versions


def partial_rollout(**changes: object) -> Rollout:
    """A rollout of [5, 6] that was cancelled after one token."""
    fields = {"token_ids": [7], "logprobs": [-1.0], "loss_mask": [1], "version_spans": [VersionSpan(0, 0)], **changes}
    return Rollout(rollout_id="x", prompt_ids=[5, 6], prefill_version=0, finish_reason=FinishReason.ABORT, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [64]},
        {"token_ids": [-1]},
        {"token_ids": [1.5]},
        {"token_ids": ["7"]},
        {"token_ids": [None]},
        {"logprobs": [math.nan]},
        {"logprobs": ["-1"]},
        {"logprobs": [None]},
    ],
    ids=str,
)
def test_a_partial_rollout_that_would_kill_the_loop_or_poison_a_loss_is_refused(changes: dict[str, list]) -> None:
    (name,) = changes
    with GenerationEngine(tiny_llama()) as engine:
        beside = engine.submit([7], GREEDY)
        with pytest.raises(InvalidRequestError, match=rf"resume_from\.{name}\[0\]"):
            engine.submit([5, 6], GREEDY, resume_from=partial_rollout(**changes))
        assert beside.result(30).finish_reason == FinishReason.LENGTH


def test_a_partial_rollout_of_other_number_types_is_taken_and_belongs_to_the_caller() -> None:
    partial = partial_rollout(token_ids=torch.tensor([7]), logprobs=numpy.array([-1.0], dtype=numpy.float32))
    with GenerationEngine(tiny_llama(), EngineConfig(max_requests=1)) as engine:
        blocker = engine.submit([7], SamplingParams(max_new_tokens=400, stop_token_ids=()))
        future = engine.submit([5, 6], GREEDY, resume_from=partial)
        partial.loss_mask.append(1)
        partial.version_spans.append(VersionSpan(9, 9))
        future.cancel()
        rollout = future.result(30)
        blocker.cancel()
    assert (rollout.token_ids, rollout.logprobs) == ([7], [-1.0])
    assert [type(value) for value in (*rollout.token_ids, *rollout.logprobs)] == [int, float]
    assert rollout.version_spans == [VersionSpan(0, 0)]


def nan_after(engine: GenerationEngine, num_steps: int) -> None:
    """From the given forward on, the model's logits are NaN."""
    steps = []

    def poison(_: object, args: object, output: object) -> None:
        steps.append(None)
        if len(steps) > num_steps:
            output.logits.fill_(math.nan)

    engine.model.register_forward_hook(poison)


@pytest.mark.parametrize("max_new_tokens", [3, 9])
def test_a_token_without_a_distribution_is_no_token_also_where_it_is_the_last(max_new_tokens: int) -> None:
    engine = GenerationEngine(tiny_llama())
    nan_after(engine, 2)
    with engine:
        stream = engine.stream([5, 6], SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=()))
        tokens, rollout = list(stream), stream.result(30)
    assert rollout.finish_reason == FinishReason.ERROR
    assert "NaN" in (rollout.error or "")
    assert len(rollout.token_ids) == 2
    assert rollout.token_ids == tokens
    assert all(math.isfinite(logprob) for logprob in rollout.logprobs)


def test_weights_that_an_update_made_nan_are_named_as_such() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        with engine.update() as model, torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        rollout = engine.submit([5], GREEDY).result(30)
        assert "NaN" in (rollout.error or "")
        assert engine.state == EngineState.RUNNING


class TornPage:
    """A tokenizer that cannot decode more than a few tokens, as some cannot decode ids beyond their vocabulary."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if len(token_ids) >= 4:
            raise IndexError("piece id is out of range")
        return "a" * len(token_ids)


@pytest.mark.parametrize("max_new_tokens", [4, 9])
def test_a_tokenizer_that_raises_ends_only_the_request_that_needs_it(max_new_tokens: int) -> None:
    with GenerationEngine(tiny_llama(), tokenizer=TornPage()) as engine:
        beside = engine.submit([7], GREEDY)
        params = SamplingParams(max_new_tokens=max_new_tokens, stop=("zz",), stop_token_ids=())
        rollout = engine.submit([5, 6], params).result(30)
        assert rollout.finish_reason == FinishReason.ERROR
        assert "piece id is out of range" in (rollout.error or "")
        assert len(rollout.token_ids) == 4
        assert beside.result(30).finish_reason == FinishReason.LENGTH


class BurnsDownError(Exception):
    """What kills the loop in these tests."""


def kill(engine: GenerationEngine) -> None:
    """Makes the loop die in its next step or, if it is held, in its next look at what was cancelled."""

    def burn() -> None:
        raise BurnsDownError

    engine.manager.batch_processor.scheduler.clear_cancelled_requests = burn
    wait_until(lambda: engine.state == EngineState.DEAD)


def test_an_engine_that_was_fenced_when_it_died_is_fenced_after_a_restart() -> None:
    model = marker_llama()
    with GenerationEngine(model) as engine:
        with pytest.raises(BurnsDownError), engine.update() as shell:  # noqa: PT012
            shell.lm_head.weight.data[9].fill_(2.0)  # half of an update, in a way that leaves no trace
            raise BurnsDownError
        kill(engine)
        engine.restart()
        assert engine.state == EngineState.FENCED
        with pytest.raises(EngineFencedError, match="BurnsDownError"):
            engine.submit([5], GREEDY)
        with engine.update() as shell:
            mark(shell, 3)
        assert engine.state == EngineState.RUNNING
        assert engine.submit([5], GREEDY).result(30).token_ids == [3] * 40


def test_a_restart_neither_keeps_the_dead_cache_nor_shrinks_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with GenerationEngine(tiny_llama(max_position_embeddings=4096), EngineConfig(max_requests=16)) as engine:
        old, size = engine.manager.batch_processor.cache, engine.manager.max_request_tokens
        kill(engine)
        monkeypatch.setattr("rollout.sizing.MEMORY_SHARE", 1e-9)  # hardly any memory is left
        engine.restart()
        assert old.cache_tensor.untyped_storage().nbytes() == 0
        assert engine.manager.max_request_tokens == size
        assert len(engine.submit([5], GREEDY).result(30).token_ids) == 40


def test_each_refresh_leaves_kv_of_the_newest_weights_only() -> None:
    long = SamplingParams(max_new_tokens=400, temperature=0, stop_token_ids=())
    with GenerationEngine(marker_llama(), EngineConfig(kv_at_update="refresh")) as engine:
        future = engine.submit([5], long)
        for version in (1, 2, 3):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen).wait()
            with engine.update() as model:
                mark(model, version)
        rollout = future.result(30)
    assert rollout.token_ids == rollout.versions
    assert (rollout.prefill_version, rollout.num_reprefills) == (0, 3)


def test_a_submit_inside_an_update_never_waits_for_room_that_the_update_keeps_from_coming() -> None:
    with GenerationEngine(marker_llama(), EngineConfig(max_requests=1, max_waiting=1)) as engine:
        futures = [engine.submit([5], SamplingParams(max_new_tokens=400, stop_token_ids=())) for _ in range(2)]
        with engine.update(timeout_s=60):
            with pytest.raises(EngineStateError, match="max_waiting"):
                engine.submit([6], GREEDY)
            futures[1].cancel()  # waiting, so it ends at once and makes room
            third = engine.submit([6], GREEDY)
        futures[0].cancel()
        rollout = third.result(30)
        assert set(rollout.versions) == {1}

"""What once broke: each test is the smallest form of a failure that random operations or a hostile caller found."""

import math

import numpy
import pytest
import torch
from fakes import mark, marker_llama, random_prompts, tiny_llama, wait_until

from rollout import (
    EngineConfig,
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
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        # the queue is closed from an eviction until a request finishes
        wait_until(lambda: engine.manager.batch_processor.scheduler.block_new_requests)
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

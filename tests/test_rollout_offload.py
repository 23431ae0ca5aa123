"""Requests whose KV is moved to host memory while they wait: they lose nothing, and nothing of older weights is shared.

On a CPU the host memory is a fake; moving there and back is upstream's own.
"""

import pytest
import torch
from fake_streams import async_engine
from fakes import (
    StandsStill,
    forward_logprobs,
    greedy_reference,
    mark,
    marker_llama,
    move_evicted_kv_to_host,
    random_prompts,
    tiny_llama,
    wait_until,
)
from transformers import PreTrainedModel

from rollout import EngineConfig, FinishReason, GenerationEngine, SamplingParams

GREEDY = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())
TIGHT = {"page_size": 4, "num_blocks": 24, "max_batch_tokens": 32, "max_requests": 8}
MODES = pytest.mark.parametrize("mode", ["sync", "async", "async, late"])


def make(
    model: PreTrainedModel, mode: str, patch: pytest.MonkeyPatch, **changes: object
) -> tuple[GenerationEngine, list[str]]:
    """An engine with too small a cache, and the ids of the requests that are moved."""
    config = EngineConfig(**{**TIGHT, **changes})
    if mode == "sync":
        engine = GenerationEngine(model, config)
    else:
        engine, _ = async_engine(model, patch, config, late=mode == "async, late")
    return engine, move_evicted_kv_to_host(engine)


def moved_now(engine: GenerationEngine) -> list[str]:
    """Inside a pause: the ids of the requests whose KV is in host memory."""
    waiting = engine.manager.batch_processor.scheduler.waiting_requests
    return [name for name, state in waiting.items() if state.is_cpu_offloaded]


@MODES
@pytest.mark.parametrize("sharing", [True, False])
def test_requests_say_what_generate_says_and_are_not_prefilled_again(
    sharing: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    engine, moved = make(model, mode, monkeypatch, prefix_sharing=sharing)
    prompts = random_prompts([6, 5, 7, 6, 8, 3, 6, 9])
    with engine:
        rollouts = engine.generate(prompts, GREEDY)
        assert engine.stats().preemptions == 0
    assert moved, "the cache was not small enough to test anything"
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        assert rollout.token_ids == greedy_reference(model, prompt, 40)
        assert rollout.num_reprefills == 0
        expected = forward_logprobs(model, prompt, rollout.token_ids)
        assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


@MODES
def test_labels_hold(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, moved = make(marker_llama(), mode, monkeypatch)
    with engine:
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        version = 0
        while not all(future.done() for future in futures) and version < 60:
            version += 1
            before = engine.stats().generated_tokens
            wait_until(lambda n=before: engine.stats().generated_tokens > n or all(f.done() for f in futures))
            with engine.update() as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    assert moved
    for rollout in rollouts:
        assert len(rollout.token_ids) == 40
        assert rollout.token_ids == rollout.versions


@MODES
@pytest.mark.parametrize("policy", ["keep", "refresh"])
def test_kv_in_host_memory_is_computed_again_too_where_that_is_the_policy(
    policy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    engine, _ = make(model, mode, monkeypatch, kv_at_update=policy)
    prompts = random_prompts([6] * 8)
    with engine:
        there = StandsStill(engine, lambda: bool(moved_now(engine)))
        futures = [engine.submit(prompt, GREEDY) for prompt in prompts]
        there.wait()
        with engine.update() as shell, torch.no_grad():
            in_host_memory = moved_now(engine)
            generator = torch.Generator().manual_seed(7)
            for parameter in shell.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        rollouts = [future.result(60) for future in futures]
    assert in_host_memory, "the update came when nothing was in host memory"
    errors = []
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        start = next((span.start for span in rollout.version_spans if span.version == 1), None)
        if start is not None:
            expected = forward_logprobs(model, prompt, rollout.token_ids)[start:]
            errors.append(float((torch.tensor(rollout.logprobs[start:]) - expected).abs().max()))
    assert (max(errors) < 1e-4) == (policy == "refresh")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kv_is_computed_again_also_after_an_eviction(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction closes the queue until something finishes: with all in the queue, nothing would."""
    config = EngineConfig(**TIGHT, kv_at_update="refresh")
    engine = GenerationEngine(marker_llama(), config)
    if mode == "async":
        engine, _ = async_engine(marker_llama(), monkeypatch, config, late=True)
    with engine:
        evicted = StandsStill(engine, lambda: engine.stats().preemptions > 0)
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        evicted.wait()
        with engine.update() as model:
            mark(model, 1)
        for future in futures:
            rollout = future.result(30)
            assert len(rollout.token_ids) == 40
            assert rollout.token_ids == rollout.versions


@MODES
def test_a_new_request_never_finds_kv_that_was_moved_and_back_across_an_update(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    engine, moved = make(model, mode, monkeypatch)
    prompts = random_prompts([9] * 8)
    short = SamplingParams(max_new_tokens=4, temperature=0, stop_token_ids=())
    with engine:
        there = StandsStill(engine, lambda: len(moved) > 1)
        futures = [engine.submit(prompt, GREEDY) for prompt in prompts]
        there.wait()
        with engine.update() as shell, torch.no_grad():
            for parameter in shell.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
        for prompt in prompts:
            rollout = engine.submit(prompt, short).result(30)
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4
        for future in futures:
            future.result(60)


@MODES
@pytest.mark.parametrize("end", ["cancel", "death", "outside change"])
def test_a_request_that_ends_in_host_memory_has_what_it_had(
    end: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = marker_llama()
    engine, _ = make(model, mode, monkeypatch)
    partials: dict[str, int] = {}

    def before_forward(*_: object) -> None:
        scheduler = engine.manager.batch_processor.scheduler
        if not partials and (names := moved_now(engine)):
            running = engine._tracker._running
            partials.update(
                {running[name].request_id: len(scheduler.waiting_requests[name].generated_tokens) for name in names}
            )
            if end == "death":
                raise RuntimeError("the device fell off")
            if end == "outside change":
                mark(model, 9)

    engine.model.register_forward_pre_hook(before_forward)
    with engine:
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        wait_until(lambda: bool(partials))
        if end == "cancel":
            with engine.manager.pause_within(30):
                for future in futures:
                    future.cancel()
        rollouts = {future.request_id: future.result(30) for future in futures}
        if end == "cancel":
            pool = engine.manager.batch_processor.offloading_manager
            wait_until(lambda: pool._request_id_to_cpu_blocks == {})
    assert any(partials.values())
    for name, num_tokens in partials.items():
        assert rollouts[name].finish_reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH)
        assert len(rollouts[name].token_ids) >= num_tokens

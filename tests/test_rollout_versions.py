"""Every token knows its version, and no new request meets KV of an older one."""

import threading

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    StandsStill,
    StepGate,
    forward_logprobs,
    mark,
    marker_llama,
    random_prompts,
    tiny_llama,
    wait_until,
)

from rollout import EngineConfig, FinishReason, GenerationEngine, Rollout, SamplingParams, VersionSpan

ENDLESS = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())


def perturb(model: torch.nn.Module, seed: int) -> None:
    """In place: other weights, far enough from the old ones that stale KV shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def assert_labels_tell_the_truth(rollout: Rollout) -> None:
    assert rollout.token_ids == rollout.versions, "a token is not labelled with the version that sampled it"


def test_every_token_is_labelled_with_the_version_that_sampled_it() -> None:
    prompts = random_prompts([1, 7, 40, 200])  # the last is prefilled in chunks, across an update
    with GenerationEngine(marker_llama(), EngineConfig(max_batch_tokens=16, page_size=4)) as engine:
        futures = [engine.submit(prompt, ENDLESS) for prompt in prompts]
        for version in range(1, 8):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen + 20).wait()
            with engine.update() as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    for rollout in rollouts:
        assert_labels_tell_the_truth(rollout)
    assert len(rollouts[0].version_spans) > 3, "the updates came too late to test anything"


def test_a_span_starts_at_the_token_after_the_pause() -> None:
    engine = GenerationEngine(marker_llama())
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5, 6], SamplingParams(max_new_tokens=8, temperature=0, stop_token_ids=()))
        gate.step(2)
        gate.wait_for_arrival()  # two tokens are sampled, the forward for the third stands before the gate

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as model:
                mark(model, 1)

        done = engine.call(commit)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollout = future.result(30)
    assert rollout.version_spans == [VersionSpan(0, 0), VersionSpan(3, 1)]
    assert rollout.token_ids == [0, 0, 0, 1, 1, 1, 1, 1]
    assert engine.last_update is not None
    assert engine.last_update.straddlers == 1


def test_labels_hold_when_requests_are_preempted_and_prefilled_again() -> None:
    config = EngineConfig(page_size=4, num_blocks=24, max_batch_tokens=32, max_requests=8, prefix_sharing=False)
    params = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())
    with GenerationEngine(marker_llama(), config) as engine:
        futures = [engine.submit(prompt, params) for prompt in random_prompts([6] * 8)]
        for version in range(1, 6):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen + 30).wait()
            with engine.update() as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    assert sum(rollout.num_reprefills for rollout in rollouts) > 0, "the cache was not small enough to test anything"
    for rollout in rollouts:
        assert len(rollout.token_ids) == 40
        assert_labels_tell_the_truth(rollout)


@pytest.mark.parametrize(("policy", "expected"), [("keep", 0), ("refresh", 1)])
def test_prefill_version_is_that_of_the_oldest_kv_behind_the_tokens_also_when_a_prefill_spans_an_update(
    policy: str, expected: int
) -> None:
    (prompt,) = random_prompts([30])
    engine = GenerationEngine(marker_llama(), EngineConfig(page_size=4, max_batch_tokens=8, kv_at_update=policy))
    gate = StepGate(engine)
    with engine:
        future = engine.submit(prompt, SamplingParams(max_new_tokens=6, temperature=0, stop_token_ids=()))
        gate.step(2)
        gate.wait_for_arrival()
        done = engine.call(_update_to, 1)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollout = future.result(30)
    assert rollout.versions == [1] * 6
    assert rollout.prefill_version == expected


@pytest.mark.parametrize("policy", ["keep", "refresh"])
def test_prefill_version_stays_that_of_the_first_prefill_through_preemptions_refreshes_and_updates(policy: str) -> None:
    config = EngineConfig(page_size=4, num_blocks=12, max_batch_tokens=32, kv_at_update=policy)
    engine = GenerationEngine(marker_llama(), config)
    gate = StepGate(engine)
    with engine:
        params = SamplingParams(max_new_tokens=30, temperature=0, stop_token_ids=())
        futures = [engine.submit(prompt, params) for prompt in random_prompts([5] * 4)]
        gate.wait_for_arrival()
        while not engine.stats().preemptions:
            gate.step()
            gate.wait_for_arrival()
        done = engine.call(_update_to, 1)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollouts = [future.result(30) for future in futures]
    assert [rollout.prefill_version for rollout in rollouts] == [0] * 4
    assert sum(rollout.num_reprefills for rollout in rollouts) > 0
    for rollout in rollouts:
        assert set(rollout.versions) == {0, 1}
        assert_labels_tell_the_truth(rollout)


def test_partial_rollouts_are_labelled_too() -> None:
    with GenerationEngine(marker_llama()) as engine:
        future = engine.submit([5], ENDLESS)
        for version in (1, 2):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen + 5).wait()
            with engine.update() as model:
                mark(model, version)
        (snapshot,) = engine.snapshot()
        engine.cancel(future.request_id)
        rollout = future.result(30)
    assert snapshot.finish_reason is None
    assert rollout.finish_reason == FinishReason.ABORT
    for partial in (snapshot, rollout):
        assert partial.max_version in (1, 2)
        assert_labels_tell_the_truth(partial)
    assert rollout.token_ids[: len(snapshot.token_ids)] == snapshot.token_ids


def test_a_request_that_waits_takes_the_version_of_its_first_prefill() -> None:
    engine = GenerationEngine(marker_llama(), EngineConfig(max_requests=1))
    gate = StepGate(engine)
    with engine:
        running = engine.submit([5], SamplingParams(max_new_tokens=4, stop_token_ids=()))
        waiting = engine.submit([6], SamplingParams(max_new_tokens=4, stop_token_ids=()))
        gate.wait_for_arrival()
        done = engine.call(_update_to, 3)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        first, second = running.result(30), waiting.result(30)
    assert (first.prefill_version, first.versions) == (0, [0, 3, 3, 3])
    assert (second.prefill_version, second.versions) == (3, [3, 3, 3, 3])


def _update_to(engine: GenerationEngine, version: int) -> None:
    with engine.update(version) as model:
        mark(model, version)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("donor", ["finished", "in flight", "cancelled", "prefilling"])
def test_a_new_request_never_reuses_kv_of_older_weights(architecture: str, donor: str) -> None:
    model = ARCHITECTURES[architecture]()
    (prompt,) = random_prompts([30])
    config = EngineConfig(page_size=4, max_batch_tokens=8 if donor == "prefilling" else 64)
    short = SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=())
    engine = GenerationEngine(model, config)
    gate = StepGate(engine, is_open=donor != "prefilling")
    with engine:
        first = engine.submit(prompt, short if donor == "finished" else ENDLESS)
        if donor == "finished":
            first.result(30)
        elif donor == "prefilling":
            gate.step(2)
            gate.wait_for_arrival()
        else:
            wait_until(lambda: engine.stats().generated_tokens > 10)
        if donor == "cancelled":
            first.cancel()
            first.result(30)

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as shell:
                perturb(shell, seed=9)

        done = engine.call(commit)
        if donor == "prefilling":
            wait_until(engine.manager.background_thread_status.is_pause_requested)
            gate.open()
        done.result(30)
        # the donor in flight goes on completing blocks between these; none may be found
        for _ in range(4):
            rollout = engine.submit(prompt, short).result(30)
            assert rollout.prefill_version == 1
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


def test_prefixes_of_the_present_version_are_shared() -> None:
    (prompt,) = random_prompts([33])
    params = SamplingParams(max_new_tokens=2, temperature=0, stop_token_ids=())
    engine = GenerationEngine(tiny_llama(), EngineConfig(page_size=4))
    sizes: list[int] = []
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with engine:
        engine.generate([prompt], params)
        engine.generate([prompt], params)
    assert sizes == [33, 1, 1, 1], "the second prompt should find all but its last token in the cache"


def test_a_rollout_in_flight_keeps_its_kv_through_an_update() -> None:
    engine = GenerationEngine(tiny_llama())
    sizes: list[int] = []
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with engine:
        future = engine.submit(random_prompts([30])[0], ENDLESS)
        StandsStill(engine, lambda: engine.stats().generated_tokens > 10).wait()
        with engine.update() as model:
            perturb(model, seed=3)
        rollout = future.result(60)
    assert rollout.prefill_version == 0
    assert rollout.max_version == 1
    assert rollout.num_reprefills == 0
    assert sizes == [30] + [1] * 299, "an update made the engine prefill something again"


def test_a_request_made_during_an_update_belongs_to_the_new_version() -> None:
    entered, leave = threading.Event(), threading.Event()
    with GenerationEngine(marker_llama()) as engine:

        def write() -> None:
            with engine.update() as model:
                mark(model, 1)
                entered.set()
                assert leave.wait(30)

        writer = threading.Thread(target=write)
        writer.start()
        assert entered.wait(30)
        future = engine.submit([5], SamplingParams(max_new_tokens=3, temperature=0))
        leave.set()
        writer.join(30)
        rollout = future.result(30)
    assert rollout.versions == rollout.token_ids == [1]
    assert rollout.finish_reason == FinishReason.STOP  # token 1 is the EOS id
    assert rollout.prefill_version == 1


def test_an_update_frees_the_blocks_that_were_kept_for_sharing() -> None:
    (prompt,) = random_prompts([33])
    params = SamplingParams(max_new_tokens=2, temperature=0, stop_token_ids=())
    with GenerationEngine(tiny_llama(), EngineConfig(page_size=4)) as engine:
        engine.generate([prompt], params)
        assert engine.stats().kv_used > 0, "nothing was kept, so nothing is tested"
        with engine.update():
            pass
        assert engine.stats().kv_used == 0
        engine.generate([prompt], params)  # and the books still balance
        with engine.update():
            pass
        assert engine.stats().kv_used == 0

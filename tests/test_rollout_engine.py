"""The engine generates what the model says, for many requests at once, and tells how far it is."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    StandsStill,
    StepGate,
    forward_logprobs,
    greedy_reference,
    random_prompts,
    tiny_llama,
    wait_until,
)
from transformers import ContinuousBatchingConfig

from rollout import (
    EngineConfig,
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationEngine,
    Rollout,
    SamplingParams,
)

PAGE, BATCH = 16, 48
PAGED = EngineConfig(page_size=PAGE, max_batch_tokens=BATCH, num_blocks=128)
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH + 5]
TINY_CACHE = EngineConfig(page_size=4, num_blocks=12, max_batch_tokens=32)  # 48 tokens


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


# ------------------------------------------------------------------------------------------------ the right tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate_and_logprobs_those_of_a_plain_forward(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    prompts = random_prompts(LENGTHS)
    with GenerationEngine(model, PAGED) as engine:
        rollouts = engine.generate(prompts, greedy(12))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == greedy_reference(model, prompt, 12), f"prompt of {len(prompt)} tokens"
        expected = forward_logprobs(model, prompt, rollout.token_ids)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)
        assert (rollout.loss_mask, rollout.versions) == ([1] * 12, [0] * 12)
        assert (rollout.prefill_version, rollout.finish_reason, rollout.error) == (0, FinishReason.LENGTH, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled_tokens_have_the_logprobs_of_the_scaled_logits(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    prompts = random_prompts(LENGTHS)
    with GenerationEngine(model, PAGED) as engine:
        rollouts = engine.generate(
            prompts, SamplingParams(max_new_tokens=12, temperature=0.7, stop_token_ids=(), seed=1)
        )
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        tokens = rollout.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_prefixes_and_weights_of_its_own_change_no_token(architecture: str) -> None:
    model = ARCHITECTURES[architecture]()
    (stem,) = random_prompts([40])
    prompts = [stem, stem, [*stem, 9], stem[:33], stem[:32], [*stem[:20], 8, 7], stem]
    expected = [greedy_reference(model, prompt, 10) for prompt in prompts]
    for prefix_sharing in (True, False):
        for copy_weights in (True, False):
            config = EngineConfig(page_size=PAGE, max_batch_tokens=BATCH, num_blocks=64, prefix_sharing=prefix_sharing)
            with GenerationEngine(model, config, copy_weights=copy_weights) as engine:
                for _ in range(2):  # the second time all of it is cached
                    tokens = [rollout.token_ids for rollout in engine.generate(prompts, greedy(10))]
                    assert tokens == expected, f"{prefix_sharing=} {copy_weights=}"


@pytest.mark.parametrize(
    "config", [{"max_batch_tokens": 1}, {"max_batch_tokens": 2, "max_requests": 8}, {"page_size": 4}]
)
def test_the_smallest_sizes_work(config: dict[str, int]) -> None:
    model = tiny_llama()
    prompts = random_prompts([1, 5, 9, 2])
    with GenerationEngine(model, EngineConfig(**{"num_blocks": 20, **config})) as engine:
        for prompt, rollout in zip(prompts, engine.generate(prompts, greedy(4)), strict=True):
            assert rollout.token_ids == greedy_reference(model, prompt, 4)


def test_the_other_scheduler_works_too() -> None:
    model = tiny_llama()
    prompts = random_prompts([30, 40, 20, 35])
    config = EngineConfig(
        num_blocks=20, page_size=4, continuous_batching=ContinuousBatchingConfig(scheduler_type="prefill_first")
    )
    with GenerationEngine(model, config) as engine:
        for prompt, rollout in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
            assert rollout.token_ids == greedy_reference(model, prompt, 30)


def test_a_bfloat16_model_runs_and_its_logprobs_are_close() -> None:
    model = tiny_llama().to(torch.bfloat16)
    prompts = random_prompts([1, 17, 60])
    with GenerationEngine(model, PAGED) as engine:
        for prompt, rollout in zip(prompts, engine.generate(prompts, greedy(8)), strict=True):
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=0.2, rtol=0)


def test_autocast_gives_the_logprobs_of_a_forward_under_autocast() -> None:
    model = tiny_llama()
    prompts = random_prompts([1, 17, 60])
    dtypes: set[torch.dtype] = set()
    with GenerationEngine(model, EngineConfig(autocast_dtype=torch.bfloat16)) as engine:
        engine.model.lm_head.register_forward_hook(lambda _, args, logits: dtypes.add(logits.dtype))
        rollouts = engine.generate(prompts, greedy(8))
    assert dtypes == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=0.2, rtol=0)


def test_a_model_in_training_mode_stays_in_it_and_drops_nothing_out() -> None:
    model = tiny_llama(attention_dropout=0.5)
    expected = greedy_reference(model, [5, 6], 10)
    model.train()
    with GenerationEngine(model) as engine:
        assert engine.generate([[5, 6]], greedy(10))[0].token_ids == expected
    assert model.training


def test_num_threads_is_the_loops_own() -> None:
    before = torch.get_num_threads()
    seen: set[int] = set()
    with GenerationEngine(tiny_llama(), EngineConfig(num_threads=before + 1)) as engine:
        engine.model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
        engine.generate([[5]], greedy(2))
        assert torch.get_num_threads() == before
        with ThreadPoolExecutor(1) as new_thread:
            assert new_thread.submit(torch.get_num_threads).result(30) == before
        engine.generate([[5]], greedy(2))
    assert seen == {before + 1}


# ------------------------------------------------------------------------------------------------------ many at once


def test_more_requests_than_run_at_once_all_end_oldest_first() -> None:
    model = tiny_llama()
    prompts = random_prompts([3] * 12)
    ended: list[str] = []
    with GenerationEngine(model, EngineConfig(max_requests=2)) as engine:
        futures = [engine.submit(prompt, greedy(8)) for prompt in prompts]
        for future in futures:
            future.add_done_callback(lambda f: ended.append(f.result().rollout_id))
        rollouts = [future.result(30) for future in futures]
        wait_until(lambda: len(ended) == 12)
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == greedy_reference(model, prompt, 8)
    assert ended == [rollout.rollout_id for rollout in rollouts]
    started = [rollout.timings.started_at for rollout in rollouts]
    assert all(left <= right + 1e-3 for left, right in zip(started, started[2:], strict=False))


def test_never_more_than_max_requests_are_with_the_manager() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=3))
    with_manager: list[int] = []  # running or queued there: a long queue makes its every step slower
    engine.model.register_forward_pre_hook(lambda *_: with_manager.append(sum(engine.manager.counts())))
    with engine:
        engine.generate(random_prompts([2] * 20), greedy(5))
    assert max(with_manager) == 3


def test_generate_keeps_the_order_of_its_prompts() -> None:
    prompts = random_prompts([90, 1, 50, 2, 3, 70])
    with GenerationEngine(tiny_llama(), EngineConfig(max_batch_tokens=16, max_requests=3)) as engine:
        rollouts = engine.generate(prompts, greedy(5))
    assert [rollout.prompt_ids for rollout in rollouts] == prompts
    assert [rollout.sample_index for rollout in rollouts] == list(range(6))


def test_a_full_queue_blocks_submit_and_drops_nothing() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=1, max_waiting=2))
    gate = StepGate(engine)
    with engine:
        futures = [engine.submit([5], greedy(3)) for _ in range(3)]
        submitted = threading.Event()

        def submit() -> None:
            futures.append(engine.submit([6], greedy(3)))
            submitted.set()

        thread = threading.Thread(target=submit)
        thread.start()
        assert not submitted.wait(0.2), "two are waiting already"
        assert engine.stats().waiting == 2
        futures[1].cancel()  # makes room
        assert submitted.wait(30)
        gate.open()
        reasons = [future.result(30).finish_reason for future in futures]
        thread.join(30)
    assert reasons == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]


def test_the_time_that_submit_waits_for_room_counts() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=1, max_waiting=1))
    gate = StepGate(engine)
    with engine:
        others = [engine.submit([5], greedy(3)) for _ in range(2)]
        late = engine.submit([5], greedy(3), timeout_s=0.1)  # returns, though nothing makes room
        rollout = late.result(30)
        assert (rollout.finish_reason, rollout.token_ids) == (FinishReason.TIMEOUT, [])
        gate.open()
        assert [len(future.result(30).token_ids) for future in others] == [3, 3]


def test_a_blocked_submit_ends_when_the_engine_stops() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=1, max_waiting=1))
    gate = StepGate(engine)
    outcome: Future[Rollout] = Future()
    engine.start()
    futures = [engine.submit([5], greedy(3)) for _ in range(2)]

    def submit() -> None:
        try:
            engine.submit([6], greedy(3))
        except EngineStateError as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=submit)
    thread.start()
    gate.wait_for_arrival()
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    with pytest.raises(EngineStateError, match="stopped"):
        outcome.result(30)
    gate.open()
    for waiting in (thread, stopper):
        waiting.join(30)
        assert not waiting.is_alive()
    assert {future.result(30).finish_reason for future in futures} == {FinishReason.ABORT}


def test_an_upstream_queue_limit_is_no_limit_of_ours() -> None:
    config = EngineConfig(continuous_batching=ContinuousBatchingConfig(max_queue_size=1))
    with GenerationEngine(tiny_llama(), config) as engine:
        assert len(engine.generate([[5]] * 20, greedy(3))) == 20


def test_requests_from_many_threads_all_get_their_own_result() -> None:
    model = tiny_llama()
    prompts = random_prompts([1 + i % 20 for i in range(60)])
    with GenerationEngine(model, EngineConfig(max_requests=8)) as engine:
        results: dict[int, Rollout] = {}

        def client(numbers: range) -> None:
            for number in numbers:
                results[number] = engine.submit(prompts[number], greedy(4), request_id=str(number)).result(60)

        threads = [threading.Thread(target=client, args=(range(i, 60, 6),)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(results) == 60
    for number, rollout in results.items():
        assert (rollout.rollout_id, rollout.prompt_ids) == (str(number), prompts[number])
        assert rollout.token_ids == greedy_reference(model, prompts[number], 4)


def test_what_names_a_request_comes_back_with_its_rollout() -> None:
    metadata = {"answer": 42}
    with GenerationEngine(tiny_llama()) as engine:
        future = engine.submit(
            [5], greedy(2), request_id="r", group_id="g", prompt_id="p", sample_index=3, metadata=metadata
        )
        rollout = future.result(30)
        unnamed = engine.submit([5], greedy(2)).result(30)
    assert future.request_id == "r"
    assert (rollout.rollout_id, rollout.group_id, rollout.prompt_id, rollout.sample_index) == ("r", "g", "p", 3)
    assert rollout.metadata == metadata
    assert (unnamed.group_id, unnamed.prompt_id, unnamed.sample_index, unnamed.metadata) == (None, None, 0, {})
    assert unnamed.rollout_id
    times = rollout.timings
    assert times.submitted_at <= times.started_at + 1e-3 <= times.finished_at + 2e-3


def test_standard_helpers_of_futures_work() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        futures = [engine.submit([5], greedy(n)) for n in (1, 2, 3)]
        done = {future.request_id: len(future.result().token_ids) for future in as_completed(futures, timeout=30)}
        assert sorted(done.values()) == [1, 2, 3]
        assert all(future.exception() is None and not future.cancelled() for future in futures)


# ------------------------------------------------------------------------------------------------ stats and snapshot


def test_stats_say_what_is_going_on() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=2))
    gate = StepGate(engine)
    idle = engine.stats()
    assert (idle.state, idle.active, idle.waiting, idle.finished, idle.generated_tokens) == (
        EngineState.CREATED,
        0,
        0,
        0,
        0,
    )
    assert (idle.kv_used, idle.tokens_per_s, idle.last_update) == (0.0, 0.0, None)
    with engine:
        futures = [engine.submit([5] * 100, greedy(4)) for _ in range(5)]
        gate.step(3)
        gate.wait_for_arrival()
        busy = engine.stats()
        assert (busy.state, busy.active, busy.waiting, busy.finished) == (EngineState.RUNNING, 2, 3, 0)
        assert busy.generated_tokens == 6
        assert 0 < busy.kv_used < 1
        assert busy.tokens_per_s > 0
        gate.open()
        for future in futures:
            future.result(30)
        wait_until(lambda: engine.stats().active == 0)
        after = engine.stats()
        assert (after.waiting, after.finished, after.generated_tokens) == (0, 5, 20)
        assert (after.preemptions, after.updates, after.version) == (0, 0, 0)
    assert engine.stats().state == EngineState.STOPPED


def test_a_snapshot_is_a_prefix_of_what_comes() -> None:
    with GenerationEngine(tiny_llama(), EngineConfig(max_requests=3)) as engine:
        futures = [
            engine.submit(prompt, greedy(200), group_id="g", metadata={"n": n})
            for n, prompt in enumerate(random_prompts([3, 1, 8, 4, 5]))
        ]
        snapshots: list[list[Rollout]] = []
        for _ in range(4):
            seen = engine.stats().generated_tokens
            StandsStill(engine, lambda seen=seen: engine.stats().generated_tokens > seen + 20).wait()
            snapshots.append(engine.snapshot())
        finals = {future.request_id: future.result(60) for future in futures}
    assert [partial.rollout_id for partial in snapshots[0]] == [future.request_id for future in futures], "oldest first"
    assert [len(partial.token_ids) > 0 for partial in snapshots[0]] == [True] * 3 + [False] * 2
    lengths: dict[str, int] = {}
    for partial in (partial for snapshot in snapshots for partial in snapshot):
        final = finals[partial.rollout_id]
        count = len(partial.token_ids)
        assert count >= lengths.get(partial.rollout_id, 0)
        lengths[partial.rollout_id] = count
        assert partial.token_ids == final.token_ids[:count]
        assert partial.logprobs == final.logprobs[:count]
        assert (partial.finish_reason, partial.timings.finished_at) == (None, None)
        assert (partial.group_id, partial.metadata) == ("g", final.metadata)
        assert partial.prefill_version == (0 if count else None)


def test_a_snapshot_belongs_to_the_caller() -> None:
    model = tiny_llama()
    with GenerationEngine(model, TINY_CACHE) as engine:  # in which prompts are read again
        prompts = random_prompts([5] * 4)
        futures = [engine.submit(prompt, greedy(30)) for prompt in prompts]
        for partial in engine.snapshot():
            partial.prompt_ids[:] = [1] * 5
            partial.token_ids.clear()
        for prompt, future in zip(prompts, futures, strict=True):
            assert future.result(30).token_ids == greedy_reference(model, prompt, 30)
            assert future.result(30).prompt_ids == prompt


def test_a_snapshot_of_an_idle_engine_is_empty() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        assert engine.snapshot() == []

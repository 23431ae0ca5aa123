"""Asynchronous batching: while a batch runs the next one is prepared, and still every token knows its version.

On a CPU the streams are fakes (tests/fake_streams.py), which run their work at once or as late as they may.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from fake_streams import FakeDevice, async_engine
from fakes import (
    ARCHITECTURES,
    forward_logprobs,
    greedy_reference,
    mark,
    marker_llama,
    random_prompts,
    tiny_llama,
    wait_until,
)
from transformers.generation.continuous_batching.requests import RequestStatus

from rollout import (
    EngineConfig,
    EngineState,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    SamplingParams,
)

LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
ENDLESS = SamplingParams(max_new_tokens=300, temperature=0, stop_token_ids=())


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def assert_labels_tell_the_truth(rollout: Rollout) -> None:
    assert rollout.token_ids == rollout.versions, "a token is not labelled with the version that sampled it"


def generated(engine: GenerationEngine, more: int) -> None:
    seen = engine.stats().generated_tokens
    wait_until(lambda: engine.stats().generated_tokens >= seen + more)


def query_tokens(engine: GenerationEngine) -> list[int]:
    sizes: list[int] = []
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes


# --------------------------------------------------------------------------------------------------------------- tokens


@LATE
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_generate_and_logprobs_those_of_a_forward(
    architecture: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES[architecture]()
    prompts = random_prompts([1, 5, 9, 33, 70])
    engine, _ = async_engine(model, monkeypatch, EngineConfig(page_size=4, max_batch_tokens=32), late=late)
    with engine:
        for _ in range(2):
            for rollout, prompt in zip(engine.generate(prompts, greedy(12)), prompts, strict=True):
                assert rollout.token_ids == greedy_reference(model, prompt, 12)
                expected = forward_logprobs(model, prompt, rollout.token_ids)
                assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


@LATE
def test_the_next_batch_is_launched_before_this_one_is_booked(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = async_engine(tiny_llama(), monkeypatch, late=late)
    with engine:
        engine.generate([[5]], greedy(3))
    order = [line for line in device.log if not line.startswith("run")]
    assert order[:6] == ["launch 0", "launch 1", "book 0", "launch 2", "book 1", "launch 3"]
    if late:
        assert device.log[:4] == ["launch 0", "launch 1", "book 0", "run 0"], "the fake device is no test if it hurries"


@LATE
def test_a_seed_draws_the_same_with_and_without(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=30, seed=5, stop_token_ids=())
    with GenerationEngine(tiny_llama()) as engine:
        expected = engine.generate(random_prompts([4, 9]), params)
    engine, _ = async_engine(tiny_llama(), monkeypatch, late=late)
    with engine:
        said = engine.generate(random_prompts([4, 9]), params)
    assert [r.token_ids for r in said] == [r.token_ids for r in expected]


@LATE
def test_a_rollout_ends_at_its_stop_token_or_string(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return "".join(chr(33 + token) for token in token_ids)

    (prompt,) = random_prompts([7])
    tokens = greedy_reference(tiny_llama(), prompt, 20)
    first = [token for n, token in enumerate(tokens) if token not in tokens[:n]]
    wanted = tokens.index(first[2]) + 1
    engine, _ = async_engine(tiny_llama(), monkeypatch, late=late, tokenizer=Letters())
    with engine:
        for stopping in ({"stop_token_ids": [first[2]]}, {"stop_token_ids": (), "stop": [chr(33 + first[2])]}):
            params = SamplingParams(max_new_tokens=20, temperature=0, **stopping)
            rollout = engine.submit(prompt, params).result(30)
            assert (rollout.finish_reason, rollout.token_ids) == (FinishReason.STOP, tokens[:wanted])
        assert engine.stats().generated_tokens == 2 * wanted, "tokens that nobody gets are counted"


@LATE
def test_a_group_prefills_once_also_in_the_very_first_batch(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([50])
    engine, _ = async_engine(model, monkeypatch, late=late)
    sizes = query_tokens(engine)
    with engine:
        for _ in range(2):
            rollouts = [future.result(30) for future in engine.submit_group(prompt, greedy(12), size=8)]
            assert [r.token_ids for r in rollouts] == [greedy_reference(model, prompt, 12)] * 8
    assert sizes[:2] == [49, 8], "all but the last token once, then one token for each sample"


# -------------------------------------------------------------------------------------------------------------- versions


@LATE
def test_every_token_is_labelled_with_the_version_that_sampled_it(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_batch_tokens=16, page_size=4)
    engine, device = async_engine(marker_llama(), monkeypatch, config, late=late)
    with engine:
        futures = [engine.submit(prompt, ENDLESS) for prompt in random_prompts([1, 7, 40, 200])]
        for version in range(1, 9):
            generated(engine, 13)
            with engine.update() as model:
                assert device.done == device.submitted, "a forward may run while the weights change"
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    for rollout in rollouts:
        assert len(rollout.token_ids) == 300
        assert_labels_tell_the_truth(rollout)
    assert len(rollouts[0].version_spans) > 3, "the updates came too late to test anything"


@LATE
@pytest.mark.parametrize("sharing", [True, False])
def test_labels_hold_when_requests_are_preempted(late: bool, sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(page_size=4, num_blocks=24, max_batch_tokens=32, max_requests=8, prefix_sharing=sharing)
    engine, _ = async_engine(marker_llama(), monkeypatch, config, late=late)
    with engine:
        futures = [engine.submit(prompt, greedy(40)) for prompt in random_prompts([6] * 12)]
        version = 0
        while not all(future.done() for future in futures) and version < 60:
            version += 1
            before = engine.stats().generated_tokens
            wait_until(lambda n=before: engine.stats().generated_tokens > n or all(f.done() for f in futures))
            with engine.update() as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    assert sum(rollout.num_reprefills for rollout in rollouts) > 3, "the cache was not small enough to test anything"
    for rollout in rollouts:
        assert len(rollout.token_ids) == 40
        assert_labels_tell_the_truth(rollout)


def test_a_label_holds_when_the_step_after_the_update_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that is out at the update is dropped with the cache of its request, and sampled again later."""
    config = EngineConfig(page_size=4, num_blocks=12, max_batch_tokens=32, max_requests=4, prefix_sharing=False)

    def run(update_at: int | None) -> tuple[list[int], list[Rollout]]:
        engine, _ = async_engine(marker_llama(), monkeypatch, config, late=False)
        preemptions: list[int] = []  # by forward
        writers: list[threading.Thread] = []

        def before_forward(*_: object) -> None:
            preemptions.append(engine.stats().preemptions)
            if len(preemptions) == update_at:
                writers.append(threading.Thread(target=update))
                writers[0].start()
                wait_until(engine.manager.background_thread_status.is_pause_requested)

        def update() -> None:
            with engine.update() as model:
                mark(model, 1)

        engine.model.register_forward_pre_hook(before_forward)
        with engine:
            futures = [engine.submit(prompt, greedy(20)) for prompt in random_prompts([6] * 4)]
            rollouts = [future.result(30) for future in futures]
            for writer in writers:
                writer.join(30)
        return preemptions, rollouts

    preemptions, _ = run(None)
    at = [n for n in range(1, len(preemptions)) if preemptions[n] > preemptions[n - 1]]
    assert at, "the cache was not small enough to test anything"
    for update_at in range(at[0] - 2, at[0] + 3):
        for rollout in run(update_at)[1]:
            assert_labels_tell_the_truth(rollout)


@LATE
def test_a_cancelled_request_ends_once_with_a_labelled_partial(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = async_engine(marker_llama(), monkeypatch, EngineConfig(page_size=4, max_requests=8), late=late)
    prompts = random_prompts([5, 6, 7, 8] * 3)
    heard: Counter[str] = Counter()
    with engine:
        for version in range(1, 7):
            futures = [engine.submit(prompt, ENDLESS) for prompt in prompts[:6]]
            names = engine.manager.add_requests(prompts[6:], max_new_tokens=200, streaming=True)
            generated(engine, 20 + version)  # so that cancels come at other places of a block
            with engine.update(version + 1) as model:
                mark(model, version + 1)  # 1 would be the EOS id
            generated(engine, 15)
            for future, name in zip(futures, names, strict=True):
                future.cancel()
                engine.manager.cancel_request(name)
            for future in futures:
                rollout = future.result(30)
                assert rollout.finish_reason == FinishReason.ABORT
                assert_labels_tell_the_truth(rollout)
            for name in names:
                (*_, last) = engine.manager.request_id_iter(name)
                assert last.status == RequestStatus.FAILED
                heard[name] += 1
        assert engine.generate([[5]], greedy(4))[0].token_ids == [7] * 4
        assert engine.manager.get_result(timeout=0.05) is None, "a request that had ended was heard of again"
        assert engine.state == EngineState.RUNNING


@LATE
def test_nothing_that_was_sampled_around_an_outside_change_is_kept(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = marker_llama()
    engine, _ = async_engine(model, monkeypatch, late=late)
    with engine:
        for version in range(1, 16):
            futures = [engine.submit(prompt, ENDLESS) for prompt in random_prompts([3, 9])]
            name = engine.manager.add_request([5], max_new_tokens=200, eos_token_id=-1)
            generated(engine, 1 + version % 5)
            mark(model, 50)  # behind the engine's back
            for future in futures:
                rollout = future.result(30)
                assert rollout.finish_reason == FinishReason.ERROR
                assert 50 not in rollout.token_ids
                assert_labels_tell_the_truth(rollout)
            output = engine.manager.get_result(name, timeout=30)
            assert output is not None
            assert output.status == RequestStatus.FAILED
            assert "changed outside update()" in str(output.error)
            assert set(output.generated_tokens) <= {version - 1}
            assert engine.state == EngineState.FENCED
            with engine.update() as shell:
                mark(shell, version)
            assert engine.generate([[5]], greedy(3))[0].token_ids == [version] * 3


@LATE
def test_a_change_while_a_batch_runs_is_seen_before_its_tokens_are_booked(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = marker_llama()
    engine, device = async_engine(model, monkeypatch, late=late)

    def change(*_: object) -> None:
        if device.log.count("run 4"):
            mark(model, 50)

    engine.model.register_forward_pre_hook(change)
    with engine:
        rollout = engine.submit([5], ENDLESS).result(30)
    assert rollout.finish_reason == FinishReason.ERROR
    # without delay the change comes before batch 3 is booked, whose tokens go too: when it came nobody can tell
    assert rollout.token_ids == [0] * (4 if late else 3)


@LATE
def test_a_failed_update_loses_nothing_and_labels_hold(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = async_engine(marker_llama(), monkeypatch, late=late)
    with engine:
        futures = [engine.submit(prompt, ENDLESS) for prompt in random_prompts([3, 9, 30])]
        for version in range(2, 20, 2):
            generated(engine, 7)
            with contextlib.suppress(KeyError), engine.update() as model:
                mark(model, 50)  # half of an update
                raise KeyError
            assert engine.state == EngineState.FENCED
            with engine.update(version) as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    for rollout in rollouts:
        assert len(rollout.token_ids) == 300
        assert_labels_tell_the_truth(rollout)


@LATE
def test_a_snapshot_has_all_that_was_sampled_and_is_a_prefix_of_what_comes(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = async_engine(marker_llama(), monkeypatch, late=late)
    with engine:
        future = engine.submit([5], ENDLESS)
        for _ in range(10):
            generated(engine, 3)
            with engine.manager.pause_within(30):
                (progress,) = engine.manager.progress().values()
                (output,) = engine.manager.outputs().values()
                launched = [line for line in device.log if line.startswith("launch")]
            assert progress.num_sampled == len(output.generated_tokens) == len(output.logprobs) == len(launched)
        assert len(future.result(30).token_ids) == 300


@LATE
@pytest.mark.parametrize("policy", ["keep", "refresh"])
def test_logprobs_are_of_the_new_weights_where_kv_is_computed_again(
    policy: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    config = EngineConfig(page_size=4, kv_at_update=policy)
    engine, _ = async_engine(model, monkeypatch, config, late=late)
    prompts = random_prompts([20, 33])
    with engine:
        futures = [engine.submit(prompt, greedy(80)) for prompt in prompts]
        generated(engine, 30)
        with engine.update() as shell:
            perturb(shell, seed=4)
        rollouts = [future.result(60) for future in futures]
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        start = rollout.version_spans[1].start
        expected = forward_logprobs(model, prompt, rollout.token_ids)[start:]
        error = (torch.tensor(rollout.logprobs[start:]) - expected).abs().max()
        assert (error < 1e-4) == (policy == "refresh")


@LATE
def test_labels_hold_when_kv_is_computed_again(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(page_size=4, kv_at_update="refresh", max_batch_tokens=16)
    engine, _ = async_engine(marker_llama(), monkeypatch, config, late=late)
    with engine:
        futures = [engine.submit(prompt, greedy(120)) for prompt in random_prompts([3, 9, 30])]
        for version in range(1, 9):
            generated(engine, 11)
            with engine.update() as model:
                mark(model, version)
        rollouts = [future.result(60) for future in futures]
    for rollout in rollouts:
        assert len(rollout.token_ids) == 120
        assert_labels_tell_the_truth(rollout)


@LATE
@pytest.mark.parametrize("donor", ["finished", "in flight", "cancelled"])
def test_a_new_request_never_reuses_kv_of_older_weights(
    donor: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([30])
    engine, _ = async_engine(model, monkeypatch, EngineConfig(page_size=4), late=late)
    with engine:
        first = engine.submit(prompt, greedy(20) if donor == "finished" else ENDLESS)
        if donor == "finished":
            first.result(30)
        else:
            generated(engine, 10)
        if donor == "cancelled":
            first.cancel()
            first.result(30)
        with engine.update() as shell:
            perturb(shell, seed=9)
        for _ in range(4):
            rollout = engine.submit(prompt, greedy(20)).result(30)
            assert rollout.prefill_version == 1
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


# ------------------------------------------------------------------------------------------------------------------ ends


@LATE
@pytest.mark.parametrize("hard", [False, True])
def test_a_stop_right_after_a_pause_books_nothing_twice(
    hard: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = async_engine(marker_llama(), monkeypatch, late=late)
    with engine:
        future = engine.submit([5], greedy(60))
        generated(engine, 10)
        with engine.update() as model:
            mark(model, 1)
            stopper = threading.Thread(target=lambda: engine.manager.stop(hard_stop=hard))
            stopper.start()
            wait_until(lambda: engine.state == EngineState.STOPPED)
        stopper.join(30)
        rollout = future.result(30)
    assert rollout.finish_reason == (FinishReason.ABORT if hard else FinishReason.LENGTH)
    assert_labels_tell_the_truth(rollout)
    booked = Counter(line for line in device.log if line.startswith("book"))
    assert set(booked.values()) == {1}


@LATE
def test_a_kept_stop_and_a_start_leave_nothing_of_the_last_session(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = async_engine(tiny_llama(), monkeypatch, late=late)
    with engine:
        for _ in range(3):
            engine.submit([5, 6], ENDLESS)
            generated(engine, 5)
            engine.manager.stop(keep_for_next_session=True, hard_stop=True)
            engine.start()
            (rollout,) = engine.generate([[7, 8]], greedy(9))
            assert rollout.token_ids == greedy_reference(tiny_llama(), [7, 8], 9)


def test_on_a_cpu_it_is_refused() -> None:
    from transformers import ContinuousBatchingConfig

    with pytest.raises(InvalidRequestError, match="Async batching requires"):
        GenerationEngine(
            tiny_llama(), EngineConfig(continuous_batching=ContinuousBatchingConfig(use_async_batching=True))
        )


def test_the_fake_device_runs_its_work_in_order_and_no_sooner_than_it_must() -> None:
    device = FakeDevice(late=True)
    ran: list[int] = []
    for n in range(3):
        device.submit(lambda n=n: ran.append(n))
    assert ran == []
    device.run(2)
    assert ran == [0, 1]
    FakeDevice(late=False).submit(lambda: ran.append(9))
    assert ran == [0, 1, 9]

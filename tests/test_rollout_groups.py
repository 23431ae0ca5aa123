"""Groups: one prefill, many samples, each a request of its own from then on."""

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    StepGate,
    forward_logprobs,
    greedy_reference,
    mark,
    marker_llama,
    random_prompts,
    tiny_llama,
    wait_until,
)

from rollout import EngineConfig, FinishReason, GenerationEngine, InvalidRequestError, Rollout, SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=())
SIZE = 4


def count_query_tokens(engine: GenerationEngine) -> list[int]:
    """The number of tokens that each forward processes, as they come."""
    sizes: list[int] = []
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prefix_sharing", [True, False])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 33, 70])
def test_every_sample_has_the_prompts_tokens_and_its_own_logprobs(
    architecture: str, prefix_sharing: bool, length: int
) -> None:
    model = ARCHITECTURES[architecture]()
    (prompt,) = random_prompts([length])
    config = EngineConfig(page_size=4, max_batch_tokens=32, max_requests=16, prefix_sharing=prefix_sharing)
    sampled = SamplingParams(max_new_tokens=12, temperature=1.0, stop_token_ids=())
    with GenerationEngine(model, config) as engine:
        for _ in range(2):  # the second time the prompt is in the cache already
            rollouts = [future.result(30) for future in engine.submit_group(prompt, GREEDY, size=SIZE)]
            assert [r.token_ids for r in rollouts] == [greedy_reference(model, prompt, 12)] * SIZE
        rollouts = [future.result(30) for future in engine.submit_group(prompt, sampled, size=SIZE)]
    assert len({tuple(r.token_ids) for r in rollouts}) > 1
    for rollout in rollouts:
        expected = forward_logprobs(model, prompt, rollout.token_ids)
        assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4


def test_a_prompt_is_prefilled_once_for_its_group() -> None:
    engine = GenerationEngine(tiny_llama())
    sizes = count_query_tokens(engine)
    with engine:
        for future in engine.submit_group(random_prompts([50])[0], GREEDY, size=8):
            future.result(30)
    assert sizes[:2] == [49, 8], "all but the last token once, then one token for each sample"
    assert sum(sizes) == 49 + 8 * 12


def test_samples_are_named_numbered_and_grouped() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        futures = engine.submit_group(
            [5, 6], GREEDY, size=3, request_id="g", sample_index=10, prompt_id="p", metadata={"answer": 4}
        )
        rollouts = [future.result(30) for future in futures]
        made_up = [future.result(30) for future in engine.submit_group([5, 6], GREEDY, size=2)]
        with pytest.raises(InvalidRequestError, match="'a-1' is already in flight"):  # noqa: PT012
            engine.submit([5], SamplingParams(max_new_tokens=400, stop_token_ids=()), request_id="a-1")
            engine.submit_group([5], GREEDY, size=2, request_id="a")
    assert [r.rollout_id for r in rollouts] == ["g-0", "g-1", "g-2"]
    assert [r.sample_index for r in rollouts] == [10, 11, 12]
    assert {(r.group_id, r.prompt_id, r.metadata["answer"]) for r in rollouts} == {("g", "p", 4)}
    assert len({r.group_id for r in made_up}) == 1
    assert made_up[0].group_id is not None


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4", None])
def test_a_size_that_cannot_be_is_refused(size: object) -> None:
    with GenerationEngine(tiny_llama()) as engine, pytest.raises(InvalidRequestError, match="size"):
        engine.submit_group([5], GREEDY, size=size)


def test_a_seeded_group_draws_what_its_samples_draw_alone() -> None:
    params = SamplingParams(max_new_tokens=12, seed=5, stop_token_ids=())
    (prompt,) = random_prompts([20])
    with GenerationEngine(tiny_llama()) as engine:
        together = [future.result(30).token_ids for future in engine.submit_group(prompt, params, size=SIZE)]
        alone = [engine.submit(prompt, params, sample_index=n).result(30).token_ids for n in range(SIZE)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == SIZE


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding"])
def test_a_sample_that_is_cancelled_leaves_the_others_alone(victim: int, moment: str) -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([40])
    engine = GenerationEngine(model, EngineConfig(max_batch_tokens=16, max_requests=8, page_size=4))
    gate = StepGate(engine)
    with engine:
        if moment == "waiting":
            engine.submit(random_prompts([3])[0], GREEDY, request_id="first")
            for future in engine.submit_group([5], GREEDY, size=7, request_id="crowd"):
                assert future is not None
        futures = engine.submit_group(prompt, GREEDY, size=SIZE)
        if moment == "decoding":
            gate.step(4)
        if moment != "waiting":
            gate.step(1)
        gate.wait_for_arrival()
        assert futures[victim].cancel()
        gate.open()
        rollouts = [future.result(30) for future in futures]
        # and nothing of the cancelled one lives on in the engine
        wait_until(lambda: engine.stats().active == 0 and engine.stats().waiting == 0)
        assert engine.manager.counts() == (0, 0)
    reference = greedy_reference(model, prompt, 12)
    for number, rollout in enumerate(rollouts):
        if number == victim:
            assert rollout.finish_reason == FinishReason.ABORT
            assert rollout.token_ids == reference[: len(rollout.token_ids)]
        else:
            assert rollout.finish_reason == FinishReason.LENGTH
            assert rollout.token_ids == reference


def test_a_group_that_does_not_fit_at_once_ends_all_the_same() -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([16])
    config = EngineConfig(page_size=4, num_blocks=16, max_batch_tokens=32, max_requests=8)
    params = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())
    with GenerationEngine(model, config) as engine:
        rollouts = [future.result(60) for future in engine.submit_group(prompt, params, size=8)]
    assert [r.token_ids for r in rollouts] == [greedy_reference(model, prompt, 40)] * 8


def test_a_group_larger_than_what_runs_at_once_starts_alone_and_ends() -> None:
    with GenerationEngine(tiny_llama(), EngineConfig(max_requests=2, max_batch_tokens=32)) as engine:
        first = engine.submit([7], GREEDY)
        futures = engine.submit_group([5, 6], GREEDY, size=5)
        last = engine.submit([8], GREEDY)
        for future in (first, *futures, last):
            assert future.result(30).finish_reason == FinishReason.LENGTH


def test_requests_behind_a_group_do_not_keep_it_from_starting() -> None:
    engine = GenerationEngine(tiny_llama(), EngineConfig(max_requests=SIZE))
    gate = StepGate(engine)
    ends: list[str] = []
    with engine:
        first = engine.submit(
            [5], SamplingParams(max_new_tokens=30, temperature=0, stop_token_ids=()), request_id="first"
        )
        gate.wait_for_arrival()
        group = engine.submit_group([6, 7], GREEDY, size=SIZE, request_id="group")
        singles = [engine.submit([8], GREEDY, request_id=f"single-{n}") for n in range(60)]
        for future in [first, *group, *singles]:
            future.add_done_callback(lambda done: ends.append(done.request_id))
        gate.open()
        rollouts = [future.result(30) for future in [first, *group, *singles]]
    assert [rollout.finish_reason for rollout in rollouts] == [FinishReason.LENGTH] * (1 + SIZE + 60)
    started = [rollout.timings.started_at for rollout in rollouts]
    assert max(started[1 : 1 + SIZE]) <= min(started[1 + SIZE :])
    assert set(ends[1 : 1 + SIZE]) == {f"group-{n}" for n in range(SIZE)}


def test_samples_forked_after_an_update_are_labelled_by_it_and_by_the_prefill_behind_them() -> None:
    (prompt,) = random_prompts([40])
    engine = GenerationEngine(marker_llama(), EngineConfig(max_batch_tokens=16, max_requests=8, page_size=4))
    gate = StepGate(engine)
    with engine:
        futures = engine.submit_group(prompt, GREEDY, size=SIZE)
        gate.step(1)
        gate.wait_for_arrival()  # half of the prompt is prefilled, nothing is forked

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as model:
                mark(model, 1)

        done = engine.call(commit)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        rollouts = [future.result(30) for future in futures]
    for rollout in rollouts:
        assert rollout.token_ids == rollout.versions == [1] * 12
        assert rollout.prefill_version == 0


def test_no_request_finds_the_kv_of_samples_forked_across_an_update() -> None:
    model = tiny_llama()
    (prompt,) = random_prompts([40])
    engine = GenerationEngine(model, EngineConfig(max_batch_tokens=16, max_requests=8, page_size=4))
    gate = StepGate(engine)
    with engine:
        futures = engine.submit_group(prompt, SamplingParams(max_new_tokens=60, stop_token_ids=()), size=SIZE)
        gate.step(1)
        gate.wait_for_arrival()

        def commit(engine: GenerationEngine) -> None:
            with engine.update() as shell, torch.no_grad():
                for parameter in shell.parameters():
                    parameter.mul_(1.3)

        done = engine.call(commit)
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        done.result(30)
        for _ in range(3):
            rollout: Rollout = engine.submit(prompt, GREEDY).result(30)
            expected = forward_logprobs(model, prompt, rollout.token_ids)
            assert (torch.tensor(rollout.logprobs) - expected).abs().max() < 1e-4
        for future in futures:
            future.result(30)

"""Rules of upstream's `generate_batch`."""

import contextlib
import copy
import io

import pytest
from fakes import greedy_reference, random_prompts, tiny_llama, wait_until
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.requests import RequestStatus
from upstream_rows import SMALL, assert_still_right, greedy, row

from rollout import (
    EngineConfig,
    EngineStateError,
    GenerationEngine,
    InvalidRequestError,
)


@row("generate_batch")
def says_what_generate_says_in_the_order_of_the_inputs() -> None:
    model = tiny_llama()
    prompts = random_prompts([9, 3, 17, 1])
    config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1)
    own = model.generate_batch(
        prompts, config, ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    )
    with GenerationEngine(model) as engine:
        ours = engine.model.generate_batch(prompts, config)
        assert list(ours) == list(own) == ["req_0", "req_1", "req_2", "req_3"]
        for prompt, mine, theirs in zip(prompts, ours.values(), own.values(), strict=True):
            assert mine.generated_tokens == theirs.generated_tokens == greedy_reference(model, prompt, 6)
            assert mine.prompt_ids == prompt
        assert engine.model.generate_batch([]) == {}
        assert_still_right(engine)


@row("generate_batch")
def of_the_users_model_beside_an_engine_disturbs_neither() -> None:
    model = tiny_llama()
    prompts = random_prompts([5, 8])
    settings = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    with GenerationEngine(model) as engine:
        future = engine.submit(prompts[0], greedy(150))
        config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1)
        outputs = model.generate_batch(prompts, config, settings)
        assert [o.generated_tokens for o in outputs.values()] == [greedy_reference(model, p, 6) for p in prompts]
        assert future.result(30).token_ids == greedy_reference(model, prompts[0], 150)


@row("generate_batch")
def shows_a_progress_bar_when_asked() -> None:
    for shown in (True, False):
        with GenerationEngine(tiny_llama()) as engine, contextlib.redirect_stderr(io.StringIO()) as stderr:
            engine.model.generate_batch([[5], [6]], progress_bar=shown, max_new_tokens=2)
        assert ("Solving 2 requests" in stderr.getvalue()) == shown


@row("generate_batch")
def records_the_time_of_each_token_also_of_a_request_that_lost_its_cache() -> None:
    config = GenerationConfig(max_new_tokens=16, eos_token_id=-1)
    with GenerationEngine(tiny_llama(), EngineConfig(**SMALL, prefix_sharing=False)) as engine:
        outputs = engine.model.generate_batch(random_prompts([8] * 8), config, record_timestamps=True).values()
        assert engine.stats().preemptions > 0, "the cache was not small enough to test anything"
    for output in outputs:
        assert len(output.timestamps) == 16
        assert output.timestamps == sorted(output.timestamps)


@row("generate_batch")
def keeps_the_engines_manager_whatever_is_said_about_persistence_and_warm_up() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        manager = engine.manager
        for persistent in (True, False):
            for warmup in (True, False):
                outputs = engine.model.generate_batch(
                    [[5]], persistent_manager=persistent, warmup=warmup, max_new_tokens=3
                )
                assert [len(output.generated_tokens) for output in outputs.values()] == [3]
                assert engine.manager is manager
        assert_still_right(engine)


@row("generate_batch")
def of_the_users_model_keeps_and_destroys_a_manager_of_its_own() -> None:
    model = tiny_llama()
    settings = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    with GenerationEngine(model) as engine:
        for warmup in (True, False):
            model.generate_batch(
                [[5]], continuous_batching_config=settings, persistent_manager=True, warmup=warmup, max_new_tokens=2
            )
            assert type(model._cached_continuous_batching_manager) is continuous_api.ContinuousBatchingManager
        model.destroy_cached_continuous_batching_manager()
        assert_still_right(engine)


@row("generate_batch")
def takes_a_generation_config_a_call() -> None:
    model = tiny_llama()
    with GenerationEngine(model) as engine:
        sampled = GenerationConfig(do_sample=True, temperature=5.0, max_new_tokens=12, num_return_sequences=3)
        outputs = engine.model.generate_batch([[5, 6], [7]], sampled)
        assert list(outputs) == [
            name for n in (0, 1) for name in (f"req_{n}__child#0", f"req_{n}__child#1", f"req_{n}")
        ]
        assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 6
        (output,) = engine.model.generate_batch([[5, 6]], GenerationConfig(max_new_tokens=4, eos_token_id=-1)).values()
        assert output.generated_tokens == greedy_reference(model, [5, 6], 4)


@row("generate_batch")
def refuses_what_cannot_work_before_anything_is_queued() -> None:
    engine = GenerationEngine(tiny_llama())
    with pytest.raises(EngineStateError, match="not running"):
        engine.model.generate_batch([[5]])
    with engine:
        for inputs, arguments, message in [
            ([[5], []], {}, r"inputs\[1\]: the prompt is empty"),
            ([[5], [64]], {}, r"inputs\[1\].*vocabulary"),
            ([[5]], {"continuous_batching_config": ContinuousBatchingConfig()}, "EngineConfig"),
            ([[5]], {"top_k": 3}, "takes no top_k"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                engine.model.generate_batch(inputs, **arguments)
        assert engine.stats().generated_tokens == 0
        assert_still_right(engine)


@row("generate_batch")
def that_is_interrupted_leaves_nothing_behind() -> None:
    class InterruptedError_(BaseException):
        pass

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if "1/2" in text:
                raise InterruptedError_
            return len(text)

    with GenerationEngine(tiny_llama()) as engine:
        with contextlib.redirect_stderr(Interrupting()), pytest.raises(InterruptedError_):
            engine.model.generate_batch([[5], [6]], GenerationConfig(eos_token_id=-1), progress_bar=True)
        wait_until(lambda: engine.manager.counts() == (0, 0))
        assert_still_right(engine)


@row("generate_batch")
def of_a_dead_engine_returns_what_there_is() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off")

    with GenerationEngine(tiny_llama()) as engine:
        engine.model.register_forward_hook(fail)
        (output,) = engine.model.generate_batch([[5]]).values()
        assert (output.status, output.error) == (RequestStatus.FAILED, "the device fell off")
        with pytest.raises(EngineStateError, match="not running"):
            engine.model.generate_batch([[5]])


@row("generate_batch")
def of_a_copy_of_the_engines_model_is_not_the_engines() -> None:
    with GenerationEngine(tiny_llama()) as engine:
        other = copy.deepcopy(engine.model)
        with pytest.raises(EngineStateError, match="copied from an engine's"):
            other.generate_batch([[5]])

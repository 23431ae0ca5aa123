"""What the rows of `test_upstream_api.py` share: how a rule says which row it is about, and engines to try it on."""

import contextlib
from collections.abc import Callable, Iterator

from fakes import StepGate, greedy_reference, random_prompts, tiny_llama
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from rollout import (
    EngineConfig,
    EngineState,
    GenerationEngine,
    SamplingParams,
)

Rule = Callable[[], None]
ROWS: list[tuple[str, Rule, str]] = []
SMALL = {"page_size": 4, "num_blocks": 24, "max_batch_tokens": 32}


def row(member: str, mark: str = "") -> Callable[[Rule], Rule]:
    """The decorated function is a rule about that member of upstream's API; the mark is "gpu" or "slow"."""

    def add(rule: Rule) -> Rule:
        ROWS.append((member, rule, mark))
        return rule

    return add


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def configured(**settings: object) -> EngineConfig:
    """An engine's config with that of upstream in it."""
    return EngineConfig(
        continuous_batching=ContinuousBatchingConfig(**{"page_size": 16, "max_batch_tokens": 64, **settings})
    )


@contextlib.contextmanager
def gated(config: EngineConfig | None = None) -> Iterator[tuple[GenerationEngine, StepGate]]:
    """A running engine before whose forwards a gate stands; open at the end."""
    engine = GenerationEngine(tiny_llama(), config)
    gate = StepGate(engine)
    with engine:
        try:
            yield engine, gate
        finally:
            gate.open()


def finished(engine: GenerationEngine, request_id: str, tokens: int) -> GenerationOutput:
    output = engine.manager.get_result(request_id, timeout=30)
    assert output is not None
    assert (output.status, output.request_id) == (RequestStatus.FINISHED, request_id)
    assert len(output.generated_tokens) == len(output.logprobs) == tokens
    return output


def assert_still_right(engine: GenerationEngine) -> None:
    assert engine.state == EngineState.RUNNING
    assert engine.generate([[5, 6]], greedy(4))[0].token_ids == greedy_reference(tiny_llama(), [5, 6], 4)


def assert_says_what_generate_says(config: EngineConfig) -> GenerationEngine:
    """With an engine of that config; it is stopped when it comes back."""
    model = tiny_llama()
    prompts = random_prompts([7, 20, 33])
    with GenerationEngine(model, config) as engine:
        for _ in range(2):
            rollouts = engine.generate(prompts, greedy(8))
            assert [r.token_ids for r in rollouts] == [greedy_reference(model, prompt, 8) for prompt in prompts]
    return engine


def resolved(engine: GenerationEngine) -> ContinuousBatchingConfig:
    return engine.manager.continuous_batching_config

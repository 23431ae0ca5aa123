"""Rules of the fields of upstream's config that compile forwards."""

from collections.abc import Callable

import pytest
import torch
from fakes import StepGate, greedy_reference, mark, marker_llama, tiny_llama, wait_until
from transformers import CompileConfig, ContinuousBatchingConfig
from upstream_rows import assert_says_what_generate_says, configured, greedy, resolved, row

from rollout import (
    GenerationEngine,
    InvalidRequestError,
)


def plain(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    """A compiler that compiles nothing."""
    return graph.forward


def broken(*_: object) -> Callable[..., object]:
    raise RuntimeError("no compiler here")


@row("varlen_compile_config", "slow")
def is_used_on_a_cpu_with_upstreams_attention_whose_shapes_are_fixed() -> None:
    config = configured(num_blocks=8, varlen_compile_config=CompileConfig(backend=plain, mode=None, dynamic=True))
    model = tiny_llama()
    with GenerationEngine(model, config) as engine:
        (rollout,) = engine.generate([[5, 6, 7]], greedy(3))
        assert rollout.token_ids == greedy_reference(model, [5, 6, 7], 3)
        assert engine.model.config._attn_implementation == "sdpa"


@row("varlen_compile_config", "slow")
def computes_with_the_weights_of_the_last_update_and_labels_tokens_with_it() -> None:
    config = configured(num_blocks=24, varlen_compile_config=CompileConfig(backend=plain, mode=None, dynamic=True))
    engine = GenerationEngine(marker_llama(), config)
    gate = StepGate(engine)
    with engine:
        future = engine.submit([5, 6, 7], greedy(6))
        gate.step(3)
        gate.wait_for_arrival()
        updated = engine.call(lambda engine: mark_inside_an_update(engine, 1))
        wait_until(engine.manager.background_thread_status.is_pause_requested)
        gate.open()
        updated.result(60)
        rollout = future.result(60)
        assert rollout.token_ids == rollout.versions == [0, 0, 0, 0, 1, 1]


def mark_inside_an_update(engine: GenerationEngine, version: int) -> None:
    with engine.update(version) as model:
        mark(model, version)


@row("varlen_compile_config")
def that_cannot_be_compiled_fails_in_the_constructor() -> None:
    config = configured(num_blocks=8, varlen_compile_config=CompileConfig(backend=broken, mode=None))
    with pytest.raises(InvalidRequestError, match="no compiler here"):
        GenerationEngine(tiny_llama(), config)


@row("decode_compile_config")
def is_of_the_flash_decode_path_and_ignored_on_a_cpu() -> None:
    engine = assert_says_what_generate_says(configured(decode_compile_config=CompileConfig(backend=broken)))
    assert resolved(engine).decode_compile_config is None


@row("default_compile_level")
def of_zero_compiles_nothing() -> None:
    assert resolved(assert_says_what_generate_says(configured(default_compile_level=0))).varlen_compile_config is None


@row("default_compile_level", "slow")
def above_zero_compiles_on_a_cpu_that_has_a_compiler() -> None:
    for level, mode in [(1, "default"), (2, "max-autotune-no-cudagraphs")]:
        engine = assert_says_what_generate_says(configured(num_blocks=24, default_compile_level=level))
        assert resolved(engine).varlen_compile_config.mode == mode


@row("use_default_compile_configs")
def is_the_old_name_of_the_lowest_and_the_highest_level() -> None:
    assert ContinuousBatchingConfig(use_default_compile_configs=True).default_compile_level == 3
    engine = assert_says_what_generate_says(configured(use_default_compile_configs=False))
    assert resolved(engine).default_compile_level == 0

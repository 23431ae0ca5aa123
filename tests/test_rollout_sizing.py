"""How large an engine makes its KV cache and its steps on a CPU, when nobody says; and that what is said goes to upstream."""

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch
from fakes import tiny_gemma3, tiny_llama
from transformers import CompileConfig, ContinuousBatchingConfig, LlamaForCausalLM

from rollout import EngineConfig
from rollout.sizing import Sizes, bytes_per_token, cpu_sizes, upstream_settings

GIB = 2**30
CONFIG = tiny_llama(max_position_embeddings=8192).config
TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, head dim, bytes of a float32


def sizes(available: int, **given: int) -> Sizes:
    wanted = {"num_blocks": None, "page_size": None, "max_batch_tokens": None, "max_requests": None, **given}
    return cpu_sizes(CONFIG, torch.float32, available, **wanted)


def test_a_token_takes_its_keys_and_values_in_every_layer_in_the_models_dtype() -> None:
    assert bytes_per_token(CONFIG, torch.float32) == TOKEN
    assert bytes_per_token(CONFIG, torch.bfloat16) == TOKEN // 2
    assert bytes_per_token(tiny_gemma3().config, torch.float32) == TOKEN


def test_with_memory_to_spare_every_request_has_room_for_a_thousand_tokens() -> None:
    assert sizes(64 * GIB) == Sizes(num_blocks=64 * 1024 // 32, page_size=32, max_batch_tokens=256, max_requests=64)


@pytest.mark.parametrize("available", [5000 * 1024 * TOKEN // 100, 20 * 1024 * TOKEN])
def test_the_cache_stays_within_a_tenth_of_the_memory(available: int) -> None:
    made = sizes(available)
    assert 0.9 * available / 10 < made.num_blocks * made.page_size * TOKEN <= available / 10 + made.page_size * TOKEN


def test_however_little_memory_there_is_one_long_request_fits() -> None:
    made = sizes(1)
    assert made.num_blocks * made.page_size == 1024


def test_what_is_given_is_kept_and_the_rest_follows_it() -> None:
    made = sizes(64 * GIB, max_requests=300, page_size=16)
    assert (made.max_requests, made.page_size) == (300, 16)
    assert made.num_blocks == 300 * 1024 // 16
    assert made.max_batch_tokens == 300, "a decode step of all of them must fit"
    assert sizes(64 * GIB, max_batch_tokens=8).max_requests == 8, "more could never be in one step"
    assert sizes(64 * GIB, num_blocks=7).num_blocks == 7


# --------------------------------------------------------------------------------------------------------- pass-through


def on_gpu(attention: str = "sdpa") -> LlamaForCausalLM:
    """A model that says it is on a GPU."""
    model = tiny_llama()
    model.config._attn_implementation = attention
    model.__class__ = type("OnGpu", (LlamaForCausalLM,), {"device": torch.device("cuda")})
    return model


@pytest.mark.parametrize(
    "given",
    [
        {"use_cuda_graph": True},
        {"use_cuda_graph": (True, False)},
        {"use_cuda_graph": False},
        {"use_async_batching": True},
        {"use_async_batching": False},
        {"q_padding_interval_size": 16, "kv_padding_interval_size": 512, "max_cached_graphs": 3},
        {"max_blocks_per_request": 8},
        {"auto_switch_to_flash": True},
        {"auto_switch_to_flash": False},
        {"cpu_offload_space": 2.5, "cpu_offload_space_safety_threshold": 0.5},
        {"cpu_offload_space": None},
        {"default_compile_level": 2},
        {"varlen_compile_config": CompileConfig(mode="default"), "decode_compile_config": CompileConfig(dynamic=True)},
        {"max_memory_percent": 0.4, "num_blocks": 9, "page_size": 64, "max_batch_tokens": 77},
        {"max_requests_per_batch": 5, "max_queue_size": 6, "scheduler_type": "prefill_first", "safety_margin": 0.3},
        {"seed": 4, "per_request_processors": True, "drop_unsupported_processors": False},
        {"disable_nccl_graph_mixing": True, "cpu_group_timeout": 3.0},
    ],
    ids=str,
)
def test_on_a_gpu_every_setting_reaches_upstream_as_it_was_given(given: dict[str, object]) -> None:
    asked = ContinuousBatchingConfig(**given)
    before = deepcopy(asked)
    settings, paged = upstream_settings(EngineConfig(continuous_batching=asked), on_gpu())
    assert settings is not asked
    assert asked == before, "the caller's own was written to"
    assert settings == replace(before, return_logprobs=True)
    assert not paged


def test_every_field_of_upstreams_is_passed_on_by_one_of_the_cases() -> None:
    (cases,) = (
        mark.args[1]
        for mark in test_on_a_gpu_every_setting_reaches_upstream_as_it_was_given.pytestmark
        if mark.name == "parametrize"
    )
    passed = {name for given in cases for name in given}
    ours = {"allow_block_sharing", "return_logprobs"}  # the engine's prefix_sharing; always on
    old_names = {"block_size", "use_default_compile_configs"}
    assert {field.name for field in fields(ContinuousBatchingConfig)} - passed == ours | old_names


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "eager"])
def test_on_a_gpu_the_attention_is_the_one_that_the_model_came_with(attention: str) -> None:
    model = on_gpu(attention)
    upstream_settings(EngineConfig(), model)
    assert model.config._attn_implementation == attention


def test_the_engines_own_sizes_win_over_upstreams() -> None:
    config = EngineConfig(
        num_blocks=3,
        page_size=8,
        max_batch_tokens=32,
        max_requests=2,
        prefix_sharing=False,
        continuous_batching=ContinuousBatchingConfig(
            num_blocks=4, page_size=16, max_batch_tokens=64, max_requests_per_batch=5
        ),
    )
    for model in (on_gpu(), tiny_llama()):
        settings, _ = upstream_settings(config, model)
        assert (settings.num_blocks, settings.page_size, settings.max_batch_tokens) == (3, 8, 32)
        assert (settings.max_requests_per_batch, settings.allow_block_sharing) == (2, False)

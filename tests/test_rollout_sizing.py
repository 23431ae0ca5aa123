"""How large an engine makes its KV cache and its steps on a CPU, when nobody says."""

import pytest
import torch
from fakes import tiny_gemma3, tiny_llama

from rollout.sizing import Sizes, bytes_per_token, cpu_sizes

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

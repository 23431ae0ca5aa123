"""Rules of the fields of upstream's config that need a GPU."""

import pytest
import torch
from fakes import random_prompts, tiny_llama
from transformers import CompileConfig
from upstream_rows import configured, greedy, resolved, row

from rollout import (
    GenerationEngine,
)


def assert_says_it_on_the_gpu(model: torch.nn.Module, **settings: object) -> GenerationEngine:
    """Greedy tokens of a bfloat16 model are those of a plain forward up to its rounding, also after an update."""
    prompts = random_prompts([7, 20, 33])
    with GenerationEngine(model, configured(**settings)) as engine:
        for version in (0, 1):
            for rollout, prompt in zip(engine.generate(prompts, greedy(16)), prompts, strict=True):
                with torch.no_grad():
                    ids = torch.tensor([prompt + rollout.token_ids], device="cuda")
                    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
                said = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
                assert (logits.max(-1).values - said).max() < 0.25
                assert rollout.versions == [version] * 16
            if not version:
                with engine.update() as shell, torch.no_grad():
                    for parameter in shell.parameters():
                        parameter.mul_(1.01)
    return engine


def on_gpu(attention: str = "sdpa") -> torch.nn.Module:
    model = tiny_llama(hidden_size=256).to("cuda", torch.bfloat16)  # heads of 64, as flash wants them
    model.set_attn_implementation(attention)
    return model


def flash() -> str:
    """The name of the flash attention that is installed; skips without."""
    pytest.importorskip("flash_attn", reason="needs flash-attn")
    return "flash_attention_2"


@row("use_cuda_graph", "gpu")
def captures_graphs_that_follow_updates() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), use_cuda_graph=True).manager.uses_graphs


@row("q_padding_interval_size", "gpu")
def of_queries_turns_graphs_on() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), q_padding_interval_size=16).manager.uses_graphs


@row("kv_padding_interval_size", "gpu")
def of_keys_turns_graphs_on() -> None:
    assert assert_says_it_on_the_gpu(on_gpu(), kv_padding_interval_size=512).manager.uses_graphs


@row("use_async_batching", "gpu")
def prepares_the_next_batch_while_this_one_runs() -> None:
    for graphs in (False, True):
        engine = assert_says_it_on_the_gpu(on_gpu(), use_async_batching=True, use_cuda_graph=graphs)
        assert resolved(engine).use_async_batching is True


@row("max_blocks_per_request", "gpu")
def gives_flash_its_decode_path() -> None:
    engine = assert_says_it_on_the_gpu(on_gpu(flash()), page_size=256, max_blocks_per_request=4)
    assert resolved(engine).max_blocks_per_request == 4


@row("auto_switch_to_flash", "gpu")
def switches_to_flash_where_it_is_installed() -> None:
    flash()
    for switch in (True, False):
        engine = assert_says_it_on_the_gpu(on_gpu(), auto_switch_to_flash=switch, page_size=256)
        assert ("flash" in engine.model.config._attn_implementation) == switch


@row("decode_compile_config", "gpu")
def compiles_the_flash_decode_path() -> None:
    config = CompileConfig(mode="default", dynamic=True)
    assert_says_it_on_the_gpu(on_gpu(flash()), page_size=256, max_blocks_per_request=4, decode_compile_config=config)


@row("default_compile_level", "gpu")
def above_zero_compiles_on_a_gpu() -> None:
    assert_says_it_on_the_gpu(on_gpu(), default_compile_level=1)


@row("cpu_offload_space", "gpu")
def moves_kv_to_host_memory_instead_of_dropping_it() -> None:
    engine = assert_says_it_on_the_gpu(on_gpu(), cpu_offload_space=0.1, num_blocks=6)
    assert engine.stats().preemptions == 0

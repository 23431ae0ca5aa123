"""A tiny engine that generates and is updated, and what of upstream's features it runs with."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

from rollout import EngineConfig, GenerationEngine, Rollout, RolloutError, SamplingParams
from rollout.manager.models import attention_of
from rollsync_cli.checks import Check, Status

NUM_TOKENS = 32
TOLERANCE = 1e-3
LIMIT_S = 60.0


def check_engine() -> Iterator[Check]:
    """Generates, updates while it generates, and compares the log-probs with those of a plain forward."""
    section = "engine"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = _tiny_model(device)
        began_at = time.monotonic()
        with GenerationEngine(model, EngineConfig(num_blocks=64, page_size=32, max_requests=8)) as engine:
            features = list(_features(engine, device))
            plain = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=()))
            rollout = plain.result(LIMIT_S)
            updated = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=()))
            with engine.update(timeout_s=LIMIT_S), torch.no_grad():
                model.lm_head.weight.mul_(0.5)
            updated.result(LIMIT_S)
            update = engine.last_update
        seconds = time.monotonic() - began_at
        assert update is not None
    except (RolloutError, TimeoutError, RuntimeError, OSError) as error:
        yield Check(
            section=section,
            name="generation",
            status=Status.FAIL,
            detail=f"{type(error).__name__}: {error}",
            remedy="this is the smallest run there is: report it with the output of rollsync doctor --json",
        )
        return
    yield from features
    yield Check(
        section=section,
        name="generation",
        status=Status.OK,
        detail=f"{2 * NUM_TOKENS} tokens of a tiny model on {device}, one live update held for {1000 * update.held_s:.1f} ms "
        f"({seconds:.1f} s)",
    )
    yield _check_logprobs(rollout, device)


def _tiny_model(device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.to(device)


def _check_logprobs(rollout: Rollout, device: str) -> Check:
    """Against the same random weights, made again."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids], device=device)
    with torch.no_grad():
        logits = _tiny_model(device)(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(rollout.prompt_ids) :, None])[:, 0].cpu()
    error = float((expected - torch.tensor(rollout.logprobs)).abs().max())
    if error <= TOLERANCE:
        return Check(
            section="engine", name="log-probs", status=Status.OK, detail=f"within {error:.1e} of a plain forward's"
        )
    return Check(
        section="engine",
        name="log-probs",
        status=Status.FAIL,
        detail=f"{error:.1e} from those of a plain forward, at most {TOLERANCE:.0e} was expected",
        remedy="with ROLLSYNC_NO_KERNEL=1 the engine runs without its compiled kernels; report it either way",
    )


def _features(engine: GenerationEngine, device: str) -> Iterator[Check]:
    """Upstream's, as the engine's config has come out of its checks."""
    config: Any = engine.manager.continuous_batching_config
    gpu_only = "" if device == "cuda" else "needs a GPU"
    for name, is_on, detail, why_not in (
        ("attention", True, attention_of(engine.model), ""),
        ("prefix sharing", engine.manager.shares_prefixes, "never across an update", "not for this kind of cache"),
        ("async batching", config.use_async_batching, "", gpu_only or "off: EngineConfig(continuous_batching=...)"),
        ("CUDA graphs", engine.manager.uses_graphs, "", gpu_only or "off: EngineConfig(continuous_batching=...)"),
        (
            "flash attention",
            is_flash_attn_2_available(),
            "",
            gpu_only or "flash-attn is not installed: pip install 'rollsync[gpu]'",
        ),
        (
            "KV offload",
            bool(config.cpu_offload_space),
            "",
            gpu_only or "off: ContinuousBatchingConfig(cpu_offload_space=...)",
        ),
        (
            "compiled forwards",
            config.default_compile_level > 0 or config.varlen_compile_config is not None,
            "",
            "off: ContinuousBatchingConfig(default_compile_level=...); a minute to start, no gain on a CPU",
        ),
        ("tensor parallel", False, "", "not offered: such models are refused"),
    ):
        status = Status.OK if is_on else Status.OFF
        yield Check(section="features", name=name, status=status, detail=(detail or "on") if is_on else why_not)

"""Upstream's settings for ours: on a CPU how large the KV cache and a step may be, where upstream's defaults take most
of the memory; on a GPU what upstream finds in the free memory."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from rollout.config import EngineConfig
from rollout.errors import InvalidRequestError
from rollout.manager.models import attention_of, supports_sdpa

DEFAULT_PAGE_SIZE = ContinuousBatchingConfig().page_size
PAGE_SIZE = 32
MAX_REQUESTS = 64
"""Enough rows to keep the matrix products of a decode step busy; more only lengthens the step."""
MAX_BATCH_TOKENS = 256
"""A step is what an update waits for: larger prefill chunks gain little on a CPU and lengthen the longest pause wait."""
TOKENS_PER_REQUEST = 1024
MEMORY_SHARE = 0.1
"""Of the memory that is free when the engine is made."""


_UPSTREAM_ATTENTION = ("sdpa", "eager", "paged|eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def upstream_settings(config: EngineConfig, shell: PreTrainedModel) -> tuple[ContinuousBatchingConfig, bool]:
    """Upstream's config for `config`, and whether our attention is to be used. Gives the shell an attention that upstream
    accepts: the trainer may have asked for any."""
    given = config.continuous_batching
    if given is not None and not isinstance(given, ContinuousBatchingConfig):
        raise InvalidRequestError(
            "EngineConfig.continuous_batching must be transformers' ContinuousBatchingConfig(...) or None, got "
            f"{type(given).__name__}"
        )
    upstream = deepcopy(given) if given is not None else ContinuousBatchingConfig()
    sizes: Mapping[str, int | None] = {
        "num_blocks": config.num_blocks or upstream.num_blocks,
        # upstream's own default, which suits GPUs, counts as not given
        "page_size": config.page_size or (upstream.page_size if upstream.page_size != DEFAULT_PAGE_SIZE else None),
        "max_batch_tokens": config.max_batch_tokens or upstream.max_batch_tokens,
        "max_requests": config.max_requests or upstream.max_requests_per_batch,
    }
    on_cpu = shell.device.type == "cpu"
    if on_cpu:
        _check_cpu(upstream)
        upstream.auto_switch_to_flash = False  # which runs on GPUs
        available = psutil.virtual_memory().available
        sizes = vars(cpu_sizes(shell.config.get_text_config(), shell.dtype, available, **sizes))
    upstream.num_blocks = sizes["num_blocks"]
    upstream.page_size = sizes["page_size"] or upstream.page_size
    upstream.max_batch_tokens = sizes["max_batch_tokens"]
    upstream.max_requests_per_batch = sizes["max_requests"]
    upstream.allow_block_sharing = upstream.allow_block_sharing and config.prefix_sharing
    upstream.return_logprobs = True  # a rollout without them cannot be trained on
    # compiled code needs the fixed shapes of upstream's own attention: ours changes with each batch
    paged = on_cpu and _has_our_attention(shell) and not _is_compiled(upstream, shell)
    if paged or attention_of(shell) not in _UPSTREAM_ATTENTION:
        shell.set_attn_implementation("sdpa" if supports_sdpa(shell) else "eager")
    return upstream, paged


def _has_our_attention(model: PreTrainedModel) -> bool:
    """Whether `model`'s attention is what `rollout.model.attention` computes: scaled dot products through the attention interface,
    with or without capped logits (Gemma 2), without sinks (gpt-oss, which says that it does not support sdpa)."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return supports_sdpa(model) or capped


def _check_cpu(upstream: ContinuousBatchingConfig) -> None:
    space = upstream.cpu_offload_space
    if (space is None or space > 0) and upstream.cpu_offload_space_safety_threshold > 0:
        raise InvalidRequestError(
            f"cpu_offload_space={space} is for the KV cache of a GPU, this model is on the CPU: leave it at 0 and raise "
            "num_blocks instead"
        )


def _is_compiled(upstream: ContinuousBatchingConfig, shell: PreTrainedModel) -> bool:
    given = (upstream.varlen_compile_config, getattr(shell.config.get_text_config(), "compile_config", None))
    return upstream.default_compile_level > 0 or any(config is not None for config in given)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one engine; all positive."""

    num_blocks: int
    page_size: int
    max_batch_tokens: int
    max_requests: int


def cpu_sizes(
    text_config: Any,
    dtype: torch.dtype,
    available_bytes: int,
    *,
    num_blocks: int | None,
    page_size: int | None,
    max_batch_tokens: int | None,
    max_requests: int | None,
) -> Sizes:
    """Given values are kept; the others let `max_requests` requests of up to 1,024 tokens (or the model's context, if
    shorter) run at once, within a tenth of the available memory, but never below one full context."""
    page = page_size or PAGE_SIZE
    requests = max_requests or min(MAX_REQUESTS, max_batch_tokens or MAX_REQUESTS)
    context = int(getattr(text_config, "max_position_embeddings", None) or TOKENS_PER_REQUEST)
    if num_blocks is None:
        affordable = int(available_bytes * MEMORY_SHARE) // bytes_per_token(text_config, dtype)
        wanted = requests * min(context, TOKENS_PER_REQUEST)
        num_blocks = -(-max(min(wanted, affordable), min(context, TOKENS_PER_REQUEST)) // page)
    return Sizes(
        num_blocks=num_blocks,
        page_size=page,
        max_batch_tokens=max_batch_tokens or max(MAX_BATCH_TOKENS, requests),
        max_requests=requests,
    )


def bytes_per_token(text_config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in the cache, over all layers."""
    num_heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads)
    return 2 * int(text_config.num_hidden_layers) * kv_heads * head_dim * dtype.itemsize

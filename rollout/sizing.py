"""How large the KV cache and a step may be on a CPU, where upstream's defaults take most of the memory."""

from dataclasses import dataclass
from typing import Any

import torch

PAGE_SIZE = 32
MAX_REQUESTS = 64
"""Enough rows to keep the matrix products of a decode step busy; more only lengthens the step."""
MAX_BATCH_TOKENS = 256
"""A step is what an update waits for: larger prefill chunks gain little on a CPU and lengthen the longest pause wait."""
TOKENS_PER_REQUEST = 1024
MEMORY_SHARE = 0.1
"""Of the memory that is free when the engine is made."""


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

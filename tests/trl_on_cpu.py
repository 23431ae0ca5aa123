"""AsyncGRPOTrainer on a CPU: what it needs of a GPU, in plain torch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def register_plain_tree_attention() -> None:
    """In place of the one that TRL registers while it is constructed, whose kernel runs on GPUs only."""
    AttentionInterface.register(TREE_ATTENTION, plain_tree_attention)


def plain_tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. Each segment of the tree sees the keys
    of its own path, and is at the end of it."""
    repeats = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for segment in range(len(tree_cu_seqlens_q) - 1):
        rows = slice(int(tree_cu_seqlens_q[segment]), int(tree_cu_seqlens_q[segment + 1]))
        path = tree_kv_index[int(tree_cu_seqlens_k[segment]) : int(tree_cu_seqlens_k[segment + 1])]
        num_rows, num_keys = rows.stop - rows.start, len(path)
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        out[:, :, rows] = scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, path].repeat_interleave(repeats, 1),
            value[:, :, path].repeat_interleave(repeats, 1),
            attn_mask=mask,
            scale=scaling,
        )
    return out.transpose(1, 2), None

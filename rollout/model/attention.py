"""Attention over the paged KV cache on a CPU, one request at a time in memory terms, many at a time in compute.

Upstream's CPU path is a dense attention of all requests' queries over all requests' keys under a mask of
[batch tokens, cache tokens]. Here the batch is cut into its requests: those that decode (one query each) are attended
together with grouped queries, straight from the cache, by a compiled kernel where there is one, else by torch, padded to a
common length; those that prefill go one by one. Same tokens, no mask, and the cost grows with what is attended to, not
with its square over requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollout.model.kernels import Kernels

NAME = "rollsync_paged"


@dataclass(frozen=True)
class DecodeGroup:
    """Requests with one query each and about the same number of keys, padded to the longest."""

    queries: torch.Tensor  # [n] row of each request's query in the batch
    rows: torch.Tensor  # [n, longest] row of each key in the cache, 0 where padded
    bias: torch.Tensor | None  # [n, 1, longest] 0 for keys, -inf for padding; None: nothing is padded


@dataclass(frozen=True)
class RaggedDecodes:
    """Requests with one query each, for the compiled kernel: nothing is padded. All int64."""

    batch_rows: torch.Tensor  # [n] row of each request's query in the batch
    rows: torch.Tensor  # [any] rows of the cache; request i's keys are in rows[starts[i]:stops[i]]
    starts: torch.Tensor  # [n]
    stops: torch.Tensor  # [n]
    kernels: Kernels


@dataclass(frozen=True)
class Prefill:
    """One request with several queries, or with none of its keys in the cache yet."""

    start: int  # its queries are rows start..stop of the batch
    stop: int
    rows: torch.Tensor | None  # [num_keys] rows of its keys in the cache; None: its keys are its own new ones
    bias: torch.Tensor | None  # [num_queries, num_keys] 0 or -inf; None: plain causal


@dataclass(frozen=True)
class Plan:
    """How one step's batch is cut up for the layers of one attention type."""

    decodes: list[DecodeGroup]
    prefills: list[Prefill]
    ragged: RaggedDecodes | None = None  # in place of `decodes` where there is a kernel for them


def plan_batch(
    query_ends: list[int],
    key_ends: list[int],
    rows: torch.Tensor | None,
    *,
    window: int | None,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
) -> Plan:
    """Cuts a batch into its requests.

    `query_ends` and `key_ends` are cumulative lengths, from 0. `rows` [num_keys] are the cache rows of all keys in
    order; None: nothing is read from the cache, every request attends to its new keys only. `window`: the sliding
    window in tokens, whose keys before it are not in `rows` unless a query of the same step still needs them. `dtype` is
    the cache's; `kernels` serve fp32.
    """
    decoding: list[tuple[int, int, int]] = []
    prefills: list[Prefill] = []
    for i in range(len(query_ends) - 1):
        q0, q1, k0, k1 = query_ends[i], query_ends[i + 1], key_ends[i], key_ends[i + 1]
        num_queries, num_keys = q1 - q0, k1 - k0
        if num_queries == 1 and rows is not None:
            decoding.append((q0, k0, k1))
        elif num_queries == num_keys and (window is None or num_queries <= window):
            prefills.append(Prefill(start=q0, stop=q1, rows=None, bias=None))
        else:
            own = rows is None or num_queries == num_keys
            prefills.append(
                Prefill(
                    start=q0,
                    stop=q1,
                    rows=None if own or rows is None else rows[k0:k1],
                    bias=_causal_bias(num_queries, num_keys, window, dtype),
                )
            )
    if not decoding or rows is None:
        return Plan(decodes=[], prefills=prefills)
    if kernels is not None and dtype == torch.float32:
        return Plan(decodes=[], prefills=prefills, ragged=_ragged(decoding, rows, kernels))
    return Plan(decodes=_padded(decoding, rows, dtype), prefills=prefills)


@dataclass(frozen=True)
class PagedKeys:
    """What the cache hands to the attention for one layer."""

    keys: torch.Tensor  # [cache_rows, num_kv_heads, head_dim]
    values: torch.Tensor  # [cache_rows, num_kv_heads, head_dim]
    plan: Plan


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers' AttentionInterface.

    query [1, num_heads, num_queries, head_dim]; key and value [1, num_kv_heads, num_queries, head_dim] hold the step's
    new tokens; the rest is in `kwargs["paged"]`. Returns [1, num_queries, num_heads, head_dim]. Outside the engine
    (no "paged") it is transformers' own sdpa.
    """
    paged: PagedKeys | None = kwargs.pop("paged", None)
    if paged is None:
        result = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return result[0], None
    queries = query[0].transpose(0, 1)  # [num_queries, num_heads, head_dim]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    scale = scaling if scaling is not None else head_dim**-0.5
    softcap: float | None = kwargs.get("softcap")
    if paged.plan.ragged is not None:
        # under autocast the queries may be of another dtype than the cache
        out = torch.empty(queries.shape[0], num_heads, new_values.shape[-1])
        _attend_ragged(queries, paged.keys, paged.values, paged.plan.ragged, scale, softcap, out)
        out = out.to(queries.dtype)
    else:
        out = queries.new_empty(queries.shape[0], num_heads, new_values.shape[-1])
    for group in paged.plan.decodes:
        out[group.queries] = _attend_decodes(queries[group.queries], paged.keys, paged.values, group, scale, softcap)
    for prefill in paged.plan.prefills:
        own = slice(prefill.start, prefill.stop)
        keys = new_keys[own] if prefill.rows is None else paged.keys.index_select(0, prefill.rows)
        values = new_values[own] if prefill.rows is None else paged.values.index_select(0, prefill.rows)
        out[own] = _attend_prefill(queries[own], keys, values, prefill.bias, scale, softcap)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend_ragged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decodes: RaggedDecodes,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    queries = queries.to(torch.float32)
    decodes.kernels.attend(
        queries if queries.stride(2) == 1 else queries.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        rows=decodes.rows,
        batch_rows=decodes.batch_rows,
        starts=decodes.starts,
        stops=decodes.stops,
        scale=scale,
        softcap=softcap,
        out=out,
    )


def _attend_decodes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    num, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    longest = group.rows.shape[1]
    # One row a (token, kv head), gathered in [request, kv head, token] order: the result needs no second copy for bmm.
    flat = (group.rows.unsqueeze(1) * kv_heads + torch.arange(kv_heads).view(1, -1, 1)).flatten()
    k = keys.reshape(-1, head_dim).index_select(0, flat).view(num * kv_heads, longest, head_dim)
    v = values.reshape(-1, values.shape[-1]).index_select(0, flat).view(num * kv_heads, longest, -1)
    q = (queries * scale).view(num * kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.bmm(q, k.transpose(1, 2)).view(num, num_heads, longest)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if group.bias is not None:
        scores += group.bias
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights.view(num * kv_heads, num_heads // kv_heads, longest), v).view(num, num_heads, -1)


def _attend_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    grouped = keys.shape[1] != queries.shape[1]
    if softcap is None:
        mask = None if bias is None else bias.unsqueeze(0).unsqueeze(0)
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=bias is None, scale=scale, enable_gqa=grouped
        )
        return result[0].transpose(0, 1)
    repeats = queries.shape[1] // keys.shape[1]
    scores = torch.matmul(q * scale, k.repeat_interleave(repeats, dim=1).transpose(2, 3))
    scores = (scores / softcap).tanh() * softcap
    scores += bias if bias is not None else _causal_bias(q.shape[2], k.shape[2], None, scores.dtype)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights, v.repeat_interleave(repeats, dim=1))[0].transpose(0, 1)


def _ragged(members: list[tuple[int, int, int]], rows: torch.Tensor, kernels: Kernels) -> RaggedDecodes:
    # Samples of one prompt share rows: side by side, each finds in the core's cache what the one before has read.
    first = rows[torch.tensor([k0 for _, k0, _ in members])].tolist()
    order = sorted(range(len(members)), key=lambda i: first[i])
    table = torch.tensor([members[i] for i in order]).t().contiguous()
    return RaggedDecodes(batch_rows=table[0], rows=rows.contiguous(), starts=table[1], stops=table[2], kernels=kernels)


def _padded(members: Iterable[tuple[int, int, int]], rows: torch.Tensor, dtype: torch.dtype) -> list[DecodeGroup]:
    classes: dict[int, list[tuple[int, int, int]]] = {}
    for member in members:
        classes.setdefault(_length_class(member[2] - member[1]), []).append(member)
    return [_decode_group(alike, rows, dtype) for alike in classes.values()]


def _decode_group(members: list[tuple[int, int, int]], rows: torch.Tensor, dtype: torch.dtype) -> DecodeGroup:
    lengths = torch.tensor([k1 - k0 for _, k0, k1 in members])
    longest = int(lengths.max())
    offsets = torch.arange(longest)
    starts = torch.tensor([k0 for _, k0, _ in members])
    real = offsets < lengths.unsqueeze(1)
    index = torch.where(real, starts.unsqueeze(1) + offsets, 0)
    padded = torch.where(real, rows[index], 0)
    bias = (
        None if bool(real.all()) else torch.zeros(real.shape, dtype=dtype).masked_fill_(~real, -torch.inf).unsqueeze(1)
    )
    return DecodeGroup(queries=torch.tensor([q for q, _, _ in members]), rows=padded, bias=bias)


def _causal_bias(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[num_queries, num_keys]: the last query sees the last key; each sees `window` keys, itself included."""
    distance = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1) - torch.arange(num_keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _length_class(length: int) -> int:
    """Lengths of one class differ by at most a half, so that padding never costs more than that."""
    size = 64
    number = 0
    while size < length:
        size += size // 2
        number += 1
    return number

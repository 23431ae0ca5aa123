"""The paged attention equals a dense one, however a step's batch is made up."""

from dataclasses import dataclass

import pytest
import torch
from fakes import tiny_llama

from rollout.model.attention import PagedKeys, paged_attention, plan_batch

HEAD_DIM, KV_HEADS = 8, 2
CACHE_ROWS = 600


@dataclass
class Request:
    """One request in a step: `past` tokens are in the cache, `new` come in this step."""

    past: int
    new: int


MODULE = torch.nn.Module()  # what the attention functions ask of the layer
MODULE.num_key_value_groups = 1
MODULE.is_causal = True

BATCHES = {
    "one token, nothing before it": [Request(0, 1)],
    "one-token prompts": [Request(0, 1), Request(0, 1), Request(0, 1)],
    "whole prompts": [Request(0, 5), Request(0, 1), Request(0, 33)],
    "decodes": [Request(3, 1), Request(3, 1), Request(40, 1)],
    "decodes of very different lengths": [Request(1, 1), Request(70, 1), Request(150, 1), Request(65, 1)],
    "decodes and prompts": [Request(7, 1), Request(0, 6), Request(0, 1), Request(19, 1)],
    "chunks": [Request(8, 4), Request(0, 16), Request(30, 2)],
    "everything": [Request(8, 4), Request(9, 1), Request(0, 1), Request(0, 20), Request(64, 1), Request(100, 11)],
}


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, window: int | None, cap: float | None
) -> torch.Tensor:
    """q [new, heads, dim], k and v [past + new, kv heads, dim] -> [new, heads, dim], by the definition, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        position = past + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys, values = k[first : position + 1, head // groups], v[first : position + 1, head // groups]
            scores = keys @ q[i, head] * HEAD_DIM**-0.5
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            out[i, head] = scores.softmax(0) @ values
    return out


def run(
    batch: list[Request],
    *,
    num_heads: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(paged, dense) outputs [num_queries, num_heads, HEAD_DIM] of one step, keys scattered over a cache."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache_k, cache_v = randn(CACHE_ROWS, KV_HEADS, HEAD_DIM), randn(CACHE_ROWS, KV_HEADS, HEAD_DIM)
    free = torch.randperm(CACHE_ROWS, generator=generator).tolist()
    reads = any(request.past for request in batch)
    query_ends, key_ends, rows, queries, new_k, new_v, expected = [0], [0], [], [], [], [], []
    for request in batch:
        q, k, v = randn(request.new, num_heads, HEAD_DIM), *(randn(request.new, KV_HEADS, HEAD_DIM) for _ in "kv")
        own = [free.pop() for _ in range(request.past + request.new)]
        cache_k[own[request.past :]], cache_v[own[request.past :]] = k, v
        expected.append(dense(q, cache_k[own], cache_v[own], request.past, window, softcap))
        # a sliding-window cache offers only what a query of this step may still see
        seen = own if window is None else own[max(0, request.past - window + 1) :]
        rows += seen
        queries.append(q)
        new_k.append(k)
        new_v.append(v)
        query_ends.append(query_ends[-1] + request.new)
        key_ends.append(key_ends[-1] + len(seen))
    plan = plan_batch(query_ends, key_ends, torch.tensor(rows) if reads else None, window=window, dtype=dtype)

    def batched(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).transpose(0, 1).unsqueeze(0)

    out, weights = paged_attention(
        MODULE,
        batched(queries),
        batched(new_k),
        batched(new_v),
        None,
        scaling=HEAD_DIM**-0.5,
        softcap=softcap,
        paged=PagedKeys(keys=cache_k, values=cache_v, plan=plan),
    )
    assert weights is None
    assert out.dtype == dtype
    return out[0], torch.cat(expected)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("num_heads", [KV_HEADS, 6], ids=["as many queries as keys", "grouped queries"])
def test_paged_attention_is_dense_attention(batch: list[Request], num_heads: int) -> None:
    paged, expected = run(batch, num_heads=num_heads)
    torch.testing.assert_close(paged.double(), expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [1, 8, 17])
def test_a_sliding_window_hides_what_has_left_it(batch: list[Request], window: int) -> None:
    paged, expected = run(batch, window=window)
    torch.testing.assert_close(paged.double(), expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_capped_logits_are_capped_before_the_mask(batch: list[Request]) -> None:
    paged, expected = run(batch, softcap=2.0)
    torch.testing.assert_close(paged.double(), expected, atol=2e-6, rtol=2e-5)
    if any(request.past + request.new > 1 for request in batch):
        assert not torch.allclose(run(batch)[0].double(), expected, atol=1e-3), "the cap makes a difference here"


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 8])
def test_bfloat16_stays_within_its_own_precision(batch: list[Request], window: int | None) -> None:
    paged, expected = run(batch, window=window, dtype=torch.bfloat16)
    torch.testing.assert_close(paged.double(), expected, atol=3e-2, rtol=3e-2)


def test_what_follows_in_the_batch_does_not_matter() -> None:
    batch = BATCHES["everything"]
    out, _ = run(batch)
    ends = torch.tensor([r.new for r in batch]).cumsum(0).tolist()
    for i, request in enumerate(batch):
        alone, _ = run([*batch[:i], request])  # the same random numbers reach request i
        assert alone.shape == (ends[i], 4, HEAD_DIM)
        torch.testing.assert_close(alone, out[: ends[i]])


def test_decodes_of_similar_length_share_a_group_and_long_ones_do_not_pad_short_ones() -> None:
    lengths = [10, 60, 64, 65, 96, 97, 144, 145, 1000]
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    plan = plan_batch(list(range(len(lengths) + 1)), ends, torch.arange(ends[-1]), window=None, dtype=torch.float32)
    groups = [group.queries.tolist() for group in plan.decodes]
    assert groups == [[0, 1, 2], [3, 4], [5, 6], [7], [8]]
    assert plan.prefills == []
    for group in plan.decodes:
        shortest = min(lengths[i] for i in group.queries.tolist())
        assert group.rows.shape[1] <= max(64, 1.5 * shortest)


def test_nothing_is_padded_where_lengths_are_equal() -> None:
    plan = plan_batch([0, 1, 2], [0, 7, 14], torch.arange(14), window=None, dtype=torch.float32)
    assert plan.decodes[0].bias is None


def test_outside_an_engine_it_is_transformers_own_attention() -> None:
    model, plain = tiny_llama(), tiny_llama()
    model.set_attn_implementation("rollsync_paged")
    ids = torch.arange(2, 30).unsqueeze(0)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for mask in (None, padded):
        ours, theirs = model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
        assert torch.equal(ours, theirs)

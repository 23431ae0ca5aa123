"""The sampler: from logits to tokens and their log-probs, with one uniform number per token as the only randomness.

Inverse-CDF sampling needs a single uniform number a token. With a seed that number is a function of
(seed, sample index, absolute position) alone, so another batch, a preemption or a resume draws the same; without one it
comes from the engine's own generator. The process-wide random state is never touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from rollout.model.kernels import Kernels

_BITS = 24  # of each half of a uniform number: two halves travel as int32 and make 48 random bits


@dataclass(frozen=True)
class SamplingRow:
    """How the next token of one request is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    sample_index: int = 0


def keyed_uniform(seed: int, sample_index: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on its three keys alone (Philox counter-based generator; Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    bits = int(np.random.Philox(key=[seed, sample_index], counter=[position, 0, 0, 0]).random_raw())
    return (bits >> (64 - 2 * _BITS)) / float(1 << (2 * _BITS))


def draw_uniforms(rows: Iterable[tuple[SamplingRow, int]], generator: np.random.Generator) -> list[float]:
    """One uniform number for each (row, absolute position of the token to sample)."""
    return [
        float(generator.random()) if row.seed is None else keyed_uniform(row.seed, row.sample_index, position)
        for row, position in rows
    ]


def pack_rows(rows: list[SamplingRow], uniforms: list[float]) -> torch.Tensor:
    """Rows as int32 [5, num_rows], the form in which they travel in upstream's static tensors: temperature and top_p
    as float32 bit patterns, top_k, and the high and low 24 bits of the uniform number."""
    floats = torch.tensor([[r.temperature for r in rows], [r.top_p for r in rows]], dtype=torch.float32)
    scaled = [int(u * (1 << (2 * _BITS))) for u in uniforms]
    packed = torch.empty((NUM_ARGUMENTS, len(rows)), dtype=torch.int32)
    packed[0:2] = floats.view(torch.int32)
    # more than any vocabulary is "all of them", and must fit into an int32
    packed[2] = torch.tensor([min(r.top_k, 2**31 - 1) for r in rows], dtype=torch.int32)
    packed[3] = torch.tensor([s >> _BITS for s in scaled], dtype=torch.int32)
    packed[4] = torch.tensor([s & ((1 << _BITS) - 1) for s in scaled], dtype=torch.int32)
    return packed


NUM_ARGUMENTS = 5  # rows of the packed form


def sample(
    logits: torch.Tensor,
    packed: torch.Tensor,
    *,
    any_random: bool = True,
    any_filter: bool = True,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [num_rows] (int64) and their log-probs [num_rows] from float32 logits [num_rows, vocab].

    `packed` is what `pack_rows` makes. The log-prob of a token is that of the distribution it was sampled from: after
    temperature, and renormalised over what top-k and top-p keep; for greedy rows that of the unscaled distribution.
    `any_random` and `any_filter` tell that no row samples or filters, which skips that work. `kernels` serve batches on a
    CPU in which no row filters.
    """
    temperature, top_p = packed[0].view(torch.float32), packed[1].view(torch.float32)
    if kernels is not None and not any_filter:
        return kernels.sample(logits.contiguous(), temperature, _uniforms(packed))
    greedy = temperature == 0
    if not any_random:
        tokens = logits.argmax(dim=-1)
        return tokens, _at(logits, tokens) - logits.logsumexp(dim=-1)
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    if any_filter:
        scaled = _keep_likely(scaled, top_k=packed[2], top_p=top_p, everything=greedy)
    logprobs = scaled.log_softmax(dim=-1)
    # float64: the running sum over a large vocabulary must not round away the tail
    cumulative = logprobs.exp().to(torch.float64).cumsum(dim=-1)
    # right=True: the first token whose cumulative probability exceeds the draw, hence never one of probability 0
    drawn = torch.searchsorted(cumulative, _uniforms(packed).unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn.clamp(max=logits.shape[-1] - 1))
    return tokens, _at(logprobs, tokens)


def _uniforms(packed: torch.Tensor) -> torch.Tensor:
    return (packed[3].to(torch.float64) * (1 << _BITS) + packed[4].to(torch.float64)) / (1 << (2 * _BITS))


def _keep_likely(
    scaled: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, everything: torch.Tensor
) -> torch.Tensor:
    """-inf for all but the top_k most likely tokens and, of those, the smallest set that reaches top_p; ties stay."""
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab = ordered.shape[-1]
    k = torch.where((top_k <= 0) | everything, vocab, top_k.clamp(max=vocab)).to(torch.int64)
    in_top_k = torch.arange(vocab, device=scaled.device) < k.unsqueeze(-1)
    probs = ordered.masked_fill(~in_top_k, -torch.inf).softmax(dim=-1)
    # a token is kept while the probability before it is short of top_p
    before = probs.cumsum(dim=-1) - probs
    keep = in_top_k & ((before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1) | everything.unsqueeze(-1))
    # also where top_p rounds to 0 in float32, or the logits are nan: without a token the loop would die
    keep[:, 0] = True
    least = ordered.gather(-1, keep.sum(dim=-1, keepdim=True) - 1)
    return scaled.masked_fill(scaled < least, -torch.inf)


def _at(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

"""Requests of upstream's own methods, checked as the engine's own are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from rollout.errors import InvalidRequestError
from rollout.model.sampling import SamplingRow
from rollout.requests import checks
from rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class UpstreamRequest:
    """One that can work."""

    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: Sequence[int]
    rows: list[SamplingRow]  # one a sample


def check_request(
    input_ids: Any,
    config: GenerationConfig,
    limits: checks.Limits,
    *,
    max_new_tokens: Any,
    eos_token_id: Any = None,
    sampling: Mapping[str, Any],
) -> UpstreamRequest:
    """InvalidRequestError for what the loop would die of. What is None is `config`'s; `max_new_tokens` is then no more
    than fits."""
    row = _row_given(config, sampling)
    prompt = checks.check_prompt(input_ids, SamplingParams(max_new_tokens=1), limits)
    if max_new_tokens is None:
        wanted = config.max_new_tokens if config.max_new_tokens is not None else checks.DEFAULT_NEW_TOKENS
        max_new_tokens = min(wanted, checks.most_new_tokens(len(prompt), limits))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    checks.check_prompt(prompt, params, limits)
    return UpstreamRequest(
        prompt_ids=prompt,
        max_new_tokens=params.max_new_tokens,
        stop_ids=checks.check_eos(eos_token_id if eos_token_id is not None else config.eos_token_id),
        rows=[replace(row, sample_index=row.sample_index + n) for n in range(config.num_return_sequences or 1)],
    )


def check_row(row: SamplingRow) -> SamplingRow:
    """The row with plain numbers; InvalidRequestError for what cannot work."""
    params = SamplingParams(temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, seed=row.seed)
    return SamplingRow(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        sample_index=checks.check_sample_index(row.sample_index),
    )


def _row_given(config: GenerationConfig, given: Mapping[str, Any]) -> SamplingRow:
    """What a request is sampled by: its own arguments, else the generation config's, whose do_sample=False is greedy."""
    names = ("temperature", "top_k", "top_p")
    if config.do_sample or not given.keys().isdisjoint(names):
        defaults = {name: value for name in names if (value := getattr(config, name)) is not None}
    else:
        defaults = {"temperature": 0.0}
    try:
        return check_row(SamplingRow(**{**defaults, **given}))
    except TypeError:
        raise InvalidRequestError(
            f"a request has temperature, top_k, top_p, seed and sample_index of its own, got {sorted(given)}"
        ) from None

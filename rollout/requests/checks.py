"""Checks a request before anybody else sees it: upstream's loop dies of what it does not expect, and takes every other
request with it."""

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.errors import EngineStaleError, InvalidRequestError
from rollout.types import FinishReason, Rollout, SamplingParams

DEFAULT_NEW_TOKENS = 256
"""Where upstream's own methods are given no limit: their None is unbounded, and the loop dies when the cache is full."""
LONGEST_LIMIT_S = 1e9
"""Thirty years: no wait of ours goes beyond what the platform's clocks can express."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine can take."""

    vocab_size: int
    max_request_tokens: int  # of one request in the KV cache
    max_positions: int | None  # of the model; None: unlimited
    eos_ids: tuple[int, ...]  # what stop_token_ids=None stands for


def limits_of(model: PreTrainedModel, *, max_request_tokens: int) -> Limits:
    """The limits of an engine over `model` whose cache holds `max_request_tokens` for one request."""
    return Limits(
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_request_tokens=max_request_tokens,
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        eos_ids=_eos_ids(model),
    )


def check_params(params: Any) -> SamplingParams:
    """SamplingParams; None stands for the defaults."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams(...) or None, got {params!r:.80}")
    return params


def check_prompt(prompt_ids: Any, params: SamplingParams, limits: Limits) -> list[int]:
    """The prompt as a list of ints, or InvalidRequestError. Takes a sequence of integers, a 1-D tensor or array."""
    ids = _as_list(prompt_ids)
    if not ids:
        raise InvalidRequestError("the prompt is empty; it needs at least one token (the BOS id, say)")
    ids = _token_ids("prompt_ids", ids, limits)
    _check_length(len(ids), params.max_new_tokens, limits)
    return ids


def check_prompts(prompts: Any) -> list[Any]:
    """Several prompts as a list; each is yet to be checked."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, (Iterable, torch.Tensor)):
        raise InvalidRequestError(f"prompts must be a list of prompts, got {type(prompts).__name__} ({prompts!r:.60})")
    return list(prompts)


def check_stop_ids(params: SamplingParams, limits: Limits) -> tuple[int, ...]:
    """The ids that end the request. InvalidRequestError for one that can never be sampled."""
    if params.stop_token_ids is None:
        return limits.eos_ids
    for token in params.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequestError(
                f"stop token id {token} is outside the model's vocabulary of {limits.vocab_size} ids and would never stop "
                "anything; is this the model's own tokenizer?"
            )
    return tuple(params.stop_token_ids)


def check_eos(eos_token_id: Any) -> tuple[int, ...]:
    """Upstream's form of it: None, one id or several; negative ones stand for none."""
    ids = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, numbers.Number) else eos_token_id
    try:
        return tuple(number for number in map(operator.index, ids) if number >= 0)
    except TypeError:
        raise InvalidRequestError(
            f"eos_token_id must be a token id, a list of them or None, got {eos_token_id!r}"
        ) from None


def most_new_tokens(prompt_len: int, limits: Limits) -> int:
    """How many tokens a prompt of that length can be continued with; below 1 if it is too long by itself."""
    places = limits.max_request_tokens
    if limits.max_positions is not None:
        places = min(places, limits.max_positions)
    return places - prompt_len + 1


def check_stop_strings(params: SamplingParams, tokenizer: Any) -> None:
    """Stop strings need somebody who turns tokens into text, and text that they leave in it."""
    if params.stop and tokenizer is None:
        raise InvalidRequestError(
            f"stop={params.stop!r} needs the text of the tokens: give the engine a tokenizer, or use stop_token_ids"
        )
    if params.stop and isinstance(tokenizer, PreTrainedTokenizerBase):
        for token_id, token in tokenizer.added_tokens_decoder.items():
            for text in params.stop:
                if token.special and token.content in text:
                    raise InvalidRequestError(
                        f"the stop string {text!r} has the special token {token.content!r} in it, which is no part of a "
                        f"rollout's text, so it would never be found: use stop_token_ids=[{token_id}], with the model's "
                        "own EOS ids beside it if those are to stop it too"
                    )


def check_partial(partial: Any, prompt_ids: list[int], params: SamplingParams, limits: Limits) -> Rollout | None:
    """A rollout that can go on, with tokens left to generate. It comes from anywhere, so its tokens are checked as a
    prompt's are; what is returned shares no list with it."""
    if partial is None:
        return None
    if not isinstance(partial, Rollout):
        raise InvalidRequestError(f"resume_from must be a Rollout, got {type(partial).__name__}")
    if list(partial.prompt_ids) != prompt_ids:
        raise InvalidRequestError(
            f"rollout {partial.rollout_id} is of another prompt; resume it with its own prompt_ids"
        )
    if partial.finish_reason == FinishReason.STOP:
        raise InvalidRequestError(
            f"rollout {partial.rollout_id} has ended by itself (STOP); there is nothing to resume"
        )
    if len(partial.token_ids) >= params.max_new_tokens:
        raise InvalidRequestError(
            f"rollout {partial.rollout_id} has {len(partial.token_ids)} tokens already, max_new_tokens="
            f"{params.max_new_tokens} counts them in; raise it to go on"
        )
    return replace(
        partial,
        token_ids=_token_ids("resume_from.token_ids", partial.token_ids, limits),
        logprobs=_logprobs("resume_from.logprobs", partial.logprobs),
        loss_mask=list(partial.loss_mask),
        version_spans=list(partial.version_spans),
    )


def check_not_newer(partial: Rollout | None, version: int) -> None:
    """EngineStaleError unless its newest token's version has come to this engine: it will, or another engine has it."""
    newest = None if partial is None else partial.max_version
    if newest is not None and newest > version:
        raise EngineStaleError(
            f"the rollout to resume has tokens of version {newest}, this engine is at {version}; update the engine first"
        )


def check_label(name: str, value: Any) -> str | None:
    """A request, group or prompt id: a non-empty string or None."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise InvalidRequestError(f"{name} must be a non-empty string or None, got {value!r}")


def check_timeout(timeout_s: Any) -> float | None:
    """A positive number of seconds or None."""
    return None if timeout_s is None else check_limit(timeout_s, " or None for no limit")


def check_limit(timeout_s: Any, otherwise: str = "") -> float:
    """A positive number of seconds that a clock can wait; `otherwise` completes the message."""
    number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= LONGEST_LIMIT_S:
        raise InvalidRequestError(
            f"timeout_s must be a positive, finite number of seconds{otherwise}, got {timeout_s!r}"
        )
    return float(timeout_s)


def check_size(size: Any) -> int:
    """The number of samples of a group: an integer of at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidRequestError(f"size must be an integer of at least 1, got {size!r}")
    return size


def check_sample_index(sample_index: Any) -> int:
    """A non-negative integer."""
    number = isinstance(sample_index, numbers.Integral) and not isinstance(sample_index, bool)
    if not number or not 0 <= sample_index < 2**63:
        raise InvalidRequestError(f"sample_index must be a non-negative integer below 2**63, got {sample_index!r}")
    return int(sample_index)


def check_metadata(metadata: Any) -> Mapping[str, Any]:
    """A copy of a mapping, which the caller may go on changing; None stands for an empty one."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidRequestError(f"metadata must be a dict or None, got {type(metadata).__name__}")
    return dict(metadata)


def _token_ids(name: str, tokens: Sequence[Any], limits: Limits) -> list[int]:
    ids: list[int] = []
    for position, token in enumerate(tokens):
        if isinstance(token, bool):
            raise InvalidRequestError(f"{name}[{position}] is {token!r}, not a token id")
        try:
            number = operator.index(token)
        except TypeError:
            raise InvalidRequestError(
                f"{name}[{position}] is {token!r} ({type(token).__name__}), not a token id; pass one flat list of "
                "ints, one prompt a call"
            ) from None
        if not 0 <= number < limits.vocab_size:
            raise InvalidRequestError(
                f"{name}[{position}] is {number}, outside the model's vocabulary of {limits.vocab_size} ids; is "
                "this the model's own tokenizer?"
            )
        ids.append(number)
    return ids


def _logprobs(name: str, values: Sequence[Any]) -> list[float]:
    for position, value in enumerate(values):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise InvalidRequestError(
                f"{name}[{position}] is {value!r}, not a log-probability; resume what precedes it"
            )
    return [float(value) for value in values]


def _as_list(prompt_ids: Any) -> list[Any]:
    if isinstance(prompt_ids, (str, bytes, bytearray, memoryview)):
        shown = prompt_ids[:40] if isinstance(prompt_ids, str) else bytes(prompt_ids[:40])
        raise InvalidRequestError(f"the prompt is text ({shown!r}); encode it with the tokenizer first")
    if isinstance(prompt_ids, (torch.Tensor, np.ndarray)):
        if prompt_ids.ndim != 1:
            raise InvalidRequestError(
                f"the prompt has shape {tuple(prompt_ids.shape)}; pass one prompt a call, as a 1-D tensor (drop the "
                "batch dimension)"
            )
        try:
            values: list[Any] = prompt_ids.tolist()
        except RuntimeError as error:
            raise InvalidRequestError(f"the prompt's values cannot be read ({error}); pass a list of ints") from None
        return values
    if isinstance(prompt_ids, Sequence):
        return list(prompt_ids)
    hint = '; pass its ["input_ids"]' if isinstance(prompt_ids, Mapping) and "input_ids" in prompt_ids else ""
    raise InvalidRequestError(
        f"prompt_ids must be a flat list of token ids, got {type(prompt_ids).__name__} ({prompt_ids!r:.60}){hint}"
    )


def _check_length(prompt_len: int, max_new_tokens: int, limits: Limits) -> None:
    # the last token is sampled but never processed, so it needs neither a place in the cache nor a position
    needed = prompt_len + max_new_tokens - 1
    if needed > limits.max_request_tokens:
        raise InvalidRequestError(
            f"{prompt_len} prompt tokens + max_new_tokens={max_new_tokens} need {needed} places in the KV cache, which "
            f"holds {limits.max_request_tokens} for one request; lower max_new_tokens or raise EngineConfig.num_blocks"
        )
    if limits.max_positions is not None and needed > limits.max_positions:
        raise InvalidRequestError(
            f"{prompt_len} prompt tokens + max_new_tokens={max_new_tokens} reach position {needed}, beyond the model's "
            f"{limits.max_positions}; lower max_new_tokens or shorten the prompt"
        )


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """What the model itself stops at: its generation config's EOS ids, else its config's; () if it has none."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return check_eos(eos)

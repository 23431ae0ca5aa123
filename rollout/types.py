"""What goes in and what comes out: sampling parameters, version spans and rollouts."""

import enum
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.errors import InvalidRequestError


class FinishReason(enum.StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """A stop token (kept as the last token) or a stop string was reached."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    ABORT = "abort"
    """Cancelled, or the engine was stopped; the rollout holds what there was."""
    TIMEOUT = "timeout"
    """Its `timeout_s` ran out; the rollout holds what there was."""
    ERROR = "error"
    """The engine failed under it; `Rollout.error` says why and the rollout holds what there was."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Checked at construction; a value that cannot work raises InvalidRequestError."""

    max_new_tokens: int = 256
    """Upper bound on generated tokens, the stop token included; at least 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy (and then log-probs are those of the unscaled distribution)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]; 1 is off."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the rollout; None: the model's own EOS ids; (): never stops before max_new_tokens."""
    stop: Sequence[str] = ()
    """Strings that end the rollout. The token that completes one is the last; `Rollout.text` is cut before it. Needs an
    engine with a tokenizer. Special tokens are no text: stop at them by `stop_token_ids`."""
    seed: int | None = None
    """With a seed, the randomness of each token depends on (seed, sample index, position) alone, so that another
    batch or a resume draws the same; None: the engine's own generator."""

    def __post_init__(self) -> None:
        _set(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, at_least=1))
        _set(self, "temperature", _real("temperature", self.temperature))
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature must be at least 0 (0 is greedy), got {self.temperature}")
        if 0 < self.temperature < 1e-3:
            raise InvalidRequestError(
                f"temperature {self.temperature} would overflow the logits; use 0 for greedy or at least 0.001"
            )
        _set(self, "top_k", _integer("top_k", self.top_k, at_least=0))
        _set(self, "top_p", _real("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must be in (0, 1] (1 is off), got {self.top_p}")
        if self.stop_token_ids is not None:
            text = isinstance(self.stop_token_ids, (str, bytes, bytearray, memoryview))
            if text or not isinstance(self.stop_token_ids, Sequence):
                raise InvalidRequestError(
                    f"stop_token_ids must be a list of token ids, None or (), got {self.stop_token_ids!r}"
                )
            ids = tuple(_integer("a stop token id", token, at_least=0) for token in self.stop_token_ids)
            _set(self, "stop_token_ids", ids)
        texts = self.stop if isinstance(self.stop, (list, tuple)) else (None,)
        if any(not isinstance(text, str) or not text for text in texts):
            raise InvalidRequestError(f"stop must be a list of non-empty strings, got {self.stop!r}")
        _set(self, "stop", tuple(self.stop))
        if self.seed is not None:
            _set(self, "seed", _integer("seed", self.seed, at_least=0, below=2**63))


@dataclass(frozen=True)
class VersionSpan:
    """`token_ids[start:]` were sampled under policy `version`, until the next span."""

    start: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Timings:
    """When things happened to one request, in seconds since the epoch."""

    submitted_at: float
    started_at: float | None
    """When its first prefill was scheduled; None if it never was."""
    finished_at: float | None
    """None in a snapshot."""


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled continuation of one prompt, with the policy version of each of its tokens.

    Lengths agree, spans start at 0 and increase: checked at construction with ValueError.
    """

    rollout_id: str
    group_id: str | None = None
    prompt_id: str | None = None
    sample_index: int = 0
    attempt: int = 0
    prompt_ids: list[int]  # [prompt_len]
    token_ids: list[int]  # [num_tokens], the stop token included
    logprobs: list[float]  # [num_tokens], of each token under the distribution it was sampled from
    loss_mask: list[int]  # [num_tokens], 1 where a token counts in the loss
    version_spans: list[VersionSpan]
    prefill_version: int | None
    """The engine's version when its first prefill ran: the oldest weights behind the KV that any of its tokens was sampled
    from. A prefill that runs again, after a preemption, under `kv_at_update="refresh"` or with `resume_from`, runs under
    newer ones and changes nothing, unless there was no token yet. If all its tokens are of this version, their log-probs are
    those of a plain forward under it. None: it never ran."""
    finish_reason: FinishReason | None
    """None in a snapshot of a rollout that is still in flight."""
    reward: float | None = None
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    worker_id: str | None = None
    stop_string: str | None = None
    """The stop string that its text ends with; None if something else ended it."""
    renormalised: bool = False
    """Its log-probs are those over the tokens that top-k or top-p kept, so a trainer's full softmax gives smaller ones."""
    num_reprefills: int = 0
    """How often its KV cache was dropped for want of room and computed again."""
    timings: Timings | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or len(self.loss_mask) != n:
            raise ValueError(
                f"rollout {self.rollout_id}: {n} token_ids, {len(self.logprobs)} logprobs and "
                f"{len(self.loss_mask)} loss_mask entries must be equally many"
            )
        check_spans(self.version_spans, n)

    @property
    def versions(self) -> list[int]:
        """The policy version of each token: [num_tokens]."""
        versions: list[int] = []
        for span in reversed(self.version_spans):
            versions[:0] = [span.version] * (len(self.token_ids) - len(versions) - span.start)
        return versions

    @property
    def min_version(self) -> int | None:
        """The oldest version among its tokens; None without tokens."""
        return self.version_spans[0].version if self.version_spans else None

    @property
    def max_version(self) -> int | None:
        """The newest version among its tokens; None without tokens."""
        return self.version_spans[-1].version if self.version_spans else None

    @property
    def has_ended_well(self) -> bool:
        """Whether it came to its end: STOP or LENGTH, rather than being broken off."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def spans_update(self) -> bool:
        """Whether an update met it in flight: its KV cache and its tokens, or its tokens alone, are of more than one version.
        A prompt may be prefilled under one version and all of its tokens be sampled under the next."""
        return len({self.prefill_version, *(span.version for span in self.version_spans)}) > 1

    def text(self, tokenizer: Decoder) -> str:
        """The tokens as text, special tokens left out, cut before the stop string. For reading and rewards: ids, not text,
        go to the trainer."""
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return text if self.stop_string is None else text.partition(self.stop_string)[0]


def check_spans(spans: Sequence[VersionSpan], num_tokens: int) -> None:
    """Spans cover [0, num_tokens): the first starts at 0, starts and versions increase, none is empty. ValueError."""
    if not spans and num_tokens:
        raise ValueError(f"{num_tokens} tokens without a version span")
    if spans and spans[0].start != 0:
        raise ValueError(f"the first version span must start at 0, got {spans[0]}")
    for left, right in itertools.pairwise(spans):
        if right.start <= left.start or right.version <= left.version:
            raise ValueError(f"version spans must increase in start and version, got {left} then {right}")
    if spans and spans[-1].start >= num_tokens:
        raise ValueError(f"version span {spans[-1]} starts beyond the {num_tokens} tokens there are")


def _set(instance: object, name: str, value: object) -> None:
    object.__setattr__(instance, name, value)


def _integer(name: str, value: Any, *, at_least: int, below: int | None = None) -> int:
    if isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}") from None
    if number < at_least or (below is not None and number >= below):
        limit = f"at least {at_least}" + (f" and below {below}" if below is not None else "")
        raise InvalidRequestError(f"{name} must be {limit}, got {number}")
    return number


def _real(name: str, value: Any) -> float:
    if isinstance(value, (bool, str, bytes, bytearray)):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be finite, got {number}")
    return number

"""A request between submit and its one result: which version sampled which token, and the rollout that comes of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.model.sampling import SamplingRow
from rollout.requests.delivery import RolloutFuture, TokenStream
from rollout.types import FinishReason, Rollout, Timings, VersionSpan


def stamp(spans: list[VersionSpan], num_sampled: int, version: int) -> list[VersionSpan]:
    """The spans after a version change with `num_sampled` tokens sampled before it."""
    kept = [span for span in spans if span.start < num_sampled]
    return [*kept, VersionSpan(num_sampled, version)]


def continued(spans: Sequence[VersionSpan], num_tokens: int, version: int) -> list[VersionSpan]:
    """The spans of a partial rollout of `num_tokens` tokens that goes on under `version`."""
    if spans and spans[-1].version == version:
        return list(spans)
    return stamp(list(spans), num_tokens, version)


def trim(spans: Sequence[VersionSpan], num_tokens: int) -> list[VersionSpan]:
    """The spans of the first `num_tokens` tokens."""
    return [span for span in spans if span.start < num_tokens]


def group_keys(leader: str, size: int) -> list[str]:
    """The manager's ids of a group: the one that prefills, and those that upstream forks from it."""
    return [leader, *(f"{leader}{FORK}{number}" for number in range(size - 1))]


FORK = "__child#"


@dataclass(kw_only=True, eq=False)
class InFlight:
    """One request, as the engine knows it. Guarded by the engine's lock."""

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: Sequence[int]
    row: SamplingRow
    group_id: str | None
    prompt_id: str | None
    sample_index: int
    metadata: Mapping[str, Any]
    future: RolloutFuture
    version: int  # the version that its next token will be sampled under
    spans: list[VersionSpan] = field(default_factory=list)
    arrival: int = 0  # its group's place in the order of arrival
    # Its id in the manager, once it is there. Never used twice: upstream confuses a reused id with its predecessor.
    key: str | None = None
    started_at: float | None = None
    resumed: Rollout | None = None  # what it had when it came
    stop: Sequence[str] = ()
    stream: TokenStream | None = None
    prefill_version: int = 0
    num_reprefills: int = 0
    ending: FinishReason | None = None  # ABORT or TIMEOUT, once somebody has asked for its end
    submitted_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.spans = [VersionSpan(0, self.version)]
        if self.resumed is not None:
            self.spans = continued(self.resumed.version_spans, len(self.resumed.token_ids), self.version)
        self.prefill_version = self.version
        if self.token_ids_before and self.resumed is not None and self.resumed.prefill_version is not None:
            self.prefill_version = self.resumed.prefill_version

    def at_update(self, version: int, *, has_old_kv: bool, num_sampled: int) -> None:
        """A new version takes over with `num_sampled` tokens sampled before it; `has_old_kv`: KV of the version before stands
        behind what is sampled next."""
        if not has_old_kv and num_sampled == 0:
            self.prefill_version = version
        self.spans = stamp(self.spans, num_sampled, version)

    @property
    def token_ids_before(self) -> list[int]:
        """The tokens that it came with."""
        return [] if self.resumed is None else self.resumed.token_ids

    @property
    def logprobs_before(self) -> list[float]:
        """Their log-probs."""
        return [] if self.resumed is None else self.resumed.logprobs

    def _prefill_version_so_far(self) -> int | None:
        if self.started_at is not None:
            return self.prefill_version
        return self.resumed.prefill_version if self.resumed is not None and self.token_ids_before else None

    def rollout(
        self,
        *,
        token_ids: list[int],
        logprobs: list[float],
        finish_reason: FinishReason | None,
        error: str | None = None,
        stop_string: str | None = None,
    ) -> Rollout:
        """Its rollout as of now; without a finish reason it is still in flight."""
        return Rollout(
            rollout_id=self.request_id,
            group_id=self.group_id,
            prompt_id=self.prompt_id,
            sample_index=self.sample_index,
            attempt=0 if self.resumed is None else self.resumed.attempt + 1,
            prompt_ids=list(self.prompt_ids),  # the manager goes on reading its own
            token_ids=token_ids,
            logprobs=logprobs,
            loss_mask=[1] * len(token_ids),
            version_spans=trim(self.spans, len(token_ids)),
            prefill_version=self._prefill_version_so_far(),
            finish_reason=finish_reason,
            error=error,
            metadata=self.metadata,
            stop_string=stop_string,
            renormalised=self.row.temperature > 0 and (self.row.top_k > 0 or self.row.top_p < 1),
            num_reprefills=self.num_reprefills,
            timings=Timings(
                submitted_at=self.submitted_at,
                started_at=self.started_at,
                finished_at=None if finish_reason is None else time.time(),
            ),
        )

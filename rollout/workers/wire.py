"""What goes to a worker and what comes back, and the compact form in which it travels.

A request's metadata travels as bytes that the worker keeps and sends back unread: it may hold what the worker cannot
import, and costs nothing there. Results travel together, as a few flat arrays.
"""

import enum
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequestError, RolloutError
from rollout.requests import checks
from rollout.status import EngineStats
from rollout.types import Rollout, SamplingParams, VersionSpan


class WorkerState(enum.StrEnum):
    """How a worker stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Nothing was heard of it for `suspect_after_s`: stopped, overloaded or cut off. It may come back by itself."""
    DEAD = "dead"
    """Its process has ended, or its engine died more often than it may be restarted."""
    RESTARTING = "restarting"
    """A new incarnation is being made, or its engine's loop died and is being restarted in place."""
    STALE = "stale"
    """Its engine lacks the version that it must serve from, or is fenced: it takes no request until a publish reaches it."""


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One request to a worker, or with `size` above 1 a group of samples, prefilled once and named `request_id-0`,
    `request_id-1` and so on. Fields as in `GenerationEngine.submit`; the engine checks them there, item by item."""

    request_id: str
    prompt_ids: Sequence[int]  # [prompt_len]
    params: SamplingParams = field(default_factory=SamplingParams)
    attempt: int = 0
    """Which try of this request it is; its results carry it. The same (request_id, attempt) again is taken only once."""
    size: int = 1
    group_id: str | None = None
    prompt_id: str | None = None
    sample_index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    """Seconds from when the worker takes it."""
    resume_from: Rollout | None = None

    @property
    def request_ids(self) -> list[str]:
        """Those of its samples, by which their results and cancels go."""
        return [self.request_id] if self.size == 1 else [f"{self.request_id}-{n}" for n in range(self.size)]

    def __post_init__(self) -> None:
        if checks.check_label("request_id", self.request_id) is None:
            raise InvalidRequestError("request_id must be a non-empty string, got None")
        if isinstance(self.attempt, bool) or not isinstance(self.attempt, int) or self.attempt < 0:
            raise InvalidRequestError(f"attempt must be an integer of at least 0, got {self.attempt!r}")
        if checks.check_size(self.size) > 1 and self.resume_from is not None:
            raise InvalidRequestError(
                f"a group (size={self.size}) cannot resume from one rollout; submit its samples one by one"
            )


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The one result of one accepted request."""

    rollout: Rollout
    """Its `attempt` is that of the item, its `worker_id` that of the worker."""
    attempt: int
    incarnation: int
    """Of the worker that made it."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An item of a batch that the worker did not take; it will have no result."""

    position: int
    """In the batch."""
    request_id: str
    error: RolloutError
    """InvalidRequestError: it can never work; WorkerBusyError, WorkerStaleError, EngineStateError: not now, not here."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says about itself."""

    state: WorkerState
    version: int
    engine: EngineStats


@dataclass(frozen=True, kw_only=True)
class WorkerHealth:
    """How a worker stands, as far as this handle has heard."""

    worker_id: str
    state: WorkerState
    incarnation: int
    version: int
    """The engine's, when it was last heard of."""
    serve_from_version: int
    """It takes no request below it."""
    pid: int
    node_id: str
    engine: EngineStats | None
    """None: not heard yet."""
    heartbeat_age_s: float
    """Since it was last heard of."""
    reason: str | None
    """Why it is DEAD."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """An item on its way to a worker."""

    position: int
    request_id: str
    attempt: int
    size: int
    item: bytes
    metadata: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Several results on their way back."""

    headers: "list[Header]"
    token_ids: npt.NDArray[np.int32]  # each result's prompt, then its tokens, one result after the other
    logprobs: npt.NDArray[np.float32]  # one for each token
    loss_mask: npt.NDArray[np.uint8]  # one for each token
    spans: npt.NDArray[np.int64]  # [num_spans, 2]: start, version


@dataclass(frozen=True, kw_only=True)
class Header:
    """What of one result is not in the arrays."""

    rollout: Rollout  # without what is in the arrays, and without metadata
    metadata: bytes
    attempt: int
    incarnation: int
    prompt_len: int
    num_tokens: int
    num_spans: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A result in the worker, its metadata unread."""

    finished: Finished
    metadata: bytes


def to_parcel(position: int, item: WorkItem) -> Parcel:
    """InvalidRequestError for what cannot be sent."""
    metadata, partial = item.metadata, item.resume_from
    if partial is not None:
        metadata, partial = metadata or partial.metadata, replace(partial, metadata={})
    try:
        return Parcel(
            position=position,
            request_id=item.request_id,
            attempt=item.attempt,
            size=item.size,
            item=pickle.dumps(replace(item, metadata={}, resume_from=partial), pickle.HIGHEST_PROTOCOL),
            metadata=_readable(checks.check_metadata(metadata)),
        )
    except InvalidRequestError:
        raise
    except Exception as error:  # an object's own pickling may raise anything, and one bad item must not stop the others
        raise InvalidRequestError(
            f"request {item.request_id!r} cannot be sent to a worker ({error}); its prompt and metadata must be plain data"
        ) from error


def _readable(metadata: Mapping[str, Any]) -> bytes:
    packed = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
    if metadata:
        pickle.loads(packed)  # what cannot be read again would take the results beside it along
    return packed


def from_parcel(parcel: Parcel) -> WorkItem:
    """In the worker, its metadata left out. InvalidRequestError for what cannot be read there."""
    try:
        item = pickle.loads(parcel.item)
    except Exception as error:  # as above
        raise InvalidRequestError(
            f"request {parcel.request_id!r} cannot be read in the worker ({error}); its prompt must be plain data"
        ) from error
    assert isinstance(item, WorkItem)
    return item


def pack(results: Sequence[Kept]) -> Batch:
    """Results as flat arrays. Log-probs travel in float32, as the engine computed them."""
    rollouts = [kept.finished.rollout for kept in results]
    return Batch(
        headers=[
            Header(
                rollout=replace(
                    rollout, prompt_ids=[], token_ids=[], logprobs=[], loss_mask=[], version_spans=[], metadata={}
                ),
                metadata=kept.metadata,
                attempt=kept.finished.attempt,
                incarnation=kept.finished.incarnation,
                prompt_len=len(rollout.prompt_ids),
                num_tokens=len(rollout.token_ids),
                num_spans=len(rollout.version_spans),
            )
            for kept, rollout in zip(results, rollouts, strict=True)
        ],
        token_ids=np.array([id_ for r in rollouts for ids in (r.prompt_ids, r.token_ids) for id_ in ids], np.int32),
        logprobs=np.array([value for r in rollouts for value in r.logprobs], np.float32),
        loss_mask=np.array([value for r in rollouts for value in r.loss_mask], np.uint8),
        spans=np.array([(s.start, s.version) for r in rollouts for s in r.version_spans], np.int64).reshape(-1, 2),
    )


def unpack(batch: Batch) -> list[Finished]:
    """The inverse of `pack`."""
    results: list[Finished] = []
    at = token = span = 0
    for header in batch.headers:
        n, prompt_end = header.num_tokens, at + header.prompt_len
        rollout = replace(
            header.rollout,
            prompt_ids=batch.token_ids[at:prompt_end].tolist(),
            token_ids=batch.token_ids[prompt_end : prompt_end + n].tolist(),
            logprobs=batch.logprobs[token : token + n].tolist(),
            loss_mask=batch.loss_mask[token : token + n].tolist(),
            version_spans=[VersionSpan(*row) for row in batch.spans[span : span + header.num_spans].tolist()],
            metadata=pickle.loads(header.metadata),
        )
        at, token, span = prompt_end + n, token + n, span + header.num_spans
        results.append(Finished(rollout=rollout, attempt=header.attempt, incarnation=header.incarnation))
    return results

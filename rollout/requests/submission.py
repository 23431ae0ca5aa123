"""What was asked for by submit, stream or submit_group, checked; and the requests that come of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.model.sampling import SamplingRow
from rollout.requests import checks
from rollout.requests.delivery import RolloutFuture, TokenStream
from rollout.requests.inflight import InFlight
from rollout.types import Rollout, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One prompt and how it is to be continued, `size` times."""

    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: Sequence[int]
    size: int
    is_group: bool
    request_id: str | None
    group_id: str | None
    prompt_id: str | None
    sample_index: int
    metadata: Mapping[str, Any]
    partial: Rollout | None
    stream: TokenStream | None

    def requests(self, key: str, version: int, abort: Callable[[InFlight], bool]) -> list[InFlight]:
        """Its requests, on an engine of that version; `key` names what has no name. Their futures' cancel is `abort`.
        EngineStaleError if the rollout to resume is newer than the engine."""
        checks.check_not_newer(self.partial, version)
        name = self.request_id if self.request_id is not None else key
        group_id = self.group_id if self.group_id is not None or not self.is_group else name
        return [
            self._request(f"{name}-{n}" if self.is_group else name, group_id, self.sample_index + n, version, abort)
            for n in range(self.size)
        ]

    def _request(
        self, name: str, group_id: str | None, sample_index: int, version: int, abort: Callable[[InFlight], bool]
    ) -> InFlight:
        request = InFlight(
            request_id=name,
            prompt_ids=self.prompt_ids,
            max_new_tokens=self.params.max_new_tokens,
            stop_ids=self.stop_ids,
            stop=self.params.stop,
            row=SamplingRow(
                temperature=self.params.temperature,
                top_k=self.params.top_k,
                top_p=self.params.top_p,
                seed=self.params.seed,
                sample_index=sample_index,
            ),
            group_id=group_id,
            prompt_id=self.prompt_id,
            sample_index=sample_index,
            metadata=self.metadata,
            future=RolloutFuture(name, lambda: abort(request)),
            version=version,
            resumed=self.partial,
            stream=self.stream,
        )
        return request


def check_submission(
    prompt_ids: Any,
    params: Any,
    *,
    limits: checks.Limits,
    tokenizer: Any,
    size: int,
    request_id: Any,
    group_id: Any,
    prompt_id: Any,
    sample_index: Any,
    metadata: Any,
    is_group: bool,
    resume_from: Any,
    stream: TokenStream | None,
) -> Submission:
    """InvalidRequestError, naming the value and the remedy, for what cannot work. What is not given is the resumed rollout's."""
    params = checks.check_params(params)
    ids = checks.check_prompt(prompt_ids, params, limits)
    stop_ids = checks.check_stop_ids(params, limits)
    checks.check_stop_strings(params, tokenizer)
    partial = checks.check_partial(resume_from, ids, params, limits)
    request_id = checks.check_label("request_id", request_id)
    group_id = checks.check_label("group_id", group_id)
    prompt_id = checks.check_label("prompt_id", prompt_id)
    sample_index = checks.check_sample_index(sample_index)
    metadata = checks.check_metadata(metadata)
    if partial is not None:
        group_id, prompt_id = group_id or partial.group_id, prompt_id or partial.prompt_id
        sample_index, metadata = sample_index or partial.sample_index, metadata or partial.metadata
    return Submission(
        prompt_ids=ids,
        params=params,
        stop_ids=stop_ids,
        size=size,
        is_group=is_group,
        request_id=request_id,
        group_id=group_id,
        prompt_id=prompt_id,
        sample_index=sample_index,
        metadata=metadata,
        partial=partial,
        stream=stream,
    )

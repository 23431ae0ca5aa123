"""What an engine is asked to generate: the methods that take requests in, and end them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests import checks
from rollout.requests.delivery import RolloutFuture, TokenStream
from rollout.requests.inflight import InFlight
from rollout.requests.submission import check_submission
from rollout.requests.tracker import RequestTracker
from rollout.types import FinishReason, Rollout, SamplingParams


class RequestMethods(ABC):
    """This part of `GenerationEngine`; it does not start or stop anything."""

    tokenizer: Any
    _tracker: RequestTracker
    _limits: checks.Limits

    @abstractmethod
    def _check_running(self) -> None:
        """EngineStateError unless it takes requests."""

    @abstractmethod
    def _refuse_inside_update(self, what: str) -> None:
        """EngineStateError on a thread that is inside `update()`, where `what` would wait for itself."""

    def submit(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        group_id: str | None = None,
        prompt_id: str | None = None,
        sample_index: int = 0,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume_from: Rollout | None = None,
    ) -> RolloutFuture:
        """Queues one request; its future always resolves with a Rollout, whatever happens.

        `timeout_s` counts from now, waiting included; the rollout then ends with what it has (TIMEOUT). `request_id` must
        not be in flight already; None makes one up. Raises InvalidRequestError for what cannot work, EngineStateError
        when the engine is not running.

        `resume_from`: a partial rollout of this prompt, from here or elsewhere. The new one goes on after its tokens, with
        what is left of `max_new_tokens`, its spans and log-probs joined, and with a seed the same noise; its group_id,
        prompt_id, sample index and metadata are taken over where they are not given (a sample index of 0 counts as not
        given). Refused if its newest token is of a version that this engine does not have yet.
        """
        return self._submit(
            prompt_ids,
            params,
            size=1,
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            timeout_s=timeout_s,
            resume_from=resume_from,
        )[0]

    def stream(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> TokenStream:
        """Queues one request and gives its tokens as they come: `for token_id in engine.stream(prompt_ids): ...`. The
        iteration ends when the request does, however that is; `stream.result()` is its rollout. Leave early with
        `stream.close()` or a `with` block."""
        stream = TokenStream()
        (stream.future,) = self._submit(
            prompt_ids, params, size=1, request_id=request_id, timeout_s=timeout_s, stream=stream
        )
        return stream

    def submit_group(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        size: int,
        request_id: str | None = None,
        group_id: str | None = None,
        prompt_id: str | None = None,
        sample_index: int = 0,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutFuture]:
        """Queues `size` samples of one prompt, which is prefilled once. Like `submit`, except that the requests are named
        `request_id-0`, `request_id-1` and so on, their sample indices count up from `sample_index`, and their group_id, if
        none is given, is `request_id` or made up. Each can be cancelled alone.

        Requests start in the order in which they came: a group waits until all of it can run at once (one of more than
        `max_requests` samples: until nothing else runs), and what came after it waits behind it, so that no number of
        single requests keeps it from starting."""
        return self._submit(
            prompt_ids,
            params,
            size=checks.check_size(size),
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            timeout_s=timeout_s,
            is_group=True,
        )

    def cancel(self, request_id: str) -> None:
        """Ends a request: its future resolves with its partial rollout (ABORT). Raises InvalidRequestError if no request
        of that id is in flight, because it has ended or never was."""
        if not self._tracker.cancel(request_id):
            raise InvalidRequestError(f"no request {request_id!r} is in flight: it has ended, or was never submitted")

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        params: SamplingParams | None = None,
        *,
        progress_bar: bool = False,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """One rollout for each prompt, in their order. If one prompt cannot work, none is submitted. Each one's sample index
        is its position, so that with a seed equal prompts draw different noise."""
        self._refuse_inside_update("generate()")
        if self._tracker.is_delivering():
            raise EngineStateError("generate() in a future's callback would wait for itself; use submit() there")
        params = checks.check_params(params)
        prompts = checks.check_prompts(prompts)
        for number, prompt in enumerate(prompts):
            try:
                checks.check_prompt(prompt, params, self._limits)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {number}: {error}") from None
        futures: list[RolloutFuture] = []
        try:
            for number, prompt in enumerate(prompts):
                futures.append(self.submit(prompt, params, sample_index=number, timeout_s=timeout_s))
            shown = tqdm(futures, desc="rollouts", unit="rollout") if progress_bar else futures
            return [future.result() for future in shown]
        except BaseException:
            # an interrupted caller gets no results: what it asked for must not go on in its name
            for future in futures:
                future.cancel()
            raise

    def _submit(
        self,
        prompt_ids: Any,
        params: Any,
        *,
        size: int,
        request_id: Any = None,
        group_id: Any = None,
        prompt_id: Any = None,
        sample_index: Any = 0,
        metadata: Any = None,
        timeout_s: Any = None,
        is_group: bool = False,
        resume_from: Any = None,
        stream: TokenStream | None = None,
    ) -> list[RolloutFuture]:
        submission = check_submission(
            prompt_ids,
            params,
            limits=self._limits,
            tokenizer=self.tokenizer,
            size=size,
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            is_group=is_group,
            resume_from=resume_from,
            stream=stream,
        )
        timeout_s = checks.check_timeout(timeout_s)
        group = self._tracker.add(
            lambda key, version: submission.requests(key, version, self._abort),
            self._check_running,
            may_wait=lambda: self._refuse_inside_update("submit() of more than max_waiting"),
            timeout_s=timeout_s,
        )
        return [request.future for request in group]

    def _abort(self, request: InFlight) -> bool:
        return self._tracker.end_early(request, FinishReason.ABORT)

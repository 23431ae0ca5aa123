"""The generation loop's steps: the hold, the check of the weights before tokens are booked, stop strings, measuring."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from rollout.errors import EngineFencedError
from rollout.manager.router import NOT_NUMBERS
from rollout.meters import Meters
from rollout.requests.seams import LoopListener
from rollout.requests.stops import UNREADABLE, find_stop


class RolloutBatchProcessor(upstream.ContinuousBatchProcessor):  # type: ignore[misc]
    """Adds the hold, the check of the weights before tokens are booked, stop strings, and the measuring.

    Under asynchronous batching the next batch is launched before this one is booked, so that two are out at times. At a
    pause none is: all that has been sampled is booked before it begins, and what is counted, stamped, forgotten or computed
    again there is exact.
    """

    held: threading.Event
    listener: LoopListener
    meters: Meters
    autocast: Any
    decode: Callable[[list[int]], str] | None
    outstanding: set[int]  # the IO pairs whose batch has been launched and is not booked; without async there is only 0
    began_at: float  # perf_counter
    launched: (
        tuple[float, float, float, float] | None
    )  # prepare_s, forward_s, sample_s of this step, and when they ended

    def reset(self) -> None:
        super().reset()
        self.outstanding, self.launched = set(), None
        # the weights may have changed since the last session
        self.cache.forget_prefixes()
        self.cache.unshareable.clear()

    def book_outstanding(self) -> None:
        """Between two steps: books what has been launched."""
        ios = self.inputs_and_outputs
        if self.use_async_batching and self.outstanding:
            ios.swap_io_pairs()
            self.update_batch()
            ios.swap_io_pairs()

    def _update_tp_group_state(self) -> bool:
        # Called first in each iteration; a pause, if one is asked for, is spent in here. True: schedule nothing.
        stopping = bool(super()._update_tp_group_state())
        if self.held.is_set() and not stopping:
            status = self.background_thread_status
            if status.local_status == status.FLUSH_AND_STOP:
                # nothing that is in flight will ever end by itself
                status.request_stop(status.HARD_STOP, self.distributed_helper.global_rank)
            for state in self.scheduler.clear_cancelled_requests():
                self.offloading_manager.free_request_cpu_cache(state)
            return True
        if self.scheduler._requests_to_fork:
            # Nothing was booked since these were prefilled: scheduled again unforked, they would be split up.
            self.inputs_and_outputs.io_pairs[self._pair()].host_io.requests_in_batch = []
            super().update_batch()
        self.began_at = time.perf_counter()
        return stopping

    @torch.no_grad()
    def _generation_step(self, model: torch.nn.Module) -> None:
        launched_at = time.perf_counter()
        pair = self._pair()
        self.cache.plans.clear()
        self.model_runner.sample_s = 0.0
        with self.autocast:
            super()._generation_step(model)
        self.outstanding.add(pair)
        ended_at, sample_s = time.perf_counter(), self.model_runner.sample_s
        self.launched = (launched_at - self.began_at, ended_at - launched_at - sample_s, sample_s, ended_at)

    def update_batch(self) -> None:
        pair = self._pair()
        if pair in self.outstanding:  # else it was booked before a pause
            self.outstanding.discard(pair)
            self._book()
        if self.launched is not None:
            prepare_s, forward_s, sample_s, ended_at = self.launched
            deliver_s = time.perf_counter() - ended_at
            self.meters.step(prepare_s=prepare_s, forward_s=forward_s, sample_s=sample_s, deliver_s=deliver_s)
            self.launched = None

    def _book(self) -> None:
        # Waits until the batch has run. Only then does unchanged mean that it ran on these very weights.
        futures = self.inputs_and_outputs.prepare_batch_update()[0]
        ended = (RequestStatus.FINISHED, RequestStatus.PENDING)  # since they were scheduled
        num_tokens = sum(future.has_new_token and future.state.status not in ended for future in futures)
        changed = self.listener.on_step(num_tokens)
        if changed is not None:
            self._drop(changed)
            return
        super().update_batch()
        for state in list(self.scheduler.active_requests.values()):
            if not state.generated_tokens:
                continue
            if math.isnan(state.logprobs[-1]):
                self._end(state, error=NOT_NUMBERS)
            elif stop := state.logit_processor_kwargs.get("stop"):
                assert self.decode is not None
                # an evicted request's earlier tokens are part of its prompt by now
                before = state.initial_tokens[state._true_initial_tokens :] if state._true_initial_tokens else []
                try:
                    found = find_stop(before + state.generated_tokens, stop, self.decode)
                except Exception as error:  # the caller's tokenizer; the loop is everybody's
                    self._end(state, error=f"{UNREADABLE}: {error!r}")
                else:
                    if found is not None:
                        self._end(state)

    def _end(self, state: RequestState, *, error: str | None = None) -> None:
        """Ends a request between two steps, as finished or, with an error, as failed."""
        state.error = error
        state.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.scheduler.finish_request(state.request_id)
        self.scheduler.block_new_requests = False
        self.output_router.deliver(state.to_generation_output())
        state._status = RequestStatus.FINISHED  # a batch that is still out is not booked for it

    def _drop(self, reason: str) -> None:
        """Ends every request without the tokens that are out: they were sampled under weights that nobody vouches for."""
        self.held.set()
        self.outstanding.clear()
        self.scheduler._requests_to_fork.clear()
        self.fail_all_requests(EngineFencedError(f"the engine was fenced: {reason}"))

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        # upstream's takes the tokens of a request that waits, its KV in host memory, for none
        self.output_router.fail_and_deliver(state, error)

    def _pair(self) -> int:
        return int(self.inputs_and_outputs.current_pair) if self.use_async_batching else 0

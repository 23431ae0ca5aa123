"""The scheduler: no request is forgotten without a word, and none waits for ever."""

from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching import scheduler as upstream_scheduler
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from rollout.manager.states import unborn
from rollout.requests.inflight import FORK
from rollout.requests.seams import LoopListener

CANCELLED = "cancelled"


class TellsWhatHappens(upstream_scheduler.Scheduler):  # type: ignore[misc]
    """Upstream forgets cancelled requests without a word, and stays closed to new ones if the last that ran was one."""

    router: upstream.OutputRouter
    listener: LoopListener
    last_finished: RequestState | None = None
    last_was_unshareable = False
    unmatched: frozenset[str] = frozenset()  # cancels of unknown requests, to be tried once more

    def reset(self) -> None:
        super().reset()
        self.cancelled_unborn: set[str] = set()  # forks that are to be ended as soon as they exist

    def finish_request(self, request_id: str) -> None:
        if request_id in self.active_requests:
            self.last_finished = self.active_requests[request_id]
            self.last_was_unshareable = request_id in self.cache.unshareable
        super().finish_request(request_id)

    def add_waiting_request(self, state: RequestState) -> None:
        super().add_waiting_request(state)
        before = self.last_finished
        if before is None or before.request_id != state.request_id:
            return
        if state.is_cpu_offloaded:
            if self.last_was_unshareable:
                # it comes back with its KV of older weights; a soft reset is prefilled again, under those of then
                self.cache.unshareable.add(state.request_id)
        elif state._true_initial_tokens:
            self.start_again(before, state)

    def start_again(self, before: RequestState, again: RequestState) -> None:
        """A request starts again as `again`, with what upstream would forget of it."""
        again.created_time, again._timestamps = before.created_time, before._timestamps
        self.listener.on_preempted(again.request_id, before.lifespan[0])

    def _schedule_request(
        self,
        state: RequestState,
        request_tokens: list[int],
        token_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> None:
        if state.num_children > 0 and len(request_tokens) == 1:
            # Upstream keeps the last token for after the fork, and dies of a request that has no other.
            self._split(state)
        super()._schedule_request(state, request_tokens, token_budget, request_ids_to_remove_from_waiting)

    def clear_cancelled_requests(self) -> list[RequestState]:
        asked = frozenset(self._requests_to_cancel)
        known = self.active_requests.keys() | self.waiting_requests.keys()
        for request_id in asked & known:
            # what is to be forked from it goes on without it
            self._split(self.active_requests.get(request_id) or self.waiting_requests[request_id])
        for request_id in asked - known:
            parent = request_id.rpartition(FORK)[0]
            state = self.active_requests.get(parent) or self.waiting_requests.get(parent)
            if state is not None and request_id in unborn(state):
                self.cancelled_unborn.add(request_id)
                output = GenerationOutput(request_id=request_id, status=RequestStatus.FAILED, error=CANCELLED)
                self.router.deliver(output)
        born = self.cancelled_unborn & (self.active_requests.keys() | self.waiting_requests.keys())
        self.cancelled_unborn -= born
        self._requests_to_cancel |= born
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        # The loop drains new requests before cancels. One that came between the two, cancel and all, is not known yet
        # and would run on to its end; by the next step it is. Others have ended, and are not asked for a third time.
        unknown = asked.difference(state.request_id for state in cancelled) - self.cancelled_unborn
        self.unmatched = unknown - self.unmatched
        self._requests_to_cancel |= self.unmatched
        if cancelled:
            # only a finish reopens the queue after an eviction, and none may come any more
            self.block_new_requests = False
        for state in cancelled:
            state.status = RequestStatus.FAILED  # an end, told apart from a word of a stream
            state.error = CANCELLED
            self.router.deliver(state.to_generation_output())
            # a batch that is still out is not booked for it
            state._status = RequestStatus.FINISHED
        return cancelled

    def _split(self, state: RequestState) -> None:
        """What would be forked from `state` becomes requests that wait, each to be prefilled by itself."""
        for request_id in unborn(state):
            child = state.create_equivalent_initial_request()
            child.request_id = request_id
            child.num_children = 0
            child._true_initial_tokens = state._true_initial_tokens
            self.add_waiting_request(child)
        state.num_children = 0


class _Fifo(TellsWhatHappens, upstream_scheduler.FIFOScheduler):  # type: ignore[misc]
    pass


class _PrefillFirst(TellsWhatHappens, upstream_scheduler.PrefillFirstScheduler):  # type: ignore[misc]
    pass


OUR_SCHEDULERS = {"fifo": "rollsync_fifo", "prefill_first": "rollsync_prefill_first"}
upstream_scheduler.SCHEDULER_MAPPING.update(rollsync_fifo=_Fifo, rollsync_prefill_first=_PrefillFirst)

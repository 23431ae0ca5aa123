"""What is known of a request between two steps."""

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from rollout.requests.inflight import FORK
from rollout.requests.seams import Progress


def progress_of(state: RequestState) -> Progress:
    """How far it is. Right at a pause, whatever has been booked."""
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    # The token after the last processed position has been sampled; during the prefill that is still the prompt. Booked
    # or not makes no difference, which keeps this right under asynchronous batching too.
    reached = state.position_offset + 1 if state.position_offset else 0
    sampled = max(reached, len(state.initial_tokens)) - prompt
    started = state.position_offset > 0 or state.status != RequestStatus.PENDING
    return Progress(started=started, num_sampled=sampled)


def unborn(state: RequestState) -> list[str]:
    """The ids of the requests that are still to be forked from `state`."""
    return [f"{state.request_id}{FORK}{number}" for number in range(state.num_children)]

"""What the loop has of a request, and the rollout that it makes."""

import math
import time
from typing import TYPE_CHECKING

from rollout.requests.inflight import InFlight
from rollout.types import FinishReason, Rollout

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

CLOCKS_APART_S = 1e-4
LOOKS = 10


def rollout_of(
    request: InFlight,
    output: "GenerationOutput | None",
    reason: FinishReason | None,
    error: str | None = None,
    stop_string: str | None = None,
) -> Rollout:
    """As of now, with the tokens of `output`; None: it has not been with the loop, or has nothing there yet."""
    if output is None:
        before, logprobs = request.token_ids_before, request.logprobs_before
        return request.rollout(token_ids=before, logprobs=logprobs, finish_reason=reason, error=error)
    if request.started_at is None and output.lifespan[0] > 0:
        request.started_at = wall_time(output.lifespan[0])
    count = num_whole_tokens(output)
    return request.rollout(
        token_ids=output.generated_tokens[:count],
        logprobs=output.logprobs[:count],
        finish_reason=reason,
        error=error,
        stop_string=stop_string,
    )


def num_whole_tokens(output: "GenerationOutput") -> int:
    """How many of its tokens were sampled from a distribution and are whole: a step that was cut short may have booked
    a token without its log-prob, and from logits that are no numbers comes a token whose log-prob is none."""
    count = min(len(output.generated_tokens), len(output.logprobs))
    return count - 1 if count and math.isnan(output.logprobs[count - 1]) else count


def wall_time(perf_counter: float) -> float:
    """The same moment on the clock that others have."""
    for _ in range(LOOKS):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < CLOCKS_APART_S:
            break
        # Another thread ran between the looks at the two clocks: requests would seem to start in another order.
    return now - (before - perf_counter)

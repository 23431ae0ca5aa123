"""What the manager needs of those around it, and tells them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput


class LoopListener(Protocol):
    """Who hears from the generation loop. All calls come on the loop's thread and must not block."""

    def on_output(self, output: "GenerationOutput") -> bool:
        """A request finished, failed or was cancelled, with what it had. False: it is not one of ours."""

    def on_preempted(self, request_id: str, started_at: float) -> None:
        """A request lost its KV cache for want of room and waits to be prefilled again, tokens included. Its prefill
        first began at `started_at` (perf_counter), which upstream forgets."""

    def on_step(self, num_tokens: int) -> str | None:
        """A batch has run, its tokens are about to be booked. A reason not to book them and to end every request, or
        None."""

    def on_death(self, error: BaseException) -> None:
        """The loop dies of `error`; its requests are about to be delivered as failed, then `on_exit` comes."""

    def on_exit(self, error: BaseException | None) -> None:
        """The loop has ended; `error` is what killed it, None after a stop. Nothing is delivered after this."""


class Owner(Protocol):
    """Whose manager it is. Its state follows what is done to the manager directly."""

    def start(self) -> None:
        """Somebody calls `start()`: calls `launch`, or raises where that makes no sense."""

    def refuse_inside_update(self, what: str) -> None:
        """Raises on a thread that is inside `update()`: there `what` would wait for itself."""

    def stopping(self, *, again: bool, abort: bool) -> None:
        """Somebody calls `stop()`: no more requests are taken. `again`: the manager is kept, to be started once more.
        `abort`: what is in flight will not run to its end."""


@dataclass(frozen=True)
class Progress:
    """How far one request is, at a pause."""

    started: bool
    """Its prefill has begun, so KV of the present weights may stand behind it."""
    num_sampled: int
    """Tokens sampled so far, booked or not."""

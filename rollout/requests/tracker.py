"""Every request from submit to its one result.

The tracker hands requests to the manager (oldest first, only as many as can run), hears of what becomes of them on the
loop's thread, stamps versions at updates, and passes results to the delivery thread. Whatever ends a request, it ends
here, once.
"""

import itertools
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollout.errors import InvalidRequestError
from rollout.requests.delivery import Alarms, Delivery
from rollout.requests.inflight import InFlight, group_keys
from rollout.requests.outputs import num_whole_tokens, rollout_of, wall_time
from rollout.requests.stops import UNREADABLE, find_stop
from rollout.types import FinishReason, Rollout

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

    from rollout.requests.seams import Progress

WINDOW_S = 10.0  # of the tokens-per-second figure


class Runner(Protocol):
    """What the tracker needs of the manager."""

    def start_group(self, group: Sequence[InFlight]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class RequestTracker:
    """Implements the manager's LoopListener."""

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int | None,
        weights_changed: Callable[[], str | None],
        on_loss: Callable[[str], None],
        on_death: Callable[[BaseException], None],
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self.lock = threading.RLock()
        self.version = 0
        self.runner: Runner | None = None
        self.decode: Callable[[list[int]], str] | None = None  # for stop strings
        self._death: BaseException | None = None
        self.stopping = False  # what fails from now on was aborted
        self.finished = self.generated_tokens = self.preemptions = 0
        self._room = threading.Condition(self.lock)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._weights_changed, self._on_loss = weights_changed, on_loss
        self._on_death, self._on_exit = on_death, on_exit
        self._keys = itertools.count()
        self._in_flight: dict[str, InFlight] = {}  # by request id, oldest first
        self._running: dict[str, InFlight] = {}  # with the manager, by the key it has there
        self._arrivals = itertools.count()
        self._backlog: OrderedDict[int, list[InFlight]] = OrderedDict()  # groups that wait, by arrival, oldest first
        self._steps: deque[tuple[float, int]] = deque()  # (monotonic time, tokens) of the last WINDOW_S
        self._delivery = Delivery()
        self.alarms = Alarms()

    # ----------------------------------------------------------------------------------------- the engine's threads

    def start(self) -> None:
        """Starts the threads that deliver and that watch the time."""
        self._delivery.start()
        self.alarms.start()

    def add(
        self,
        make: Callable[[str, int], Sequence[InFlight]],
        check: Callable[[], None],
        *,
        may_wait: Callable[[], None],
        timeout_s: float | None,
    ) -> Sequence[InFlight]:
        """Takes in the group of requests that `make(key, version)` builds, all or none, waiting for room under
        `max_waiting`. The key was never used before, and is no id in flight.

        `check` raises when the engine does not take requests; it is asked again after each wait. `may_wait` raises where
        the caller would wait for itself. `timeout_s` counts from now: a group that finds no room by then is taken in all
        the same, and times out at once.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._room:
            check()
            while self._is_full() and (left := deadline - time.monotonic()) > 0:
                may_wait()
                # bounded by whatever makes room or ends the engine; the pulse only guards against a lost wake-up
                self._room.wait(min(left, 1.0))
                check()
            group = make(self._new_key(), self.version)
            for request in group:
                if request.request_id in self._in_flight:
                    raise InvalidRequestError(
                        f"request_id {request.request_id!r} is already in flight; use another or wait for its result"
                    )
            arrival = next(self._arrivals)
            for request in group:
                request.arrival = arrival
                self._in_flight[request.request_id] = request
            self._backlog[arrival] = list(group)
            self._feed()
        if timeout_s is not None:
            for request in group:
                self._set_alarm(request, deadline - time.monotonic())
        return group

    def cancel(self, request_id: str) -> bool:
        """Asks for the end of a request. False if none of that id is in flight."""
        with self.lock:
            request = self._in_flight.get(request_id)
            return request is not None and self.end_early(request, FinishReason.ABORT)

    def end_early(self, request: InFlight, reason: FinishReason) -> bool:
        """Asks for the end of this request. False if it has ended already."""
        with self.lock:
            if self._in_flight.get(request.request_id) is not request:
                return False
            request.ending = request.ending or reason
            if request.key is None:
                self._finish(request, rollout_of(request, None, request.ending))
            else:
                assert self.runner is not None
                self.runner.cancel(request.key)
            return True

    def flip(self, version: int, progress: "Mapping[str, Progress]", *, kv_kept: bool) -> int:
        """At a pause: `version` takes over, with the KV cache of what is in flight or (`kv_kept=False`) without it. Returns
        how many requests have tokens of older versions and go on."""
        straddlers = 0
        with self.lock:
            self.version = version
            for request in self._in_flight.values():
                at = None if request.key is None else progress.get(request.key)
                num_sampled = at.num_sampled if at is not None else 0
                request.at_update(
                    version,
                    has_old_kv=kv_kept and at is not None and at.started,
                    num_sampled=max(num_sampled, len(request.token_ids_before)),
                )
                straddlers += num_sampled > 0
        return straddlers

    def snapshot(self, outputs: "Mapping[str, GenerationOutput]") -> list[Rollout]:
        """At a pause: the rollouts in flight so far, oldest first."""
        with self.lock:
            return [rollout_of(request, self._of(request, outputs), None) for request in self._in_flight.values()]

    def end_all(self, reason: FinishReason, error: str | None, outputs: "Mapping[str, GenerationOutput]") -> None:
        """Ends every request with what `outputs` says it had. What the loop still says of them is dropped."""
        with self.lock:
            assert self.runner is not None
            for request in list(self._in_flight.values()):
                if request.key is not None:
                    self.runner.cancel(request.key)
                self._remove(request, rollout_of(request, self._of(request, outputs), reason, error))
            self._room.notify_all()

    def counts(self) -> tuple[int, int]:
        """(with the manager, waiting here)."""
        with self.lock:
            return len(self._running), self._num_waiting()

    def tokens_per_s(self) -> float:
        """Over the last WINDOW_S seconds."""
        with self.lock:
            now = time.monotonic()
            while self._steps and self._steps[0][0] < now - WINDOW_S:
                self._steps.popleft()
            if not self._steps:
                return 0.0
            return sum(tokens for _, tokens in self._steps) / max(now - self._steps[0][0], 1e-3)

    def is_delivering(self) -> bool:
        """Whether the caller is a future's callback."""
        return self._delivery.is_current()

    def wake_waiting(self) -> None:
        """Lets those who wait for room look at the engine's state again."""
        with self._room:
            self._room.notify_all()

    def close(self, timeout_s: float) -> None:
        """After the loop has ended and `end_all`: delivers the rest and ends the threads."""
        self.alarms.stop(timeout_s)
        self._delivery.stop(timeout_s)

    # ------------------------------------------------------------------------------------------- the loop's thread

    def on_output(self, output: "GenerationOutput") -> bool:
        if not output.request_id.startswith("rollsync-"):
            return False
        with self.lock:
            request = self._running.get(output.request_id)
            if request is None:
                return True  # it has ended already: a late word about it changes nothing
            if request.stream is not None:
                request.stream.see(output.generated_tokens[: num_whole_tokens(output)])
            if output.status < output.status.FINISHED:
                return True  # a word from a stream
            error: str | None = None
            stop_string: str | None = None
            if output.status == output.status.FINISHED:
                try:
                    stop_string = self._stop_string(request, output)
                except Exception as raised:  # the caller's tokenizer; this is everybody's thread
                    reason, error = FinishReason.ERROR, f"{UNREADABLE}: {raised!r}"
                else:
                    stopped = stop_string is not None or output.generated_tokens[-1] in request.stop_ids
                    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            elif request.ending is not None:
                reason = request.ending
            elif self.stopping:
                reason, error = FinishReason.ABORT, "the engine was stopped"
            else:
                reason, error = FinishReason.ERROR, output.error or f"the generation loop died: {self._death!r}"
            self._finish(request, rollout_of(request, output, reason, error, stop_string))
        return True

    def on_preempted(self, request_id: str, started_at: float) -> None:
        with self.lock:
            self.preemptions += 1
            request = self._running.get(request_id)
            if request is not None:
                request.num_reprefills += 1
                request.started_at = request.started_at or wall_time(started_at)

    def on_step(self, num_tokens: int) -> str | None:
        changed = self._weights_changed()
        if changed is not None:
            self._on_loss(changed)
            return changed
        with self.lock:
            self.generated_tokens += num_tokens
            now = time.monotonic()
            self._steps.append((now, num_tokens))
            while self._steps[0][0] < now - WINDOW_S:
                self._steps.popleft()
        return None

    def on_death(self, error: BaseException) -> None:
        self._death = error
        self._on_death(error)

    def on_exit(self, error: BaseException | None) -> None:
        self._on_exit(error)

    # ------------------------------------------------------------------------------------------------ under the lock

    def _new_key(self) -> str:
        while (key := f"rollsync-{next(self._keys)}") in self._in_flight:
            pass  # a caller has given a request of its own this id
        return key

    def _num_waiting(self) -> int:
        return len(self._in_flight) - len(self._running)

    def _is_full(self) -> bool:
        return self._max_waiting is not None and self._num_waiting() >= self._max_waiting

    def _feed(self) -> None:
        assert self.runner is not None
        while self._backlog:
            oldest, group = next(iter(self._backlog.items()))
            # a group larger than what can run at once starts alone
            if self._running and len(self._running) + len(group) > self._max_running:
                break
            del self._backlog[oldest]
            for request, key in zip(group, group_keys(self._new_key(), len(group)), strict=True):
                request.key = key
                self._running[key] = request
            self.runner.start_group(group)
        self._room.notify_all()

    def _finish(self, request: InFlight, rollout: Rollout) -> None:
        self._remove(request, rollout)
        if not self.stopping:
            self._feed()

    def _remove(self, request: InFlight, rollout: Rollout) -> None:
        del self._in_flight[request.request_id]
        if request.key is not None:
            del self._running[request.key]
        else:
            group = self._backlog[request.arrival]
            group.remove(request)
            if not group:
                del self._backlog[request.arrival]
        self.finished += 1
        if request.stream is not None:
            request.stream.end()
        self._delivery.resolve(request.future, rollout)

    def _set_alarm(self, request: InFlight, timeout_s: float) -> None:
        def time_out() -> None:
            self.end_early(request, FinishReason.TIMEOUT)

        cancel = self.alarms.after(timeout_s, time_out)
        request.future.add_done_callback(lambda _: cancel())

    @staticmethod
    def _of(request: InFlight, outputs: "Mapping[str, GenerationOutput]") -> "GenerationOutput | None":
        return None if request.key is None else outputs.get(request.key)

    def _stop_string(self, request: InFlight, output: "GenerationOutput") -> str | None:
        if not request.stop:
            return None
        assert self.decode is not None
        return find_stop(output.generated_tokens, request.stop, self.decode)

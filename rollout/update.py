"""The live update: a pause entered and left on the control thread, lent to whoever changes the weights.

Inside the pause the loop is parked between two steps. Leaving it normally makes the new version the engine's; leaving
it in any other way fences the engine, so that no request runs on weights that nobody vouches for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout.control import ControlThread
from rollout.errors import EngineFencedError, EngineStateError, InvalidRequestError, PauseTimeoutError
from rollout.manager import RolloutManager
from rollout.model.shell import WeightWatch
from rollout.requests.tracker import RequestTracker
from rollout.status import UpdateRecord

GRACE_S = 5.0


@dataclass(kw_only=True)
class Updater:
    """Runs one engine's updates, one at a time."""

    model: PreTrainedModel
    manager: RolloutManager
    tracker: RequestTracker
    watch: WeightWatch
    control: ControlThread
    check: Callable[[], None]
    """Raises EngineStateError when the engine's state allows no update."""
    fence: Callable[[str], None]
    """Fences the engine; requests in flight wait for the next update."""
    is_fenced: Callable[[], bool]
    lose: Callable[[str], None]
    """Fences the engine; requests in flight end with what they have."""
    unfence: Callable[[UpdateRecord], None]
    refresh_kv: bool
    """Compute the KV cache of what is in flight again under the new weights."""
    _writer: int | None = None  # the thread that is inside a pause

    @contextmanager
    def update(self, version: int | None, timeout_s: float, remap: bool) -> Iterator[nn.Module]:
        """See GenerationEngine.update."""
        self.refuse_inside("update()")
        begin = self._commit if self.control.is_current() else self._lend
        with begin(version, timeout_s, remap, time.monotonic()) as model:
            self._writer = threading.get_ident()
            try:
                yield model
            finally:
                self._writer = None

    def is_inside(self) -> bool:
        """Whether the calling thread is inside an update."""
        return self._writer == threading.get_ident()

    def refuse_inside(self, what: str) -> None:
        """EngineStateError if the calling thread is inside an update, where `what` would wait for itself."""
        if self.is_inside():
            raise EngineStateError(f"{what} inside update() would wait for itself; call it after the update")

    @contextmanager
    def _lend(self, version: int | None, timeout_s: float, remap: bool, asked_at: float) -> Iterator[nn.Module]:
        loan = _Loan()
        job: Future[None] = Future()
        job.add_done_callback(lambda _: loan.entered.set())
        began = False
        try:
            # inside: interrupted as it returns, it has queued a job that would hold the loop until somebody comes
            self.control.submit_to(
                job, lambda: loan.serve(self._commit(version, timeout_s, remap, asked_at), self.tracker)
            )
            if not loan.entered.wait(timeout_s) and job.cancel():
                raise PauseTimeoutError(
                    f"the pause was not entered within {timeout_s:.3g} s: another update or call is in progress"
                )
            # Not entered but running, it waits for the loop under the same limit and is about to tell.
            if not loan.entered.wait(GRACE_S):
                raise PauseTimeoutError(f"the pause was not entered within {timeout_s:.3g} s")
            if job.done():
                job.result()
            began = True
            yield self.model
            loan.give_back(None)
        except BaseException as error:
            # also when an interrupt strikes during the wait: a loan that nobody takes would hold the loop for ever
            if loan.give_up():
                job.cancel()
            else:
                loan.give_back(error if began else _GivenUpError("the update was given up before it began"))
                self._await(job, timeout_s)
            raise
        failure = self._await(job, timeout_s)
        if failure is not None:
            raise failure

    @staticmethod
    def _await(job: "Future[None]", timeout_s: float) -> BaseException | None:
        """The pause is over, one way or the other, when this returns; only then may the caller go on."""
        try:
            return job.exception(timeout_s + GRACE_S)
        except TimeoutError:
            return PauseTimeoutError(f"leaving the pause took longer than {timeout_s + GRACE_S:.3g} s")

    @contextmanager
    def _commit(self, version: int | None, timeout_s: float, remap: bool, asked_at: float) -> Iterator[nn.Module]:
        self.check()
        new = self.tracker.version + 1 if version is None else version
        is_repair = new == self.tracker.version and self.is_fenced()
        if isinstance(new, bool) or not isinstance(new, int) or (new <= self.tracker.version and not is_repair):
            raise InvalidRequestError(
                f"version must be an integer above the engine's {self.tracker.version}, got {new!r}; versions only grow"
            )
        with self.manager.pause_within(max(timeout_s - (time.monotonic() - asked_at), 0.0)):
            entered_at = time.monotonic()
            if not self.manager.uses_graphs:
                # What was re-pointed before this update is picked up, and an engine that was fenced for it can go on.
                self.watch.record_addresses()
            limit = _BodyLimit(
                lambda: self.lose(
                    f"the body of update() to version {new} took longer than its limit of {timeout_s:.3g} s"
                )
            )
            cancel = self.tracker.alarms.after(timeout_s, limit.overrun)
            try:
                yield self.model
                cancel()
                if not limit.met():
                    raise PauseTimeoutError(
                        f"the body of update() took {time.monotonic() - entered_at:.3g} s, its limit was {timeout_s:.3g} "
                        "s: requests in flight have ended with what they had, and the engine is fenced until an update "
                        "succeeds; prepare outside the pause and only copy inside it, or raise timeout_s"
                    )
                self._check_addresses(remap)
                straddlers = self._adopt(new)
            except _GivenUpError:
                cancel()
                raise
            except BaseException as error:
                cancel()
                if limit.met():
                    self.fence(f"the update to version {new} failed: {type(error).__name__}: {error}")
                raise
            record = UpdateRecord(
                version=new,
                wait_s=entered_at - asked_at,
                held_s=time.monotonic() - entered_at,
                straddlers=straddlers,
            )
            self.unfence(record)

    def _check_addresses(self, remap: bool) -> None:
        replaced = self.watch.replaced()
        if replaced is not None:
            raise EngineFencedError(
                f"{replaced} is no longer the tensor it was: it is another object, or of another shape or dtype. Write "
                "into it in place: tensor.copy_(new)"
            )
        moved = None if remap else self.watch.moved()
        if moved is not None:
            raise EngineFencedError(
                f"{moved} is no longer the tensor it was: captured graphs and other holders of its address would go on "
                "with the old one. Write into it in place (tensor.copy_(new)) instead of replacing it or its .data"
            )

    def _adopt(self, version: int) -> int:
        if self.model.device.type == "cuda":
            # nothing else orders the writer's stream before the loop's
            torch.cuda.synchronize(self.model.device)
        self.manager.isolate_prefixes()
        if self.refresh_kv and version > self.tracker.version:
            # before progress is read: a token that was sampled and not yet booked (asynchronous batching) goes with its KV
            self.manager.recompute_kv()
        straddlers = 0
        if version > self.tracker.version:
            straddlers = self.tracker.flip(version, self.manager.progress(), kv_kept=not self.refresh_kv)
        self.watch.record()
        return straddlers


class _GivenUpError(EngineStateError):
    """Whoever asked for the pause has gone; nothing has been changed."""


class _BodyLimit:
    """Decides once whether a body kept its limit: an alarm that has gone off already may come late."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._lose = lose
        self._met: bool | None = None

    def overrun(self) -> None:
        """On the alarm's thread: the limit has passed, unless the body was quicker."""
        with self._lock:
            if self._met is None:
                self._met = False
                self._lose()

    def met(self) -> bool:
        """On the writer's thread, the body is over: whether it was in time."""
        with self._lock:
            if self._met is None:
                self._met = True
            return self._met


class _Loan:
    """A pause that the control thread holds while another thread works in it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._lock = threading.Lock()
        self._claimed: bool | None = None  # True: lent, False: given up
        self._returned = threading.Event()
        self._error: BaseException | None = None

    def serve(self, pause: AbstractContextManager[nn.Module], tracker: RequestTracker) -> None:
        """On the control thread: lends the pause and waits for its return."""
        with pause:
            with self._lock:
                if self._claimed is False:
                    raise _GivenUpError("the update was given up before it began")
                self._claimed = True
            self.entered.set()
            # Bounded by the alarm that ends the requests at the body's limit; after it nothing runs, and another
            # writer must not be let in beside this one.
            while not self._returned.wait(1.0):
                if tracker.stopping:
                    raise EngineStateError("the engine was stopped during an update")
            if self._error is not None:
                raise self._error

    def give_up(self) -> bool:
        """On the caller's thread: False if the pause has been lent in the meantime."""
        with self._lock:
            if self._claimed is None:
                self._claimed = False
            return not self._claimed

    def give_back(self, error: BaseException | None) -> None:
        """On the caller's thread: the work is done, or failed with `error`."""
        self._error = error
        self._returned.set()

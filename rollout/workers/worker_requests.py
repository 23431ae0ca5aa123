"""What a worker is asked to generate: the methods of its handle that hand requests over, read results, and end them."""

import threading
import time
from collections.abc import Sequence

from rollout.errors import InvalidRequestError
from rollout.requests import checks
from rollout.types import Rollout
from rollout.worker_config import WorkerConfig
from rollout.workers.incarnation import Incarnation
from rollout.workers.wire import Finished, Refusal, WorkItem, to_parcel, unpack


class WorkerRequests:
    """This part of `Worker`; it starts and ends nothing."""

    config: WorkerConfig
    _now: Incarnation
    _polling: threading.Lock

    def submit(self, items: Sequence[WorkItem]) -> list[Refusal]:
        """Hands requests over, in order; returns those that were refused, each alone and with its reason. Every other one
        ends in exactly one result of `poll` (a group in one for each sample). Whoever got a WorkerUnreachableError may
        submit the same items again: none is taken twice while it is in flight or unread."""
        items = list(items)
        refusals: list[Refusal] = []
        parcels = []
        for position, item in enumerate(items):
            try:
                parcels.append(to_parcel(position, item))
            except InvalidRequestError as error:
                refusals.append(Refusal(position=position, request_id=item.request_id, error=error))
        if parcels:
            now = self._now
            refusals += now.ask("submit", parcels, now.read_up_to, limit_s=self.config.submit_timeout_s)
        return sorted(refusals, key=lambda refusal: refusal.position)

    def poll(self, max_items: int = 64, timeout_s: float = 1.0) -> list[Finished]:
        """The oldest results, each handed out once, up to `max_items`; waits up to `timeout_s` for the first, in the worker,
        and is empty if none came. One thread polls at a time, others wait. A WorkerUnreachableError loses nothing: the next
        poll brings what this one should have."""
        max_items = checks.check_size(max_items)
        timeout_s = checks.check_limit(timeout_s)
        deadline = time.monotonic() + timeout_s
        if not self._polling.acquire(timeout=timeout_s):
            return []
        try:
            left = max(deadline - time.monotonic(), 0.0)
            limit_s = timeout_s + self.config.grace_s
            now = self._now
            batch, now.read_up_to = now.ask("poll", now.read_up_to, max_items, left, limit_s=limit_s)
            return unpack(batch)
        finally:
            self._polling.release()

    def cancel(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests: their results (ABORT, with what they had) come by `poll`. A group's request id stands for all its
        samples. Returns the ids of which nothing was in flight: ended already, or never submitted to this worker."""
        missed: list[str] = self._now.ask("cancel", list(request_ids), limit_s=self.config.submit_timeout_s)
        return missed

    def snapshot(self) -> list[Rollout]:
        """The partial rollouts in flight at one consistent point, oldest first; their finish_reason is None."""
        batch = self._now.ask("snapshot", limit_s=self.config.snapshot_timeout_s)
        return [finished.rollout for finished in unpack(batch)]

"""Through Ray's object store, to workers anywhere in the cluster."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from sync.config import check_seconds
from sync.errors import SyncError, SyncTimeoutError
from sync.layout import Layout
from sync.place import Deadline
from sync.receiver import CommitMode, begin, receive
from sync.ticket import Package, TargetStatus
from sync.transports.base import Link
from sync.transports.host_memory import HostMemory
from sync.transports.roll_call import RollCall, Unanswered

IN_FLIGHT = 2
"""Buckets in the object store at once: one that receivers read while the next is put."""


class ObjectStore:
    """For workers on other machines, and what is used for them unless another transport is given.

    Each bucket is put once, whatever the number of receivers; Ray brings it to each node that asks for it, once. A
    receiver copies it into its own staging and verifies it there. At most two buckets are in the store; one leaves it
    when the last receiver has verified it.

    A receiver that has not taken a bucket within `bucket_timeout_s` is given up for this version and fails by name, so
    that it holds up the others once; it gets nothing more until it has answered. Needs a running Ray in this process.
    """

    name = "object_store"

    def __init__(self, *, bucket_timeout_s: float = 10.0) -> None:
        """`bucket_timeout_s`: seconds for one bucket, from its put to the last receiver's word."""
        check_seconds("bucket_timeout_s", bucket_timeout_s)
        self._limit_s = bucket_timeout_s
        self._memory = HostMemory()
        self._unanswered = Unanswered()

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        if not ray.is_initialized():
            raise SyncError("ObjectStore needs Ray in this process; call ray.init(...) before the publish")
        return "copy"

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        return self._memory.run(layout, spared)

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        roll_call = RollCall(links, self._unanswered, deadline)
        opened = {link: link.call(begin, package) for link in roll_call.present}
        for link, is_wanted in roll_call.wait(opened, self._limit_s, "that a version comes").items():
            if not is_wanted:
                roll_call.finish(link)
        in_flight: deque[dict[Link, Future[Any]]] = deque()
        for bucket, part in package.layout.parts(run):
            if len(in_flight) == IN_FLIGHT:
                self._wait(in_flight.popleft(), roll_call)
            if not roll_call.present:
                break
            try:
                parcel = StoredBucket(ref=ray.put(part.numpy()), limit_s=self._limit_s)
            except RayError as error:
                self._fail_all(roll_call, package, error)
                break
            calls = {link: link.call(receive, package.ticket, bucket.index, parcel) for link in roll_call.present}
            in_flight.append(calls)
            del parcel, calls  # the store keeps a bucket as long as anybody refers to it
        while in_flight:
            self._wait(in_flight.popleft(), roll_call)
        for link in list(roll_call.present):
            roll_call.finish(link)
        return roll_call.ends()

    def close(self) -> None:
        """Nothing is left in the store."""

    def _wait(self, calls: "Mapping[Link, Future[Any]]", roll_call: RollCall) -> None:
        roll_call.wait(calls, self._limit_s, "a bucket")

    @staticmethod
    def _fail_all(roll_call: RollCall, package: Package, error: RayError) -> None:
        for link in list(roll_call.present):
            failure = SyncError(f"version {package.ticket.version} cannot be put into Ray's object store: {error}")
            failure.__cause__ = error
            roll_call.fail(link, failure)


@dataclass(frozen=True)
class StoredBucket:
    """One bucket in the object store."""

    ref: Any  # ray.ObjectRef of [num_bytes] uint8
    limit_s: float

    def read(self, into: Tensor) -> None:
        try:
            content = ray.get(self.ref, timeout=self.limit_s)
        except GetTimeoutError as error:
            raise SyncTimeoutError(
                f"a bucket did not come from the object store within {self.limit_s:g} s; is the network or its node overloaded?"
            ) from error
        except RayError as error:
            # with its sender, say
            raise SyncError(
                f"a bucket was lost on its way through the object store ({error}); publish again"
            ) from error
        if content.nbytes != into.numel():
            raise SyncError(f"a bucket of {into.numel()} bytes arrived with {content.nbytes}; publish again")
        np.copyto(into.numpy(), content)

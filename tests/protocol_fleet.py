"""Two or three targets in memory behind one sender, for the tests of the protocol.

After every fault the same four things hold: no engine serves mixed weights, versions are right, the next publish works, and
every wait has ended.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fakes import wait_until
from fakes_sync import BUCKET_BYTES, NUM_BUCKETS, FakeTarget, Memory, check_fleet, marked
from torch import Tensor

from rollout import EngineState
from sync import SyncConfig, SyncReport, WeightSync

CONFIG = SyncConfig(bucket_bytes=BUCKET_BYTES, open_timeout_s=0.25)
LATE_S = 1.0
"""A publish's limit where a target shall miss it."""

CALLS = ["hello", "begin", *[f"receive+{index}" for index in range(NUM_BUCKETS)], "commit"]
"""What a target is called for in one publish, in order; `receive+2` is the third bucket."""
IN_UPDATE = ["pause", *[f"copy+{index}" for index in range(4)], "leave"]
"""The moments of an update: before the pause, before each copy, after the last."""


def at(point: str) -> tuple[str, int]:
    name, _, skip = point.partition("+")
    return name, int(skip or 0)


def fault(target: FakeTarget, point: str, what: Any) -> None:
    name, skip = at(point)
    target.fault_at(name, what, skip)


class Fleet:
    """Two targets behind one sender, and what was published."""

    def __init__(self, *, num_targets: int = 2, reuse: bool = False, config: SyncConfig = CONFIG) -> None:
        self.targets = [FakeTarget(name) for name in "abc"[:num_targets]]
        self.transport = Memory(reuse=reuse)
        self.weight_sync = WeightSync(self.targets, self.transport, config)
        self.published: dict[int, float] = {}
        self._mark = 0.0

    def next_mark(self) -> float:
        self._mark += 1
        return self._mark

    def publish(self, **limits: Any) -> SyncReport:
        mark = self.next_mark()
        report = self.weight_sync.publish(marked(mark), **limits)
        self.published[report.version] = mark
        return report

    def check(self) -> None:
        check_fleet(self.targets, self.published)

    def recover(self) -> None:
        """What is late comes now; who is dead comes back, and is brought up before the next publish."""
        for target in self.targets:
            target.resume()
            if target.is_dead:
                target.revive()

    def check_that_the_next_publish_works(self) -> None:
        report = self.publish()
        assert (report.fenced, report.overtaken) == ((), ())
        assert {target.engine.version for target in self.targets} == {report.version} == {max(self.published)}
        assert {target.engine.state for target in self.targets} == {EngineState.RUNNING}
        self.check()


@contextmanager
def fleet_of(num_targets: int = 2, **settings: Any) -> Iterator[Fleet]:
    threads = set(threading.enumerate())
    fleet = Fleet(num_targets=num_targets, **settings)
    try:
        yield fleet
    finally:
        fleet.recover()
        fleet.weight_sync.close(timeout_s=30)
    assert fleet.transport.is_closed
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread not in threads])


def items(mark: float) -> Iterator[tuple[str, Tensor]]:
    """A source that is not known beforehand."""
    return iter(marked(mark).state_dict().items())


class InThread:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except BaseException as error:
            self._result = error

    def is_waiting(self) -> bool:
        """It stands in `publish`'s wait for its turn."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_qualname == "Turns.take":
                return True
            frame = frame.f_back
        return False

    def result(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

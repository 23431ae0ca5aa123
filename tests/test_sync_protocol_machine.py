"""The protocol of a publish under any sequence of publishes, overtakings, faults, joins and restarted trainers."""

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fakes import wait_until
from fakes_sync import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    FakeTarget,
    Memory,
    check_fleet,
    corrupt,
    corrupt_duplicate,
    drop,
    duplicate,
    marked,
    marks,
    reorder,
    swap,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from rollout import EngineState
from sync import SyncConfig, SyncError, SyncReport, WeightSync

MAX_SENDERS = 3
POINTS = ["hello", "begin", "receive", "commit", "pause", "copy", "leave", "after"]
CAN_STALL = POINTS[:4]
CAN_RAISE = POINTS[:-1]
ANSWER_S = 30.0

targets = st.integers(0, 2)
senders = st.integers(0, MAX_SENDERS - 1)
edits = st.one_of(
    st.builds(
        lambda edit, index: edit(index),
        st.sampled_from([corrupt, corrupt_duplicate, drop, duplicate, swap]),
        st.integers(0, NUM_BUCKETS - 1),
    ),
    st.just(reorder),
)


class Protocol(RuleBasedStateMachine):
    """Three targets; trainers one after the other, of which the replaced ones go on publishing."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set(threading.enumerate())
        self.folder = tempfile.TemporaryDirectory()
        self.targets = [FakeTarget(name) for name in "abc"]
        self.transports: list[Memory] = []
        self.senders: list[WeightSync] = []
        self.futures: list[Future[SyncReport]] = []
        self.last: dict[int, tuple[int, float]] = {}  # of each sender: version and mark of what it published last
        self.mark = 0.0
        self.start_sender(reuse=False)

    # ------------------------------------------------------------------------------------------------------- senders

    @precondition(lambda self: len(self.senders) < MAX_SENDERS)
    @rule(reuse=st.booleans())
    def start_sender(self, reuse: bool) -> None:
        """The trainer is restarted; the one before it may not have noticed that it is dead."""
        # Targets answer on the thread that asks: only those that are stalled are waited for, at every step.
        config = SyncConfig(
            bucket_bytes=BUCKET_BYTES, open_timeout_s=0.02, update_timeout_s=5.0, run_folder=Path(self.folder.name)
        )
        self.transports.append(Memory(reuse=reuse))
        self.senders.append(WeightSync(self.targets, self.transports[-1], config))

    @rule(number=senders)
    def publish(self, number: int) -> None:
        self.mark += 1
        self._publish(number % len(self.senders), self.mark, None)

    @rule(number=senders)
    def publish_the_same_version_again(self, number: int) -> None:
        number %= len(self.senders)
        if number in self.last:
            version, mark = self.last[number]
            self._publish(number, mark, version)

    @rule(number=senders)
    def publish_other_bytes_as_the_same_version(self, number: int) -> None:
        number %= len(self.senders)
        if number in self.last:
            self.mark += 1
            self._publish(number, self.mark, self.last[number][0])

    @precondition(lambda self: len(self.senders) > 1)
    @rule(outer=senders, inner=senders)
    def publish_while_another_stages(self, outer: int, inner: int) -> None:
        """One has opened and gathers; the other opens, sends and commits."""
        outer, inner = outer % len(self.senders), inner % len(self.senders)
        if outer == inner:
            return
        self.mark += 1
        mark = self.mark

        def source() -> Iterator[tuple[str, Tensor]]:
            self.publish(inner)
            yield from marked(mark).state_dict().items()

        self._publish(outer, mark, None, source())

    def _publish(self, number: int, mark: float, version: int | None, source: Any = None) -> None:
        sender = self.senders[number]
        offered = source if source is not None else marked(mark)
        try:
            future = sender.publish(offered, version=version, timeout_s=ANSWER_S, wait=False)
        except SyncError:
            return
        self.futures.append(future)
        if not self._is_held_up():
            report = self._settle(future)
            if report is not None:
                assert version in (None, report.version)
                before, _ = self.last.get(number, (0, 0.0))
                assert report.version >= before
                self.last[number] = (report.version, mark)

    # --------------------------------------------------------------------------------------------------------- faults

    @rule(number=targets)
    def stall(self, number: int) -> None:
        self.targets[number].stall()

    @rule(number=targets)
    def resume(self, number: int) -> None:
        self.targets[number].resume()

    @rule(number=targets)
    def kill(self, number: int) -> None:
        self.targets[number].kill()

    @rule(number=targets)
    def revive(self, number: int) -> None:
        if self.targets[number].is_dead:
            self.targets[number].revive()

    @rule(number=targets, point=st.sampled_from(POINTS), skip=st.integers(0, 3))
    def kill_at(self, number: int, point: str, skip: int) -> None:
        self.targets[number].fault_at(point, "kill", skip)

    @rule(number=targets, point=st.sampled_from(CAN_STALL), skip=st.integers(0, 3))
    def stall_at(self, number: int, point: str, skip: int) -> None:
        self.targets[number].fault_at(point, "stall", skip)

    @rule(number=targets, point=st.sampled_from(CAN_RAISE), skip=st.integers(0, 3))
    def fail_at(self, number: int, point: str, skip: int) -> None:
        self.targets[number].fault_at(point, RuntimeError(f"{point} failed"), skip)

    @rule(name=st.sampled_from("abc"), edit=edits)
    def edit(self, name: str, edit: Any) -> None:
        self.transports[-1].edits[name] = edit

    @rule()
    def fail_to_send(self) -> None:
        self.transports[-1].fail_next_send = OSError("no route")

    # ----------------------------------------------------------------------------------------------------- what holds

    @invariant()
    def weights_are_whole_and_versions_right(self) -> None:
        check_fleet(self.targets, {})

    def teardown(self) -> None:
        for target in self.targets:
            target.clear_faults()
            target.resume()
            if target.is_dead:
                target.revive()
        for future in self.futures:
            self._settle(future)
        self.senders.append(
            WeightSync(self.targets, Memory(), SyncConfig(bucket_bytes=BUCKET_BYTES, run_folder=Path(self.folder.name)))
        )
        self.mark += 1
        report = self.senders[-1].publish(marked(self.mark), timeout_s=ANSWER_S)
        assert (report.fenced, report.overtaken) == ((), ())
        for target in self.targets:
            assert (target.engine.version, target.engine.state) == (report.version, EngineState.RUNNING)
            assert marks(target.engine.model) == {self.mark}
        check_fleet(self.targets, {report.version: self.mark})
        for sender in self.senders:
            sender.close(timeout_s=ANSWER_S)
        self.folder.cleanup()
        wait_until(lambda: set(threading.enumerate()) <= self.threads)

    def _is_held_up(self) -> bool:
        return any(target.is_stalled or target.will_stall for target in self.targets)

    def _settle(self, future: "Future[SyncReport]") -> SyncReport | None:
        """Its report; None if nobody took that version. Any other failure, or none within the limit, is a fault."""
        try:
            return future.result(ANSWER_S + 5)
        except SyncError:
            return None


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

"""What happens on a controller's loop: what is asked of it, and the turns in which work goes out and batches are handed out.

Everything here runs on the loop, one callback at a time, and never waits. An event notes what came and asks for a turn; a
turn does whatever has become possible, oldest first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from rollout.batches.collection import Collection
from rollout.batches.entries import Ending, GroupState, SampleState
from rollout.batches.group_work import GroupWork
from rollout.batches.groups import KeepGroup
from rollout.batches.handout import HandOut
from rollout.batches.lease import Lease
from rollout.batches.metrics import RolloutMetrics
from rollout.batches.prompts import Prompt, Prompts
from rollout.errors import EngineFencedError, InvalidRequestError, RolloutStalledError
from rollout.fleet.admission import Admission, Outbox
from rollout.fleet.evaluation import Evaluations
from rollout.fleet.judging import Judge
from rollout.fleet.protocols import Loop
from rollout.fleet.report import Status, status_of
from rollout.fleet.roster import Roster
from rollout.fleet.scoring import Scoring
from rollout.fleet.supervisor import Supervisor
from rollout.fleet.workforce import Workforce
from rollout.rollout_config import RolloutConfig
from rollout.status import UpdateRecord
from rollout.types import Rollout, SamplingParams


class Coordinator:
    """See `RolloutController`, which calls it from other threads, through the loop."""

    def __init__(
        self,
        loop: Loop,
        prompts: Prompts,
        scoring: Scoring,
        config: RolloutConfig,
        *,
        keep_group: KeepGroup | None,
        on_end: Callable[[GroupWork, Ending], None],
        on_version: Callable[[int], None],
        on_update: Callable[[str, UpdateRecord], None],
    ) -> None:
        """`on_end`: a group has ended. `on_version`: the fleet's version has moved. `on_update`: a worker's engine has taken
        a version; of those that it took between two looks, only the last is told."""
        self.loop = loop
        self.prompts = prompts
        self.config = config
        self.collection = Collection(config, keep_group, on_end)
        self.metrics = RolloutMetrics(loop.now())
        self.roster = Roster(self._load, config.max_samples_per_worker, loop.now)
        self.evaluations = Evaluations(
            self.roster,
            scoring,
            max_retries=config.max_infra_retries,
            wait_s=config.evaluation_wait_s,
            call_later=loop.call_later,
        )
        self.admission = Admission(self.collection, self.roster, prompts, config, loop.now)
        self.supervisor = Supervisor(loop, self.roster, self.collection, config, self.changed, self._updated)
        self._suspected: set[int] = set()  # numbers of groups that may have become too old
        self.judge = Judge(
            self.collection,
            scoring,
            self.metrics,
            self.supervisor,
            config,
            changed=self.changed,
            may_be_stale=self._suspected.add,
        )
        self.workforce = Workforce(
            loop,
            self.roster,
            self.collection,
            self.evaluations,
            self.judge,
            self.supervisor,
            self.metrics,
            config,
            changed=self.changed,
            on_extinct=self.fail,
        )
        self.handout = HandOut(self.collection, config, self.metrics, loop.now, self._lease_ends)
        self.version = 0
        """The newest that any worker confirmed. It never goes back, not even when that worker dies."""
        self.is_draining = False
        self.fatal: BaseException | None = None
        self._scoring = scoring
        self._on_version = on_version
        self._on_update = on_update
        self._drained: list[Future[None]] = []
        self._turn_is_due = False
        self._checked_version = 0
        self._was_told = False  # whoever waited, of a stall

    # ------------------------------------------------------------------------------------------ asked from outside

    def begin(self) -> None:
        """The first tick."""
        self._tick()

    def next_batch(self, future: "Future[Lease]") -> None:
        """Resolves the future with the next batch, in the order of asking."""
        if self.fatal is not None:
            future.set_exception(self.fatal)
            return
        if self._was_told:
            self.collection.num_barren = 0  # "zero output" would be for ever: nothing is begun that could end it
            self._was_told = False
        self.handout.ask(future)
        self.refresh()  # a publish may have come a moment ago
        self.changed()

    def rescore(self) -> None:
        """After a checkpoint was loaded: rewards that were pending are asked for again, and what is complete is settled."""
        self.loop.call_soon(self.collection.settle)
        for sample in list(self.collection.ledger.samples(SampleState.REWARDING)):
            work = self.collection.works[sample.group.number]
            self.loop.call_soon(partial(self._scoring.submit, work, sample, self.judge))
        self._suspected.update(self.collection.works)

    def cancel(self, group_id: str) -> None:
        """A group ends, CANCELLED. InvalidRequestError if it has ended, never was, or is leased."""
        work = next((w for w in self.collection.works.values() if w.entry.group_id == group_id), None)
        if work is None:
            raise InvalidRequestError(f"no group {group_id!r} is outstanding: it has ended, or never was")
        if work.entry.state is GroupState.LEASED:
            raise InvalidRequestError(f"group {group_id!r} has been handed out; give its lease back first")
        self.collection.cancel(work)
        self.changed()

    def drain(self, future: "Future[None]") -> None:
        """Admits nothing more; resolves when nothing is queued, runs or waits for a reward."""
        if self.fatal is not None:
            future.set_exception(self.fatal)
            return
        self.is_draining = True
        self._drained.append(future)
        self.changed()

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_samples: int,
        future: "Future[list[Rollout]]",
        *,
        is_scored: bool = True,
    ) -> None:
        """Resolves with a rollout for each prompt and sample, rewarded if `is_scored`."""
        if self.fatal is not None:
            future.set_exception(self.fatal)
            return
        self.evaluations.begin(prompts, params, num_samples, future, is_scored=is_scored)
        self.changed()

    def commit_begins(self, worker_id: str, go: Callable[[], None]) -> None:
        """Calls `go` once the worker's weights may change; see `rollout.fleet.evaluation`."""
        self.evaluations.before_commit(worker_id, go)

    def commit_ends(self, worker_id: str) -> None:
        """It may hold another version now, and may evaluate again."""
        self.evaluations.after_commit(worker_id)
        self.refresh()
        self.changed()

    def fail(self, error: BaseException) -> None:
        """Nothing goes on; whoever waits gets the error."""
        self.fatal = self.fatal or error
        self._refuse_all(self.fatal)

    def _refuse_all(self, error: BaseException) -> None:
        self.handout.refuse_all(error)
        self.evaluations.fail(error)
        drained, self._drained = self._drained, []
        for future in drained:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def status(self) -> Status:
        """Who waits for what."""
        return status_of(self)

    # ------------------------------------------------------------------------------------------------------- turns

    def changed(self) -> None:
        """Something has happened: a turn is due."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if self.fatal is not None:
            self.fail(self.fatal)
            return
        if self.supervisor.newest_version > self.version:
            self.version = self.supervisor.newest_version
            self._on_version(self.version)
        if self.config.on_stale == "expire":
            self._expire()
        outbox: Outbox = {}
        self.evaluations.dispatch(outbox, self.version)
        if self.is_draining:
            self.admission.dispatch(outbox, self.version)
        else:
            self.admission.run(
                outbox,
                version=self.version,
                handed_version=self.handout.handed_version,
                is_awaited=self.handout.is_awaited,
            )
        for worker_id, items in outbox.items():
            self.roster.seats[worker_id].link.submit(items)
        self._tell_cancelled()
        is_last = self.is_draining or self.prompts.is_exhausted
        is_draining = self.is_draining and not self.prompts.is_known_exhausted
        if self.handout.run(self.version, is_last=is_last, is_draining=is_draining):
            self.supervisor.saw_progress()
            self.changed()  # there is room now
        self._finish_drain()

    def _expire(self) -> None:
        if self.version > self._checked_version:
            self._checked_version = self.version
            self._suspected.update(entry.number for entry in self.collection.ahead())
        for number in sorted(self._suspected):
            work = self.collection.works.get(number)
            is_ahead = work is not None and work.entry.state is not GroupState.LEASED
            if work is not None and is_ahead and self.handout.is_too_old(work.entry, self.version):
                self.metrics.num_stale += 1
                self.collection.expire(work, version=self.version, now=self.loop.now())
        self._suspected.clear()

    def _tell_cancelled(self) -> None:
        by_worker: dict[str, list[str]] = {}
        for cancelled in (self.collection.cancelled, self.evaluations.cancelled):
            for worker_id, sample_id in cancelled:
                by_worker.setdefault(worker_id, []).append(sample_id)
            cancelled.clear()
        for worker_id, sample_ids in by_worker.items():
            seat = self.roster.seats.get(worker_id)
            if seat is not None:
                seat.link.cancel(sample_ids)
                self.roster.touch(worker_id)

    def _updated(self, worker_id: str, record: UpdateRecord) -> None:
        self.metrics.updated(record)
        self._on_update(worker_id, record)

    def _finish_drain(self) -> None:
        under_way = (SampleState.QUEUED, SampleState.RUNNING, SampleState.REWARDING)
        if self._drained and not self.collection.ledger.num_samples(*under_way):
            drained, self._drained = self._drained, []
            for future in drained:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def _lease_ends(self, lease: Lease, trained: bool) -> None:
        self.loop.call_soon(partial(self._end_lease, lease, trained))

    def _end_lease(self, lease: Lease, trained: bool) -> None:
        if self.handout.end(lease, trained):
            self._suspected.update(entry.number for entry in lease.entries if not trained)
            self.supervisor.saw_progress()
            self.changed()

    # ----------------------------------------------------------------------------------------------------- looking

    def _tick(self) -> None:
        for worker_id, error in self.supervisor.tick():
            self.workforce.on_lost(worker_id, error)
        self.loop.call_soon(self._watch)
        self.loop.call_later(self.loop.tick_s, self._tick)

    def _watch(self) -> None:
        self._turn()  # first: whoever has just asked may get what is there
        if self.fatal is None:
            self._tell_of_stall()

    def _tell_of_stall(self) -> None:
        why = self.supervisor.outside_change()
        if why is not None and not self.evaluations.has_commits:
            self._refuse_all(EngineFencedError(f"the engine is fenced: {why} (here: with controller.update(): ...)"))
            return
        why = self.stalled()
        if why is None or not (self.roster.is_deserted or self.handout.num_waiting):
            return
        error = RolloutStalledError(why, self.status())
        if self.roster.is_deserted:
            self._refuse_all(error)
        else:
            if self.supervisor.is_barren:
                error.__cause__ = self.collection.last_cause
            self.handout.refuse_all(error)
            self._was_told = True

    def stalled(self) -> str | None:
        """What is wrong with the fleet, if something is that can be mended; `fatal` is what cannot."""
        return self.supervisor.stalled() if self.fatal is None else None

    def look(self) -> int:
        """The fleet's version, after a look at every worker."""
        self.refresh()
        return self.supervisor.newest_version

    def refresh(self) -> None:
        """Looks at every worker: versions move without anybody telling."""
        self.supervisor.look_at_all()

    def _load(self, worker_id: str) -> int:
        return self.collection.ledger.num_running_on(worker_id) + self.evaluations.num_on(worker_id)

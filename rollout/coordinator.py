"""What happens on a controller's loop: results, refusals, deaths, rewards, and the turns in which work goes out.

Everything here runs on the loop, one callback at a time, and never waits. An event notes what came and asks for a turn; a
turn does whatever has become possible, oldest first.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from rollout.admission import Admission, Outbox
from rollout.collection import Collection, GroupWork
from rollout.entries import Ending, GroupState, SampleEntry, SampleState
from rollout.errors import InvalidRequestError, RolloutStalledError, WorkerDiedError
from rollout.evaluation import Evaluations
from rollout.fleet import FleetWorker, Loop
from rollout.groups import FailureKind, KeepGroup
from rollout.handout import HandOut
from rollout.lease import Lease
from rollout.metrics import RolloutMetrics
from rollout.prompts import Prompts
from rollout.report import Status, status_of
from rollout.rewards import RewardError, RewardResult
from rollout.rollout_config import RolloutConfig
from rollout.roster import Roster, Seat
from rollout.scoring import Scoring
from rollout.types import FinishReason, Rollout
from rollout.watchdogs import Signs, stall
from rollout.wire import Finished, WorkerState, WorkItem

log = logging.getLogger("rollsync")

BUSY_S = 0.25
"""How long a worker that refused an item is left alone."""


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
    ) -> None:
        """`on_end`: a group has ended. `on_version`: the fleet's version has moved."""
        self.loop = loop
        self.prompts = prompts
        self.config = config
        self.collection = Collection(config, keep_group, on_end)
        self.metrics = RolloutMetrics(loop.now())
        self.roster = Roster(self._load, config.max_samples_per_worker, loop.now)
        self.evaluations = Evaluations(self.roster, scoring, config.max_infra_retries)
        self.admission = Admission(self.collection, self.roster, prompts, config, loop.now)
        self.handout = HandOut(self.collection, config, self.metrics, loop.now, self._lease_ends)
        self.version = 0
        """The newest that any worker confirmed. It never goes back, not even when that worker dies."""
        self.is_draining = False
        self.fatal: BaseException | None = None
        self._scoring = scoring
        self._on_version = on_version
        self._drained: list[Future[None]] = []
        self._turn_is_due = False
        now = loop.now()
        self._signs = Signs(progress_at=now, reward_at=now, serving_at=now)
        self._snapshot_at = now
        self._suspected: set[int] = set()  # numbers of groups that may have become too old
        self._checked_version = 0
        self._seen_version = 0

    # ------------------------------------------------------------------------------------------ asked from outside

    def begin(self) -> None:
        """The first tick."""
        self._tick()

    def next_batch(self, future: "Future[Lease]") -> None:
        """Resolves the future with the next batch, in the order of asking."""
        if self.fatal is not None:
            future.set_exception(self.fatal)
            return
        self.handout.ask(future)
        self.refresh()  # a publish may have come a moment ago
        self.changed()

    def rescore(self) -> None:
        """After a checkpoint was loaded: rewards that were pending are asked for again."""
        for sample in list(self.collection.ledger.samples(SampleState.REWARDING)):
            work = self.collection.works[sample.group.number]
            self.loop.call_soon(partial(self._scoring.submit, work, sample, self))
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
        self.is_draining = True
        self._drained.append(future)
        self.changed()

    def fail(self, error: BaseException) -> None:
        """Nothing goes on; whoever waits gets the error."""
        self.fatal = self.fatal or error
        self.handout.refuse_all(self.fatal)
        self.evaluations.fail(self.fatal)
        drained, self._drained = self._drained, []
        for future in drained:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.fatal)

    def status(self) -> Status:
        """Who waits for what."""
        return status_of(self)

    # --------------------------------------------------------------------------------------------- workers' events

    def add_worker(self, worker: FleetWorker) -> None:
        """It takes part from now on."""
        health = worker.health()
        seat = Seat(
            worker=worker,
            link=self.loop.link(worker, self),
            state=health.state,
            incarnation=health.incarnation,
            version=health.version,
        )
        self.roster.add(seat)
        self._look_at(seat)
        self.changed()

    def remove_worker(self, worker_id: str, *, migrate: bool) -> Seat:
        """It takes nothing more. `migrate`: what it runs goes on elsewhere, and it is out; else it is still in until that
        has ended."""
        seat = self.roster.seats.get(worker_id)
        if seat is None:
            raise InvalidRequestError(f"no worker {worker_id!r} in the fleet, which has {sorted(self.roster.seats)}")
        seat.is_leaving = True
        if migrate:
            for sample in self.collection.ledger.running_on(worker_id):
                self.collection.requeue(sample)
            self.evaluations.lost(worker_id, WorkerDiedError(f"worker {worker_id} was removed"))
            self.roster.remove(worker_id)
            seat.link.close()
        self.changed()
        return seat

    def on_results(self, worker_id: str, results: Sequence[Finished]) -> None:
        """Results came, or the worker changed."""
        seat = self.roster.seats.get(worker_id)
        if seat is not None and (not results or any((r.rollout.max_version or 0) > self.version for r in results)):
            self._look_at(seat)
        for finished in results:
            if self.evaluations.take(finished):
                continue
            taken = self.collection.accept(finished)
            if taken is not None:
                self._judge(*taken)
        if results:
            self.roster.touch(worker_id)
            self._signs.progress_at = self.loop.now()
        self.changed()

    def on_refused(self, worker_id: str, refused: Sequence[tuple[WorkItem, Exception]]) -> None:
        """Items that can never work fail; others wait for another worker, or for this one."""
        for item, error in refused:
            hopeless = isinstance(error, InvalidRequestError)
            if not hopeless:
                self._leave_alone(worker_id, str(error))
            if self.evaluations.refused(item, error):
                continue
            for work, sample in self._samples_of(item, worker_id):
                if not hopeless:
                    self.collection.requeue(sample)
                elif sample.worker_id is not None:  # else its group was dropped with the sample before it
                    self._fail(work, sample, FailureKind.HOPELESS, str(error))
        self.roster.touch(worker_id)
        self.changed()

    def on_lost(self, worker_id: str, error: Exception) -> None:
        """It died: what it ran goes on elsewhere, from the last snapshot of it."""
        seat = self.roster.seats.get(worker_id)
        if seat is None:
            return
        log.warning("worker %s is lost: %s", worker_id, error)
        self.metrics.num_worker_deaths += 1
        seat.is_lost = True
        seat.reason = str(error)
        seat.tokens_per_s = 0.0
        for sample in self.collection.ledger.running_on(worker_id):
            if sample.worker_id is not None:  # else its group was dropped with the sample before it
                self._fail(self.collection.works[sample.group.number], sample, FailureKind.INFRA, str(error))
        self.evaluations.lost(worker_id, error)
        if seat.num_restarts < self.config.worker_restarts:
            seat.num_restarts += 1
            seat.state = WorkerState.RESTARTING
            seat.link.restart(self.version)
        else:
            seat.state = WorkerState.DEAD
            if all(other.state is WorkerState.DEAD for other in self.roster.seats.values()):
                failure = WorkerDiedError(f"no worker is left; the last one, {worker_id}: {error}")
                failure.__cause__ = error
                self.fail(failure)
        self.roster.touch(worker_id)
        self.changed()

    def on_restarted(self, worker_id: str) -> None:
        """It serves again once it holds the fleet's version."""
        seat = self.roster.seats.get(worker_id)
        if seat is not None:
            seat.num_tokens, seat.suspect_since, seat.is_lost = 0, None, False
            self._look_at(seat)
            self.changed()

    def on_snapshot(self, worker_id: str, rollouts: Sequence[Rollout]) -> None:
        """What its samples have so far."""
        for rollout in rollouts:
            # nobody who is behind it may go on from it
            self._seen_version = max(self._seen_version, rollout.max_version or 0)
            self.collection.note_partial(rollout, worker_id)

    # ------------------------------------------------------------------------------------------------------- turns

    def changed(self) -> None:
        """Something has happened: a turn is due."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self.loop.call_soon(self._turn)

    def refresh(self) -> None:
        """Looks at every worker."""
        for seat in self.roster.seats.values():
            self._look_at(seat)

    def _turn(self) -> None:
        self._turn_is_due = False
        if self.fatal is not None:
            self.fail(self.fatal)
            return
        if self._seen_version > self.version:
            self.version = self._seen_version
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
        if self.handout.run(self.version, is_last=self.is_draining or self.prompts.is_exhausted):
            self._signs.progress_at = self.loop.now()
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
        for worker_id, sample_id in self.collection.cancelled:
            by_worker.setdefault(worker_id, []).append(sample_id)
        self.collection.cancelled.clear()
        for worker_id, sample_ids in by_worker.items():
            seat = self.roster.seats.get(worker_id)
            if seat is not None:
                seat.link.cancel(sample_ids)
                self.roster.touch(worker_id)

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
            self._signs.progress_at = self.loop.now()
            self.changed()

    # ----------------------------------------------------------------------------------------------------- samples

    def _judge(self, work: GroupWork, sample: SampleEntry) -> None:
        rollout = work.rollouts[sample.index]
        reason = rollout.finish_reason
        if reason is FinishReason.TIMEOUT:
            limit = self.config.rollout_timeout_s
            self._fail(work, sample, FailureKind.DATA, f"it took longer than rollout_timeout_s={limit}")
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.metrics.finished(rollout)
            if (rollout.min_version or self.version) < self.version:
                self._suspected.add(work.entry.number)
            self._scoring.submit(work, sample, self)
        else:
            self._fail(work, sample, FailureKind.INFRA, rollout.error or f"it ended by {reason}")

    def scored(
        self,
        work: GroupWork,
        sample: SampleEntry,
        attempt: int,
        result: RewardResult | None,
        error: RewardError | None,
    ) -> None:
        """A reward came, or could not be computed. One that nobody waits for any more is dropped."""
        self._signs.reward_at = self._signs.progress_at = self.loop.now()
        if not self._awaits_reward(work, sample, attempt):
            return
        if error is not None:
            self.metrics.reward_errors[error.kind] += 1
            self._fail(work, sample, FailureKind.DATA, str(error))
        else:
            if result is not None:
                self.metrics.rewarded(result.metrics.items())
            self.collection.score(work, sample, result)
        self.changed()

    def group_scored(
        self,
        work: GroupWork,
        attempts: dict[int, int],
        results: list[RewardResult] | None,
        error: RewardError | None,
    ) -> None:
        """A group's rewards came, or could not be computed."""
        self._signs.reward_at = self._signs.progress_at = self.loop.now()
        samples = [work.entry.samples.get(index) for index in attempts]
        current = [
            sample
            for sample, attempt in zip(samples, attempts.values(), strict=True)
            if sample is not None and self._awaits_reward(work, sample, attempt)
        ]
        if len(current) < len(attempts) or len(current) < len(work.entry.samples):
            return  # another call is made for what the group has become
        if results is None:
            assert error is not None
            self.metrics.reward_errors[error.kind] += 1
            work.num_reward_failures += 1
            work.scored_as = None
            if work.num_reward_failures > self.config.max_data_retries:
                self.collection.drop_group(work, str(error))
            else:
                self._scoring.submit_group(work, self)
        else:
            for sample, result in zip(current, results, strict=True):
                self.metrics.rewarded(result.metrics.items())
                self.collection.score(work, sample, result)
        self.changed()

    def _awaits_reward(self, work: GroupWork, sample: SampleEntry, attempt: int) -> bool:
        return (
            self.collection.works.get(work.entry.number) is work
            and work.entry.samples.get(sample.index) is sample
            and sample.state is SampleState.REWARDING
            and sample.attempt == attempt
        )

    def _fail(self, work: GroupWork, sample: SampleEntry, kind: FailureKind, error: str) -> None:
        self.metrics.failures[str(kind)] += 1
        self.collection.fail(work, sample, kind, error)
        self.changed()
        if self.collection.works.get(work.entry.number) is work:
            self._scoring.submit_group(work, self)  # the others may have been waiting for this one

    def _samples_of(self, item: WorkItem, worker_id: str) -> list[tuple[GroupWork, SampleEntry]]:
        return [
            (self.collection.works[sample.group.number], sample)
            for sample in self.collection.ledger.running_on(worker_id)
            if sample.group.group_id == item.group_id
            and sample.attempt == item.attempt
            and 0 <= sample.index - item.sample_index < item.size
        ]

    # ----------------------------------------------------------------------------------------------------- looking

    def _tick(self) -> None:
        now = self.loop.now()
        self.refresh()
        every = self.config.snapshot_every_s
        if every is not None and now - self._snapshot_at >= every:
            self._snapshot_at = now
            for seat in self.roster.seats.values():
                if seat.state is WorkerState.HEALTHY and self._load(seat.worker_id):
                    seat.link.snapshot()
        for seat in list(self.roster.seats.values()):
            if seat.suspect_since is not None and now - seat.suspect_since > self.config.suspect_limit_s:
                seat.suspect_since = None
                limit = self.config.suspect_limit_s
                self.on_lost(seat.worker_id, WorkerDiedError(f"nothing was heard of it (suspect_limit_s={limit:g})"))
        ledger = self.collection.ledger
        if not ledger.num_samples(SampleState.RUNNING):
            self._signs.progress_at = now
        if not ledger.num_samples(SampleState.REWARDING):
            self._signs.reward_at = now
        if any(True for _ in self.roster.serving(self.version)):
            self._signs.serving_at = now
        why = self.stalled()
        if why is not None and self.handout.num_waiting:
            self.handout.refuse_all(RolloutStalledError(why, self.status()))
        self.changed()
        self.loop.call_later(self.loop.tick_s, self._tick)

    def stalled(self) -> str | None:
        """What is wrong with the fleet, if something is."""
        ledger = self.collection.ledger
        return stall(
            self._signs,
            self.config,
            now=self.loop.now(),
            num_running=ledger.num_samples(SampleState.RUNNING),
            num_rewarding=ledger.num_samples(SampleState.REWARDING),
            num_barren=self.collection.num_barren,
            last_failure=self.collection.last_failure,
        )

    def _look_at(self, seat: Seat) -> None:
        health = seat.worker.health()
        moved = health.version > seat.version or health.state is not seat.state
        if not seat.is_lost:
            seat.state = health.state
        seat.version, seat.incarnation = health.version, health.incarnation
        self._seen_version = max(self._seen_version, health.version)
        if seat.state is not WorkerState.SUSPECT:
            seat.suspect_since = None
        elif seat.suspect_since is None:
            seat.suspect_since = self.loop.now()
        if health.reason is not None:
            seat.reason = health.reason
        if health.engine is not None:
            if health.engine.generated_tokens > seat.num_tokens:
                self._signs.progress_at = self.loop.now()
            seat.num_tokens, seat.tokens_per_s = health.engine.generated_tokens, health.engine.tokens_per_s
        if moved:
            self.roster.touch(seat.worker_id)
            self.changed()

    def _leave_alone(self, worker_id: str, reason: str) -> None:
        seat = self.roster.seats.get(worker_id)
        if seat is not None:
            seat.busy_until = self.loop.now() + BUSY_S
            seat.reason = reason
            self.loop.call_later(BUSY_S, self.changed)

    def _load(self, worker_id: str) -> int:
        return self.collection.ledger.num_running_on(worker_id) + self.evaluations.num_on(worker_id)

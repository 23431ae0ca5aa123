"""The workers of a fleet as the controller deals with them: they join and leave, bring results, refuse, die, and are replaced.

Everything here runs on the controller's loop, as `rollout.fleet.coordinator` does.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from rollout.batches.collection import Collection
from rollout.batches.entries import SampleEntry
from rollout.batches.group_work import GroupWork
from rollout.batches.groups import Failure, FailureKind
from rollout.batches.metrics import RolloutMetrics
from rollout.errors import InvalidRequestError, WorkerDiedError, WorkerIrreplaceableError
from rollout.fleet.evaluation import Evaluations
from rollout.fleet.judging import Judge
from rollout.fleet.protocols import FleetWorker, Loop
from rollout.fleet.roster import Roster, Seat
from rollout.fleet.supervisor import Supervisor
from rollout.rollout_config import RolloutConfig
from rollout.types import Rollout
from rollout.workers.wire import Finished, WorkerState, WorkItem

log = logging.getLogger("rollsync")


class Workforce:
    """See `rollout.fleet.protocols.WorkerEvents`."""

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        collection: Collection,
        evaluations: Evaluations,
        judge: Judge,
        supervisor: Supervisor,
        metrics: RolloutMetrics,
        config: RolloutConfig,
        *,
        changed: Callable[[], None],
        on_extinct: Callable[[WorkerDiedError], None],
    ) -> None:
        """`changed`: something is possible now that was not. `on_extinct`: the last worker has died for good."""
        self._loop = loop
        self._roster = roster
        self._collection = collection
        self._evaluations = evaluations
        self._judge = judge
        self._supervisor = supervisor
        self._metrics = metrics
        self._config = config
        self._changed = changed
        self._on_extinct = on_extinct

    def add_worker(self, worker: FleetWorker) -> None:
        """It takes part from now on."""
        health = worker.health()
        seat = Seat(
            worker=worker,
            link=self._loop.link(worker, self),
            state=health.state,
            incarnation=health.incarnation,
            version=health.version,
            told_version=health.version,  # what it took before it came is no news
        )
        self._roster.add(seat)
        self._supervisor.look_at(seat)
        self._changed()

    def remove_worker(self, worker_id: str, *, migrate: bool) -> Seat:
        """It takes nothing more. `migrate`: what it runs goes on elsewhere, and it is out; else it is still in until that
        has ended."""
        seat = self._roster.seats.get(worker_id)
        if seat is None:
            raise InvalidRequestError(f"no worker {worker_id!r} in the fleet, which has {sorted(self._roster.seats)}")
        seat.is_leaving = True
        if migrate:
            for sample in self._collection.ledger.running_on(worker_id):
                self._collection.requeue(sample)
            self._evaluations.lost(worker_id, WorkerDiedError(f"worker {worker_id} was removed"))
            self._roster.remove(worker_id)
            seat.link.close()
        self._changed()
        return seat

    def on_results(self, worker_id: str, results: Sequence[Finished]) -> None:
        """Results came, or the worker changed."""
        seat = self._roster.seats.get(worker_id)
        if seat is not None and (
            not results or any((r.rollout.max_version or 0) > self._supervisor.newest_version for r in results)
        ):
            self._supervisor.look_at(seat)
        for finished in results:
            if self._evaluations.take(finished):
                continue
            taken = self._collection.accept(finished)
            if taken is not None:
                self._judge.judge(*taken)
        if results:
            # an engine that was given up has results too: each is an ERROR, with the tokens that it was resumed from
            if seat is not None and not seat.is_lost and any(finished.rollout.has_ended_well for finished in results):
                seat.num_deaths = 0
            self._roster.touch(worker_id)
            self._supervisor.saw_progress()
        self._changed()

    def on_refused(self, worker_id: str, refused: Sequence[tuple[WorkItem, Exception]]) -> None:
        """Items that can never work fail; others wait for another worker, or for this one."""
        for item, error in refused:
            hopeless = isinstance(error, InvalidRequestError)
            if not hopeless:
                self._supervisor.leave_alone(worker_id, str(error))
            if self._evaluations.refused(item, error):
                continue
            for work, sample in self._samples_of(item, worker_id):
                if not hopeless:
                    self._collection.requeue(sample)
                elif sample.worker_id is not None:  # else its group was dropped with the sample before it
                    self._judge.fail(work, sample, Failure(kind=FailureKind.HOPELESS, reason=str(error)))
        self._roster.touch(worker_id)
        self._changed()

    def on_lost(self, worker_id: str, error: Exception) -> None:
        """It died: what it ran goes on elsewhere, from the last snapshot of it. A death that is known already is no other:
        supervisor and link may both notice it."""
        seat = self._roster.seats.get(worker_id)
        if seat is None or seat.is_lost:
            return
        self._metrics.num_worker_deaths += 1
        seat.num_deaths += 1
        seat.is_lost = True
        failure = Failure(kind=FailureKind.INFRA, reason=str(error))
        for sample in self._collection.ledger.running_on(worker_id):
            if sample.worker_id is not None:  # else its group was dropped with the sample before it
                self._judge.fail(self._collection.works[sample.group.number], sample, failure)
        self._evaluations.lost(worker_id, error)
        self._replace(seat, error)

    def on_restart_failed(self, worker_id: str, error: Exception) -> None:
        """Another try, if there is one left, after a longer wait: it counts as another death in the row."""
        seat = self._roster.seats.get(worker_id)
        if seat is not None:
            seat.num_deaths += 1
            self._replace(seat, error)

    def on_restarted(self, worker_id: str) -> None:
        """It serves again once it holds the fleet's version."""
        seat = self._roster.seats.get(worker_id)
        if seat is not None:
            seat.num_tokens, seat.suspect_since, seat.is_lost = 0, None, False
            self._supervisor.look_at(seat)
            self._changed()

    def on_snapshot(self, worker_id: str, rollouts: Sequence[Rollout]) -> None:
        """What its samples have so far."""
        for rollout in rollouts:
            # nobody who is behind it may go on from it
            self._supervisor.saw_version(rollout.max_version or 0)
            self._collection.note_partial(rollout, worker_id)

    def _replace(self, seat: Seat, error: Exception) -> None:
        log.warning("worker %s is lost: %s", seat.worker_id, error)
        seat.reason = str(error)
        seat.tokens_per_s = 0.0
        is_replaceable = not isinstance(error, WorkerIrreplaceableError)
        if is_replaceable and seat.num_restarts < self._config.worker_restarts:
            seat.num_restarts += 1
            seat.state = WorkerState.RESTARTING
            wait_s = self._supervisor.restart_wait_s(seat)
            if wait_s:
                self._loop.call_later(wait_s, partial(self._restart, seat))
            else:
                self._restart(seat)
        else:
            seat.state = WorkerState.DEAD
            if self._roster.is_deserted:
                failure = WorkerDiedError(f"no worker is left; the last one, {seat.worker_id}: {error}")
                failure.__cause__ = error
                self._on_extinct(failure)
        self._roster.touch(seat.worker_id)
        self._changed()

    def _restart(self, seat: Seat) -> None:
        if self._roster.seats.get(seat.worker_id) is seat:  # else it was removed meanwhile
            seat.link.restart(self._supervisor.newest_version)

    def _samples_of(self, item: WorkItem, worker_id: str) -> list[tuple[GroupWork, SampleEntry]]:
        return [
            (self._collection.works[sample.group.number], sample)
            for sample in self._collection.ledger.running_on(worker_id)
            if sample.group.group_id == item.group_id
            and sample.attempt == item.attempt
            and 0 <= sample.index - item.sample_index < item.size
        ]

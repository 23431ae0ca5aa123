"""Looking at workers: what nobody tells of, such as a version that moved, a worker that stands still, a fleet that is stuck."""

from collections.abc import Callable

from rollout.batches.collection import Collection
from rollout.batches.entries import SampleState
from rollout.errors import RolloutError, WorkerDiedError
from rollout.fleet.protocols import Loop
from rollout.fleet.roster import Roster, Seat
from rollout.fleet.watchdogs import Outstanding, Signs, is_barren, stall
from rollout.rollout_config import RolloutConfig
from rollout.status import EngineState, UpdateRecord
from rollout.workers.wire import WorkerState

BUSY_S = 0.25
"""How long a worker that refused an item is left alone."""
RESTART_WAIT_S = 1.0
"""How long a worker that died again, with no token in between, stays dead; twice as long after each further death."""
LONGEST_RESTART_WAIT_S = 10.0


class Supervisor:
    """Reads the workers' health at each tick, and when something of theirs has come."""

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        collection: Collection,
        config: RolloutConfig,
        changed: Callable[[], None],
        on_update: Callable[[str, UpdateRecord], None],
    ) -> None:
        """`changed`: something is possible now that was not. `on_update`: a worker's engine has taken a version."""
        self.newest_version = 0
        """That any worker was ever seen at, or any token to be of. It never goes back."""
        self._loop = loop
        self._roster = roster
        self._collection = collection
        self._config = config
        self._changed = changed
        self._on_update = on_update
        now = loop.now()
        self._signs = Signs(progress_at=now, reward_at=now, serving_at=now)
        self._snapshot_at = now

    def tick(self) -> list[tuple[str, RolloutError]]:
        """Looks at everything. Returns the workers that are dead, or have stood still for too long, and what is to be said of
        them."""
        now = self._loop.now()
        self.look_at_all()
        every = self._config.snapshot_every_s
        if every is not None and now - self._snapshot_at >= every:
            self._snapshot_at = now
            self._take_snapshots()
        ledger = self._collection.ledger
        if not ledger.num_samples(SampleState.RUNNING, SampleState.QUEUED):
            self._signs.progress_at = now
        if not ledger.num_samples(SampleState.REWARDING):
            self._signs.reward_at = now
        return [*self._dead(), *self._standing_still(now)]

    def look_at_all(self) -> None:
        """Every worker."""
        for seat in self._roster.seats.values():
            self.look_at(seat)

    def look_at(self, seat: Seat) -> None:
        """One worker's health, without asking it."""
        health = seat.worker.health()
        moved = health.version > seat.version
        if not seat.is_lost:
            moved = moved or health.state is not seat.state
            seat.state = health.state
        update = None if health.engine is None else health.engine.last_update
        if update is not None and update.version > seat.told_version:
            seat.told_version = update.version
            self._on_update(seat.worker_id, update)
        seat.version, seat.incarnation = health.version, health.incarnation
        self.saw_version(health.version)
        if seat.state is not WorkerState.SUSPECT:
            seat.suspect_since = None
        elif seat.suspect_since is None:
            seat.suspect_since = self._loop.now()
        fence = None if health.engine is None else health.engine.fence
        if health.reason is not None:
            seat.reason = health.reason
        elif health.engine is not None and health.engine.state is not EngineState.RUNNING:
            seat.reason = f"its engine is {health.engine.state}" + (f": {fence.reason}" if fence is not None else "")
        elif seat.fence is not None:
            seat.reason = None  # it was repaired
        seat.fence = fence
        if health.engine is not None:
            if not seat.is_lost and health.engine.generated_tokens > seat.num_tokens:
                seat.num_deaths = 0
                self.saw_progress()
            seat.num_tokens, seat.tokens_per_s = health.engine.generated_tokens, health.engine.tokens_per_s
        if self._roster.serves(seat, self.newest_version):
            self._signs.serving_at = self._loop.now()
        if moved:
            self._roster.touch(seat.worker_id)
            self._changed()

    def leave_alone(self, worker_id: str, reason: str) -> None:
        """It refused an item: for a moment it is given nothing."""
        seat = self._roster.seats.get(worker_id)
        if seat is not None:
            seat.busy_until = self._loop.now() + BUSY_S
            seat.reason = reason
            self._loop.call_later(BUSY_S, self._changed)

    def restart_wait_s(self, seat: Seat) -> float:
        """How long a worker that died is to stay dead: not at all after the first of several deaths in a row."""
        if seat.num_deaths < 2:
            return 0.0
        return min(RESTART_WAIT_S * 2.0 ** (seat.num_deaths - 2), LONGEST_RESTART_WAIT_S)

    def saw_version(self, version: int) -> None:
        """Somebody holds it."""
        self.newest_version = max(self.newest_version, version)

    def saw_progress(self) -> None:
        """Something has moved."""
        self._signs.progress_at = self._loop.now()

    def saw_reward(self) -> None:
        """A reward came, or the news that there is none."""
        self._signs.reward_at = self._signs.progress_at = self._loop.now()

    def outside_change(self) -> str | None:
        """Why every engine of the fleet is fenced, if it is that its weights were changed outside `update()`: what no
        publish has failed at, none comes to repair."""
        fences = [seat.fence for seat in self._roster.seats.values()]
        if not fences or not all(fence is not None and fence.is_outside_change for fence in fences):
            return None
        return next(fence.reason for fence in fences if fence is not None)

    @property
    def is_barren(self) -> bool:
        """Whether so many groups in a row ended unused that it is a stall."""
        return is_barren(self._collection.num_barren, self._config)

    def stalled(self) -> str | None:
        """What is wrong with the fleet, if something is."""
        outstanding = Outstanding(
            now=self._loop.now(),
            num_running=self._collection.ledger.num_samples(SampleState.RUNNING),
            num_queued=self._collection.ledger.num_samples(SampleState.QUEUED),
            num_rewarding=self._collection.ledger.num_samples(SampleState.REWARDING),
            num_barren=self._collection.num_barren,
            last_failure=self._collection.last_failure,
            is_deserted=self._roster.is_deserted,
            not_serving=self._why_not_serving(),
        )
        return stall(self._signs, outstanding, self._config)

    def _why_not_serving(self) -> str | None:
        seats = [s for s in self._roster.seats.values() if not self._roster.serves(s, self.newest_version)]
        return next((f"{seat.worker_id}: {seat.reason}" for seat in seats if seat.reason is not None), None)

    def _take_snapshots(self) -> None:
        for seat in self._roster.seats.values():
            if seat.state is WorkerState.HEALTHY and self._collection.ledger.num_running_on(seat.worker_id):
                seat.link.snapshot()

    def _dead(self) -> list[tuple[str, RolloutError]]:
        # one whose process lives and whose engine does not answers its polls, and so says nothing of it by itself
        seats = [s for s in self._roster.seats.values() if s.state is WorkerState.DEAD and not s.is_lost]
        return [(seat.worker_id, WorkerDiedError(f"{seat.worker_id} is dead: {seat.reason}")) for seat in seats]

    def _standing_still(self, now: float) -> list[tuple[str, RolloutError]]:
        limit = self._config.suspect_limit_s
        found: list[tuple[str, RolloutError]] = []
        for seat in self._roster.seats.values():
            if seat.suspect_since is not None and now - seat.suspect_since > limit:
                seat.suspect_since = None
                error = WorkerDiedError(f"nothing was heard of {seat.worker_id} for suspect_limit_s={limit:g}")
                found.append((seat.worker_id, error))
        return found

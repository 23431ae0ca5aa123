"""Hand-outs: who waits for a batch, and which batches are out."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from rollout.batches.collection import Collection
from rollout.batches.entries import Ending, GroupEntry, GroupState
from rollout.batches.lease import Lease
from rollout.batches.metrics import RolloutMetrics
from rollout.errors import PromptsExhaustedError, StaleRolloutsError
from rollout.rollout_config import RolloutConfig


class HandOut:
    """Resolves the futures of those who wait with leases, in the order of asking."""

    def __init__(
        self,
        collection: Collection,
        config: RolloutConfig,
        metrics: RolloutMetrics,
        now: Callable[[], float],
        lease_ends: Callable[[Lease, bool], None],
    ) -> None:
        """`lease_ends`: whoever had a lease says how it ended; called on any thread."""
        self.leases: dict[int, Lease] = {}
        """Those that are out."""
        self.handed_version: int | None = None
        """The fleet's version at the last hand-out."""
        self.trained_version: int | None = None
        """The newest version that a batch which was trained on was handed out at."""
        self.num_trained = 0
        """Batches that were trained on, over the whole run."""
        self._waiting: deque[Future[Lease]] = deque()
        self._collection = collection
        self._config = config
        self._policy = config.staleness_policy()
        self._metrics = metrics
        self._now = now
        self._lease_ends = lease_ends
        self._num_leases = 0
        self._not_before: tuple[int, bool, int] | None = None  # (version, is_last, changes) of the next useful look

    @property
    def num_waiting(self) -> int:
        """How many wait for a batch."""
        while self._waiting and self._waiting[0].cancelled():
            self._waiting.popleft()
        return len(self._waiting)

    @property
    def is_awaited(self) -> bool:
        """Somebody waits, and nobody has a batch to train on meanwhile."""
        return bool(self.num_waiting) and not self.leases

    def ask(self, future: "Future[Lease]") -> None:
        """The future waits for a batch; cancel it to wait no more."""
        self._waiting.append(future)

    def run(self, version: int, *, is_last: bool, is_draining: bool) -> bool:
        """Hands out what is complete; whether that was anything. `is_last`: no other group will be admitted, at the end of
        the prompts or while it is draining."""
        handed = False
        while self.num_waiting:
            ledger = self._collection.ledger
            if ledger.num_groups(GroupState.READY) < self._config.prompts_per_step and not is_last:
                break
            if self._is_too_soon(version, is_last):
                break
            ahead = self._collection.ahead()
            if is_last and not ahead:
                if self.leases:
                    break  # they may come back
                self.refuse_all(self._exhausted(is_draining))
                break
            if self._config.on_stale == "raise":
                stale = [entry.group_id for entry in ahead if self.is_too_old(entry, version)]
                if stale:
                    self.refuse_all(self._too_stale(stale, version))
                    break
            pick = self._policy.pick(ahead, version, is_last=is_last)
            if not pick.groups:
                self._not_before = (version, is_last, self._num_changes() + pick.missing)
                break
            self._not_before = None
            future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(self._lease(pick.groups, version))
                handed = True
        return handed

    def refuse_all(self, error: BaseException) -> None:
        """Whoever waits gets the error."""
        while self._waiting:
            future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def end(self, lease: Lease, trained: bool) -> bool:
        """A lease came back; whether it was out."""
        if self.leases.get(lease.number) is not lease:
            return False  # of before a checkpoint was loaded
        del self.leases[lease.number]
        if trained:
            self.trained_version = max(lease.version, self.trained_version or 0)
            self.num_trained += 1
        for entry in lease.entries:
            if trained:
                self._collection.acknowledge(entry, self.num_trained)
            else:
                self._collection.ledger.give_back(entry)
        return True

    def is_too_old(self, entry: GroupEntry, version: int) -> bool:
        """What is known of its tokens is older than it may be."""
        oldest = self._collection.oldest_version(entry)
        return oldest is not None and self._policy.is_too_old(oldest, version)

    def _is_too_soon(self, version: int, is_last: bool) -> bool:
        """Too few groups have changed for another answer."""
        looked = self._not_before
        return looked is not None and looked[:2] == (version, is_last) and self._num_changes() < looked[2]

    def _num_changes(self) -> int:
        """Grows by one with each group that becomes ready, or ends."""
        ledger = self._collection.ledger
        return ledger.num_groups(GroupState.READY) + sum(ledger.ended["groups"].values())

    def _lease(self, chosen: list[GroupEntry], version: int) -> Lease:
        now = self._now()
        complete_s = [now - self._collection.works[entry.number].admitted_at for entry in chosen]
        groups = self._collection.lease(chosen, version)
        lease = Lease(self._num_leases, groups, chosen, version=version, since=now, end=self._lease_ends)
        self.leases[lease.number] = lease
        self._num_leases += 1
        self.handed_version = version
        self._metrics.handed_out(groups, complete_s)
        return lease

    def _exhausted(self, is_draining: bool) -> PromptsExhaustedError:
        if is_draining:
            return PromptsExhaustedError(
                "the controller drains, and all that it had admitted has ended; resume() goes on"
            )
        ended = self._collection.ledger.ended["prompts"]
        says = f"all prompts have ended: {', '.join(f'{count} {ending}' for ending, count in ended.items() if count)}"
        if ended[Ending.FAILED] and self._collection.last_failure is not None:
            says += f"; the last failure: {self._collection.last_failure}"
        if ended[Ending.CONSUMED] and self._config.num_epochs is not None:  # else another epoch would end as this one
            says += "; for more, RolloutConfig(num_epochs=...), or None for no end"
        error = PromptsExhaustedError(says)
        error.__cause__ = self._collection.last_cause if ended[Ending.FAILED] else None
        return error

    def _too_stale(self, stale: list[str], version: int) -> StaleRolloutsError:
        return StaleRolloutsError(
            f"{len(stale)} groups ({', '.join(sorted(stale)[:3])}, ...) are more than max_staleness="
            f"{self._config.max_staleness} versions older than version {version}: more than one version was published for "
            'each batch. Publish once a batch, raise max_staleness, or let them be generated again: on_stale="expire"'
        )

"""Who gets the next sample, and whether another group may begin: oldest work first, to the least loaded worker."""

from collections.abc import Callable, Sequence

from rollout.batches.collection import Collection
from rollout.batches.entries import GroupEntry, GroupState, SampleEntry, SampleState
from rollout.batches.group_work import GroupWork
from rollout.batches.prompts import Prompts
from rollout.batches.staleness import Moment, room_in_tokens
from rollout.fleet.roster import Roster
from rollout.fleet.watchdogs import is_barren
from rollout.rollout_config import RolloutConfig
from rollout.workers.wire import WorkItem

Outbox = dict[str, list[WorkItem]]
"""Items by worker id."""


class Admission:
    """Turns queued samples and fresh prompts into items for workers, as far as there is room."""

    def __init__(
        self,
        collection: Collection,
        roster: Roster,
        prompts: Prompts,
        config: RolloutConfig,
        now: Callable[[], float],
    ) -> None:
        self._collection = collection
        self._roster = roster
        self._prompts = prompts
        self._config = config
        self._policy = config.staleness_policy()
        self._now = now

    def run(self, outbox: Outbox, *, version: int, handed_version: int | None, is_awaited: bool) -> None:
        """Everything that may go out now: what is queued, then new groups."""
        self.dispatch(outbox, version)
        while self._has_room(version, handed_version, is_awaited):
            if self._roster.least_loaded(self._config.group_size, version) is None:
                return
            prompt = self._prompts.next()
            if prompt is None:
                return
            work = self._collection.admit(prompt, version=version, now=self._now())
            if work is not None:
                self._send(work, list(work.entry.samples.values()), outbox, version)

    def dispatch(self, outbox: Outbox, version: int) -> None:
        """What is queued goes out."""
        ledger = self._collection.ledger
        if not ledger.num_samples(SampleState.QUEUED):
            return
        by_group: dict[int, list[SampleEntry]] = {}
        for sample in ledger.samples(SampleState.QUEUED):
            by_group.setdefault(sample.group.number, []).append(sample)
        for number in sorted(by_group):  # oldest first
            work = self._collection.works[number]
            queued = sorted(by_group[number], key=lambda sample: sample.index)
            # a group stays on one worker, and is prefilled once; what is left of one goes wherever there is room
            parts = [queued] if len(queued) == len(work.entry.samples) else [[sample] for sample in queued]
            for part in parts:
                if not self._send(work, part, outbox, version):
                    return

    def _has_room(self, version: int, handed_version: int | None, is_awaited: bool) -> bool:
        if is_barren(self._collection.num_barren, self._config):
            return False  # the watchdog has its say first
        moment = Moment(
            version=version,
            handed_version=handed_version,
            num_ahead=self._collection.ledger.num_groups(GroupState.OPEN, GroupState.READY),
            is_awaited=is_awaited,
        )
        if self._policy.room(moment) <= 0:
            return False
        if self._config.max_tokens_ahead is None:
            return True
        return room_in_tokens(
            self._collection.ahead(),
            self._cost,
            max_tokens=self._config.max_tokens_ahead,
            cost_of_next=self._config.group_size * self._config.sampling.max_new_tokens,
            prompts_per_step=self._config.prompts_per_step,
        )

    def _cost(self, entry: GroupEntry) -> int:
        work = self._collection.works[entry.number]
        generated = sum(len(rollout.token_ids) for rollout in work.rollouts.values())
        running = len(entry.samples) - len(work.rollouts)
        return generated + running * self._config.sampling.max_new_tokens

    def _send(self, work: GroupWork, samples: Sequence[SampleEntry], outbox: Outbox, version: int) -> bool:
        seat = self._roster.least_loaded(len(samples), version)
        if seat is None:
            return False
        items = self._collection.dispatch(work, samples, seat.worker_id, seat.incarnation)
        outbox.setdefault(seat.worker_id, []).extend(items)
        self._roster.touch(seat.worker_id)
        return True

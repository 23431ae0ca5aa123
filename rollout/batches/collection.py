"""The rollouts of a run on their way from prompt to batch: what each event makes of samples and groups.

Knows nothing of workers, threads or time; the coordinator tells it what came and sends out what it queues.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.batches.entries import Ending, GroupEntry, GroupState, SampleEntry, SampleState
from rollout.batches.group_work import GroupWork, parse_sample_id
from rollout.batches.groups import (
    Failure,
    FailureKind,
    KeepGroup,
    RolloutGroup,
    Verdict,
    is_complete,
    oldest_version,
)
from rollout.batches.ledger import Ledger
from rollout.batches.prompts import Prompt
from rollout.batches.rewards import RewardResult
from rollout.batches.staleness import Timeline
from rollout.rollout_config import RolloutConfig
from rollout.types import Rollout
from rollout.workers.wire import Finished, WorkItem


class Collection:
    """The ledger together with the rollouts it accounts for."""

    def __init__(
        self,
        config: RolloutConfig,
        keep_group: KeepGroup | None,
        on_end: Callable[[GroupWork, Ending], None],
    ) -> None:
        """`on_end`: a group has ended, and is in no book any more."""
        self.ledger = Ledger()
        self.works: dict[int, GroupWork] = {}  # by prompt number
        self.timeline = Timeline()
        self.cancelled: list[tuple[str, str]] = []
        """(worker, sample) of what runs and is not wanted any more; the coordinator tells the workers."""
        self.num_barren = 0
        """Groups that ended unused since the last one that was ready."""
        self.last_failure: str | None = None
        self.last_cause: BaseException | None = None
        """What the user's own function raised, if that was the last failure."""
        self._config = config
        self._failures = config.failure_policy()
        self._keep_group = keep_group
        self._on_end = on_end

    # ------------------------------------------------------------------------------------------- there: to a worker

    def admit(self, prompt: Prompt, *, version: int, now: float) -> GroupWork | None:
        """A prompt's group, queued. None if the prompt cannot be generated from: its samples have failed."""
        entry = self.ledger.issue(prompt.number, self._config.group_size, version=version)
        work = GroupWork(entry=entry, prompt=prompt, admitted_at=now)
        self.works[prompt.number] = work
        if prompt.error is None:
            return work
        self._note_failure(prompt.error, None)
        self._close(work, Ending.FAILED)
        return None

    def dispatch(
        self, work: GroupWork, samples: Sequence[SampleEntry], worker_id: str, incarnation: int
    ) -> list[WorkItem]:
        """Queued samples of one group go to a worker: as one item, prefilled once, if they are the whole group and
        start together."""
        attempts = {self.ledger.dispatch(sample, worker_id, incarnation) for sample in samples}
        together = len(samples) > 1 and len(attempts) == 1 and not any(s.index in work.partials for s in samples)
        together = together and [s.index for s in samples] == list(range(len(samples)))
        together = together and not any(s.num_data_failures for s in samples)
        if together:
            return [self._item(work, samples[0], work.entry.group_id, size=len(samples))]
        return [self._item(work, sample, sample.sample_id, size=1) for sample in samples]

    def _item(self, work: GroupWork, sample: SampleEntry, request_id: str, *, size: int) -> WorkItem:
        seed = self._config.seed_of(work.entry.number, work.entry.round, sample.num_data_failures)
        return WorkItem(
            request_id=request_id,
            prompt_ids=work.prompt.prompt_ids,
            params=replace(self._config.sampling, seed=seed),
            attempt=sample.attempt,
            size=size,
            group_id=work.entry.group_id,
            prompt_id=work.prompt.prompt_id,
            sample_index=sample.index,
            timeout_s=self._config.rollout_timeout_s,
            resume_from=work.partials.get(sample.index),
        )

    # ---------------------------------------------------------------------------------------- and back: its results

    def accept(self, finished: Finished) -> tuple[GroupWork, SampleEntry] | None:
        """The sample that a result is of, now REWARDING with its rollout noted; None for one that is late or doubled."""
        place = parse_sample_id(finished.rollout.rollout_id)
        if place is None:
            self.ledger.late += 1
            return None
        number, round, index = place
        sample = self.ledger.finish(number, round, index, finished.attempt, finished.incarnation)
        if sample is None:
            return None
        work = self.works[number]
        rollout = finished.rollout
        # columns stay here: they may be anything, and no worker needs them
        work.rollouts[index] = replace(rollout, metadata=work.prompt.metadata) if work.prompt.metadata else rollout
        return work, sample

    def score(self, work: GroupWork, sample: SampleEntry, result: RewardResult | None) -> None:
        """Its reward came; None: it has none. May make its group ready, or filter it."""
        if result is not None:
            rollout = work.rollouts[sample.index]
            metadata = {**rollout.metadata, **result.metadata} if result.metadata else rollout.metadata
            work.rollouts[sample.index] = replace(rollout, reward=result.reward, metadata=metadata)
            if result.metadata:
                work.reward_metadata[sample.index] = result.metadata
        work.partials.pop(sample.index, None)
        self.ledger.score(sample)
        self._settle(work)

    def fail(self, work: GroupWork, sample: SampleEntry, failure: Failure) -> Verdict:
        """A sample that runs or is to be rewarded came to nothing. It is queued again, or its group is settled without
        it, as the failure policy says."""
        self._note_failure(f"sample {sample.sample_id}: {failure.reason}", failure.cause)
        rollout = work.rollouts.pop(sample.index, None)
        if failure.kind is FailureKind.INFRA:
            if rollout is not None and _can_go_on(rollout, self._config.sampling.max_new_tokens):
                work.partials[sample.index] = replace(rollout, metadata={})  # columns stay here
        else:
            work.partials.pop(sample.index, None)
        verdict = self._failures.decide(sample, failure.kind, group_size=self._config.group_size)
        if verdict is Verdict.RETRY:
            if sample.state is SampleState.RUNNING:
                self.ledger.lose(sample)
            else:
                self.ledger.retry(sample)
            return verdict
        if verdict is Verdict.DROP:
            self._close(work, Ending.FAILED)
            return verdict
        self._note_cancelled([sample])
        self.ledger.fail(sample)
        work.partials.pop(sample.index, None)
        if verdict is Verdict.REFILL:
            self.ledger.add_sample(work.entry)
        else:
            self._settle(work)
        return verdict

    def requeue(self, sample: SampleEntry) -> None:
        """A worker did not take it, for no fault of its own."""
        self.ledger.lose(sample)

    def note_partial(self, rollout: Rollout, worker_id: str) -> None:
        """What a sample that runs there has so far."""
        place = parse_sample_id(rollout.rollout_id)
        work = None if place is None else self.works.get(place[0])
        if place is None or work is None or work.entry.round != place[1]:
            return
        sample = work.entry.samples.get(place[2])
        if sample is None or sample.state is not SampleState.RUNNING or sample.worker_id != worker_id:
            return
        if rollout.token_ids and _can_go_on(rollout, self._config.sampling.max_new_tokens):
            work.partials[place[2]] = rollout

    def drop_group(self, work: GroupWork, failure: Failure) -> None:
        """It fails as a whole."""
        self._note_failure(f"group {work.entry.group_id}: {failure.reason}", failure.cause)
        self._close(work, Ending.FAILED)

    # ------------------------------------------------------------------------------------------------------ batches

    def ahead(self) -> list[GroupEntry]:
        """The groups that are not handed out."""
        return list(self.ledger.groups(GroupState.OPEN, GroupState.READY))

    def oldest_version(self, entry: GroupEntry) -> int | None:
        """Of the tokens that are known of a group; as it counts today, after rewinds."""
        work = self.works[entry.number]
        oldest = oldest_version([*work.rollouts.values(), *work.partials.values()])
        return None if oldest is None else self.timeline.effective(oldest)

    def lease(self, entries: Iterable[GroupEntry], version: int) -> list[RolloutGroup]:
        """Ready groups are handed out."""
        groups: list[RolloutGroup] = []
        for entry in entries:
            work = self.works[entry.number]
            oldest = self.oldest_version(entry)
            self.ledger.lease(entry)
            work.lease_version = version
            groups.append(
                RolloutGroup(
                    group_id=entry.group_id,
                    prompt_id=work.prompt.prompt_id,
                    prompt_ids=work.prompt.prompt_ids,
                    rollouts=work.ordered(),
                    staleness=0 if oldest is None else version - oldest,
                    num_failed=entry.num_failed,
                    metadata=work.prompt.metadata,
                )
            )
        return groups

    def acknowledge(self, entry: GroupEntry, step: int) -> None:
        """A leased group was trained on, in the batch of this number."""
        self.ledger.acknowledge(entry)
        work = self.works[entry.number]
        work.step = step
        self._forget(work, Ending.CONSUMED)

    def expire(self, work: GroupWork, *, version: int, now: float) -> GroupWork | None:
        """A group is too old: its prompt gets another, which is returned, unless it has had its share of them."""
        entry = work.entry
        if entry.round >= self._config.max_requeues and not entry.returned:
            self._close(work, Ending.EXPIRED)
            return None
        self._note_cancelled(entry.samples.values())
        renewed = self.ledger.renew(entry, self._config.group_size, version=version)
        fresh = GroupWork(entry=renewed, prompt=work.prompt, admitted_at=now)
        self.works[renewed.number] = fresh
        self._on_end(work, Ending.EXPIRED)
        return fresh

    def cancel(self, work: GroupWork) -> None:
        """Nobody wants it any more."""
        self._close(work, Ending.CANCELLED)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe: the books, and every rollout that they hold."""
        return {
            "ledger": self.ledger.state_dict(),
            "rewinds": [list(rewind) for rewind in self.timeline.rewinds],
            "works": [work.to_json() for _, work in sorted(self.works.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[int, Prompt], *, now: float) -> None:
        """`prompts`: those of its works, read again. InvalidRequestError if they are others than they were."""
        works: dict[int, GroupWork] = {}
        ledger = Ledger.from_state_dict(state["ledger"])
        for saved in state["works"]:
            number = saved["number"]
            entry = ledger.group(number)
            assert entry is not None
            works[number] = GroupWork.from_json(saved, entry, prompts[number], now=now)
        self.ledger, self.works = ledger, works
        self.timeline = Timeline([(first, shift) for first, shift in state["rewinds"]])

    def settle(self) -> None:
        """After a checkpoint was loaded: groups that are complete and were not settled, since the filter had raised."""
        for entry in list(self.ledger.groups(GroupState.OPEN)):
            self._settle(self.works[entry.number])

    def rewind(self, saved_version: int, next_version: int) -> None:
        """The weights of `saved_version` are called `next_version` from now on."""
        self.timeline.rewind(saved_version, next_version)
        for work in self.works.values():
            work.entry.start_version = self.timeline.effective(work.entry.start_version)

    # ------------------------------------------------------------------------------------------------------- inside

    def _settle(self, work: GroupWork) -> None:
        if not is_complete(work.entry):
            return
        if self._keep_group is not None and not self._keep_group(work.ordered()):
            self._close(work, Ending.FILTERED)
            return
        self.ledger.ready(work.entry)
        self.num_barren = 0

    def _close(self, work: GroupWork, ending: Ending) -> None:
        self._note_cancelled(work.entry.samples.values())
        self.ledger.close(work.entry, ending)
        if ending is not Ending.CANCELLED:
            self.num_barren += 1
        self._forget(work, ending)

    def _forget(self, work: GroupWork, ending: Ending) -> None:
        del self.works[work.entry.number]
        self._on_end(work, ending)

    def _note_failure(self, failure: str, cause: BaseException | None) -> None:
        self.last_failure, self.last_cause = failure, cause

    def _note_cancelled(self, samples: Iterable[SampleEntry]) -> None:
        self.cancelled += [(s.worker_id, s.sample_id) for s in samples if s.worker_id is not None]


def _can_go_on(rollout: Rollout, max_new_tokens: int) -> bool:
    return 0 < len(rollout.token_ids) < max_new_tokens

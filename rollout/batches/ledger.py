"""The books of a fleet: every prompt, group, sample and attempt is in exactly one state.

    prompt   OPEN ──────────────────────────────────────────────► one of the five endings
    group    OPEN ──► READY ◄──► LEASED ──► CONSUMED             or FILTERED, EXPIRED, FAILED, CANCELLED
    sample   QUEUED ◄──► RUNNING ──► REWARDING ──► SCORED ──►    the same five endings
    attempt  RUNNING ──► FINISHED, LOST or CANCELLED

A sample's attempts count up from 0; a prompt's groups are its rounds (a second one replaces a first that expired).
Nothing here knows of rollouts, clocks or workers: the controller tells what happened and obeys what comes back. Not
thread-safe.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollout.batches.entries import (
    AttemptEnding,
    Ending,
    GroupEntry,
    GroupState,
    LedgerError,
    SampleEntry,
    SampleState,
    entry_from_state,
    entry_state,
)


class Ledger:
    """Counts of what has ended, entries of what has not.

        issued == consumed + filtered + expired + failed + cancelled + outstanding

    in samples, in groups and in prompts, after every event. What is outstanding is counted from the entries themselves;
    ended ones are only counted, so that memory does not grow with the length of a run.
    """

    def __init__(self) -> None:
        self.issued = {"prompts": 0, "groups": 0, "samples": 0, "attempts": 0}
        self.ended: dict[str, dict[Ending, int]] = {
            kind: dict.fromkeys(Ending, 0) for kind in ("prompts", "groups", "samples")
        }
        self.attempts_ended = dict.fromkeys(AttemptEnding, 0)
        self.late = 0
        """Results of an attempt that had been given up: dropped."""
        self.duplicates = 0
        """Results of an attempt that had one already: dropped."""
        self._groups: dict[int, GroupEntry] = {}  # by number: a prompt has one outstanding group
        self._by_group_state: dict[GroupState, dict[int, GroupEntry]] = {state: {} for state in GroupState}
        self._by_state: dict[SampleState, dict[tuple[int, int], SampleEntry]] = {state: {} for state in SampleState}
        self._by_worker: dict[str, dict[tuple[int, int], SampleEntry]] = {}  # those that run

    # ------------------------------------------------------------------------------------------------------ events

    def issue(self, number: int, size: int, *, version: int, round: int = 0) -> GroupEntry:
        """A prompt gets a group of `size` queued samples. `round` above 0: another group for a prompt that has none
        outstanding; the prompt is not counted again."""
        self._expect(number not in self._groups, f"prompt {number} has a group already")
        group = GroupEntry(number=number, round=round, start_version=version)
        self._groups[number] = group
        self._by_group_state[GroupState.OPEN][number] = group
        self.issued["groups"] += 1
        if round == 0:
            self.issued["prompts"] += 1
        for _ in range(size):
            self.add_sample(group)
        return group

    def add_sample(self, group: GroupEntry) -> SampleEntry:
        """One more queued sample in an open group, with the next index."""
        self._expect_group(group, GroupState.OPEN)
        sample = SampleEntry(group=group, index=group.num_issued)
        group.num_issued += 1
        group.samples[sample.index] = sample
        self._by_state[SampleState.QUEUED][group.number, sample.index] = sample
        self.issued["samples"] += 1
        return sample

    def dispatch(self, sample: SampleEntry, worker_id: str, incarnation: int) -> int:
        """It goes to a worker; returns the number of the attempt."""
        self._move(sample, SampleState.RUNNING, came_from=SampleState.QUEUED)
        sample.num_attempts += 1
        sample.worker_id = worker_id
        sample.incarnation = incarnation
        self._by_worker.setdefault(worker_id, {})[sample.group.number, sample.index] = sample
        self.issued["attempts"] += 1
        return sample.attempt

    def finish(self, number: int, round: int, index: int, attempt: int, incarnation: int) -> SampleEntry | None:
        """A result came. The sample, now REWARDING, if it is of the attempt that runs; else None: it is counted as late
        or as a duplicate, and must be dropped."""
        group = self._groups.get(number)
        # a round that expired while it ran has the sample indices of the one that replaced it
        sample = None if group is None or group.round != round else group.samples.get(index)
        if sample is None or (attempt + 1, incarnation) != (sample.num_attempts, sample.incarnation):
            self.late += 1
            return None
        if sample.state is not SampleState.RUNNING:
            if sample.state is SampleState.QUEUED:  # that attempt was lost
                self.late += 1
            else:
                self.duplicates += 1
            return None
        self._end_attempt(sample, AttemptEnding.FINISHED)
        self._move(sample, SampleState.REWARDING, came_from=SampleState.RUNNING)
        return sample

    def lose(self, sample: SampleEntry) -> None:
        """Its worker died or gave it up: it is queued again."""
        self._move(sample, SampleState.QUEUED, came_from=SampleState.RUNNING)
        self._end_attempt(sample, AttemptEnding.LOST)

    def retry(self, sample: SampleEntry) -> None:
        """Its result is of no use: it is queued again."""
        self._move(sample, SampleState.QUEUED, came_from=SampleState.REWARDING)

    def score(self, sample: SampleEntry) -> None:
        """Its reward came."""
        self._move(sample, SampleState.SCORED, came_from=SampleState.REWARDING)

    def fail(self, sample: SampleEntry) -> None:
        """It ends alone, FAILED; its group goes on without it."""
        self._expect_group(sample.group, GroupState.OPEN)
        self._end_sample(sample, Ending.FAILED)
        sample.group.num_failed += 1

    def ready(self, group: GroupEntry) -> None:
        """All its samples are scored, and there is at least one."""
        complete = group.samples and all(s.state is SampleState.SCORED for s in group.samples.values())
        self._expect(bool(complete), f"group {group.group_id} is not complete")
        self._move_group(group, GroupState.READY, came_from=GroupState.OPEN)

    def lease(self, group: GroupEntry) -> None:
        """It is handed out."""
        self._move_group(group, GroupState.LEASED, came_from=GroupState.READY)

    def give_back(self, group: GroupEntry) -> None:
        """Whoever had it did not use it."""
        self._move_group(group, GroupState.READY, came_from=GroupState.LEASED)
        group.returned = True

    def acknowledge(self, group: GroupEntry) -> None:
        """It was trained on: group, prompt and samples end, CONSUMED."""
        self._expect_group(group, GroupState.LEASED)
        self._end_group(group, Ending.CONSUMED)
        self.ended["prompts"][Ending.CONSUMED] += 1

    def close(self, group: GroupEntry, ending: Ending) -> None:
        """Group, prompt and the samples that have not ended end unused. A leased group cannot: it is somebody else's."""
        self._close(group, ending)
        self.ended["prompts"][ending] += 1

    def renew(self, group: GroupEntry, size: int, *, version: int) -> GroupEntry:
        """The group ends, EXPIRED, and its prompt gets another one: its next round."""
        self._close(group, Ending.EXPIRED)
        return self.issue(group.number, size, version=version, round=group.round + 1)

    # ----------------------------------------------------------------------------------------------------- reading

    def group(self, number: int) -> GroupEntry | None:
        """The outstanding group of a prompt."""
        return self._groups.get(number)

    def groups(self, *states: GroupState) -> Iterator[GroupEntry]:
        """The outstanding groups in these states (none: all), in no particular order."""
        for state in states or tuple(GroupState):
            yield from self._by_group_state[state].values()

    def samples(self, state: SampleState) -> Iterable[SampleEntry]:
        """The samples in one state, in the order in which they came to it."""
        return self._by_state[state].values()

    def running_on(self, worker_id: str) -> list[SampleEntry]:
        """The samples on one worker, in the order of dispatch."""
        return list(self._by_worker.get(worker_id, {}).values())

    def num_running_on(self, worker_id: str) -> int:
        """How many samples are on one worker."""
        return len(self._by_worker.get(worker_id, ()))

    def num_groups(self, *states: GroupState) -> int:
        """How many groups are in these states."""
        count = 0
        for state in states:
            count += len(self._by_group_state[state])
        return count

    def num_samples(self, *states: SampleState) -> int:
        """How many samples are in these states."""
        count = 0
        for state in states:
            count += len(self._by_state[state])
        return count

    def counts(self) -> dict[str, int]:
        """Samples by state and ending, and what `issued` of them came to: the terms of the promise."""
        outstanding = {str(state): self.num_samples(state) for state in SampleState}
        ended = {str(ending): count for ending, count in self.ended["samples"].items()}
        total = sum(outstanding.values())
        return {"issued": self.issued["samples"], "outstanding": total, **outstanding, **ended}

    def imbalance(self) -> int:
        """By how many samples the books are off; always 0."""
        outstanding = self.num_samples(*SampleState)
        return self.issued["samples"] - sum(self.ended["samples"].values()) - outstanding

    def check(self) -> None:
        """Reads everything and raises LedgerError if anything is in two states or in none. For tests; linear in what is
        outstanding."""
        for kind, outstanding in (
            ("prompts", len(self._groups)),
            ("groups", self.num_groups(*GroupState)),
            ("samples", self.num_samples(*SampleState)),
        ):
            total = sum(self.ended[kind].values()) + outstanding
            self._expect(self.issued[kind] == total, f"{self.issued[kind]} {kind} issued, {total} accounted for")
        attempts = sum(self.attempts_ended.values()) + self.num_samples(SampleState.RUNNING)
        self._expect(self.issued["attempts"] == attempts, f"{attempts} of {self.issued['attempts']} attempts known")
        held = [sample for group in self._groups.values() for sample in group.samples.values()]
        self._expect(len(held) == self.num_samples(*SampleState), "a sample is in no group, or in two")
        for state, members in self._by_state.items():
            self._expect(all(s.state is state for s in members.values()), f"a sample is not {state} but listed so")
        for sample in held:
            known = self._by_state[sample.state].get((sample.group.number, sample.index))
            self._expect(known is sample, f"sample {sample.sample_id} is in two states")
            running = sample in self.running_on(sample.worker_id) if sample.worker_id is not None else False
            self._expect(running == (sample.state is SampleState.RUNNING), f"{sample.sample_id} runs nowhere")
        on_workers = sum(len(running) for running in self._by_worker.values())
        self._expect(on_workers == self.num_samples(SampleState.RUNNING), "a worker runs what has ended")
        for number, group in self._groups.items():
            known_group = self._by_group_state[group.state].get(number)
            self._expect(known_group is group, f"group {group.group_id} is in two states")
            if group.state is not GroupState.OPEN:
                complete = group.samples and all(s.state is SampleState.SCORED for s in group.samples.values())
                self._expect(bool(complete), f"group {group.group_id} is {group.state} and not complete")

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe: everything, as of now."""
        return {
            "issued": dict(self.issued),
            "ended": {kind: {str(e): n for e, n in counts.items()} for kind, counts in self.ended.items()},
            "attempts_ended": {str(ending): count for ending, count in self.attempts_ended.items()},
            "late": self.late,
            "duplicates": self.duplicates,
            "groups": [entry_state(group) for group in sorted(self._groups.values(), key=lambda g: g.order)],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Ledger":
        """The books of a run that goes on elsewhere: attempts that ran are lost, leases were not acknowledged."""
        ledger = cls()
        ledger.issued = dict(state["issued"])
        ledger.ended = {kind: {Ending(e): n for e, n in counts.items()} for kind, counts in state["ended"].items()}
        ledger.attempts_ended = {AttemptEnding(e): n for e, n in state["attempts_ended"].items()}
        ledger.late, ledger.duplicates = state["late"], state["duplicates"]
        ran = sum(sample["state"] == SampleState.RUNNING for group in state["groups"] for sample in group["samples"])
        ledger.attempts_ended[AttemptEnding.LOST] += ran
        for group in map(entry_from_state, state["groups"]):
            ledger._groups[group.number] = group
            ledger._by_group_state[group.state][group.number] = group
            for sample in group.samples.values():
                ledger._by_state[sample.state][group.number, sample.index] = sample
        return ledger

    # ------------------------------------------------------------------------------------------------------ inside

    def _close(self, group: GroupEntry, ending: Ending) -> None:
        self._expect_group(group, GroupState.OPEN, GroupState.READY)
        self._end_group(group, ending)

    def _end_group(self, group: GroupEntry, ending: Ending) -> None:
        for sample in list(group.samples.values()):
            if sample.state is SampleState.RUNNING:
                self._end_attempt(sample, AttemptEnding.CANCELLED)
            self._end_sample(sample, ending)
        del self._by_group_state[group.state][group.number]
        del self._groups[group.number]
        self.ended["groups"][ending] += 1

    def _end_sample(self, sample: SampleEntry, ending: Ending) -> None:
        if sample.worker_id is not None:
            self._end_attempt(sample, AttemptEnding.LOST)
        self._expect(sample.group.samples.pop(sample.index, None) is sample, f"{sample.sample_id} has ended already")
        del self._by_state[sample.state][sample.group.number, sample.index]
        self.ended["samples"][ending] += 1

    def _end_attempt(self, sample: SampleEntry, ending: AttemptEnding) -> None:
        assert sample.worker_id is not None
        running = self._by_worker[sample.worker_id]
        del running[sample.group.number, sample.index]
        if not running:
            del self._by_worker[sample.worker_id]
        sample.worker_id = None
        self.attempts_ended[ending] += 1

    def _move(self, sample: SampleEntry, to: SampleState, *, came_from: SampleState) -> None:
        key = (sample.group.number, sample.index)
        if sample.state is not came_from or self._by_state[came_from].pop(key, None) is not sample:
            raise LedgerError(f"sample {sample.sample_id} is {sample.state}, or has ended; it cannot become {to}")
        sample.state = to
        self._by_state[to][key] = sample

    def _move_group(self, group: GroupEntry, to: GroupState, *, came_from: GroupState) -> None:
        self._expect_group(group, came_from)
        del self._by_group_state[came_from][group.number]
        group.state = to
        self._by_group_state[to][group.number] = group

    def _expect_group(self, group: GroupEntry, *states: GroupState) -> None:
        known = self._groups.get(group.number) is group
        if not known or group.state not in states:
            raise LedgerError(
                f"group {group.group_id} is {group.state if known else 'ended'}, not {' or '.join(states)}"
            )

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise LedgerError(what)

"""The books balance after every event, whatever the order of events."""

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.batches.entries import AttemptEnding, Ending, GroupEntry, GroupState, LedgerError, SampleEntry, SampleState
from rollout.batches.ledger import Ledger


def run_to(ledger: Ledger, group: GroupEntry, state: SampleState) -> None:
    """Takes every queued sample of the group to a state."""
    for sample in group.samples.values():
        attempt = ledger.dispatch(sample, "w0", 0)
        if state is not SampleState.RUNNING:
            assert ledger.finish(group.number, group.round, sample.index, attempt, 0) is sample
        if state is SampleState.SCORED:
            ledger.score(sample)


def test_a_groups_life_ends_in_consumed_samples() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 4, version=0)
    run_to(ledger, group, SampleState.SCORED)
    ledger.ready(group)
    ledger.lease(group)
    assert ledger.num_groups(GroupState.LEASED) == 1
    ledger.acknowledge(group)
    assert ledger.ended["samples"][Ending.CONSUMED] == 4
    assert ledger.ended["prompts"][Ending.CONSUMED] == 1
    assert ledger.counts()["outstanding"] == 0
    ledger.check()


def test_a_result_of_an_attempt_that_was_given_up_is_late_and_dropped() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 1, version=0)
    sample = group.samples[0]
    first = ledger.dispatch(sample, "w0", 0)
    ledger.lose(sample)
    assert ledger.finish(0, 0, 0, first, 0) is None
    second = ledger.dispatch(sample, "w1", 3)
    assert ledger.finish(0, 0, 0, first, 0) is None
    assert ledger.finish(0, 0, 0, second, 2) is None, "of another incarnation"
    assert ledger.late == 3
    assert ledger.finish(0, 0, 0, second, 3) is sample
    ledger.check()


def test_a_second_result_of_one_attempt_is_a_duplicate_and_dropped() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 1, version=0)
    attempt = ledger.dispatch(group.samples[0], "w0", 0)
    assert ledger.finish(0, 0, 0, attempt, 0) is not None
    assert ledger.finish(0, 0, 0, attempt, 0) is None
    assert ledger.duplicates == 1
    ledger.check()


def test_a_result_of_an_expired_round_is_not_taken_for_one_of_the_next() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 1, version=0)
    attempt = ledger.dispatch(group.samples[0], "w0", 0)
    renewed = ledger.renew(group, 1, version=2)
    assert renewed.group_id == "g0r1"
    assert ledger.dispatch(renewed.samples[0], "w0", 0) == attempt
    assert ledger.finish(0, 0, 0, attempt, 0) is None
    assert ledger.late == 1
    assert ledger.issued["prompts"] == 1
    ledger.check()


def test_an_event_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 2, version=0)
    with pytest.raises(LedgerError, match="has a group already"):
        ledger.issue(0, 2, version=0)
    with pytest.raises(LedgerError, match="cannot become"):
        ledger.score(group.samples[0])
    with pytest.raises(LedgerError, match="not complete"):
        ledger.ready(group)
    with pytest.raises(LedgerError, match="not leased"):
        ledger.acknowledge(group)
    ledger.close(group, Ending.CANCELLED)
    with pytest.raises(LedgerError, match="ended"):
        ledger.close(group, Ending.CANCELLED)
    ledger.check()


def test_a_lease_cannot_be_closed_under_whoever_holds_it() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 1, version=0)
    run_to(ledger, group, SampleState.SCORED)
    ledger.ready(group)
    ledger.lease(group)
    with pytest.raises(LedgerError, match="leased"):
        ledger.close(group, Ending.CANCELLED)


def test_restored_books_have_lost_what_ran_and_hold_what_was_leased() -> None:
    ledger = Ledger()
    running, leased = ledger.issue(0, 2, version=0), ledger.issue(1, 2, version=0)
    run_to(ledger, running, SampleState.RUNNING)
    run_to(ledger, leased, SampleState.SCORED)
    ledger.ready(leased)
    ledger.lease(leased)
    restored = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    restored.check()
    assert restored.attempts_ended[AttemptEnding.LOST] == 2
    assert restored.num_samples(SampleState.QUEUED) == 2
    assert [group.group_id for group in restored.groups(GroupState.READY)] == ["g1"]
    assert all(group.returned for group in restored.groups())


class Books(RuleBasedStateMachine):
    """Random events in any order, duplicates, late results and crashes among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.next_number = 0
        self.sent: list[tuple[int, int, int, int, int]] = []  # results that may come, at any time, any number of times

    def pick(self, data: st.DataObject, state: SampleState) -> SampleEntry:
        return data.draw(st.sampled_from(list(self.ledger.samples(state))))

    def pick_group(self, data: st.DataObject, *states: GroupState) -> GroupEntry:
        return data.draw(st.sampled_from(sorted(self.ledger.groups(*states), key=lambda g: g.order)))

    def has(self, *states: SampleState | GroupState) -> bool:
        groups = [s for s in states if isinstance(s, GroupState)]
        samples = [s for s in states if isinstance(s, SampleState)]
        return bool(self.ledger.num_groups(*groups) + self.ledger.num_samples(*samples))

    @rule(size=st.integers(1, 3))
    def issue(self, size: int) -> None:
        self.ledger.issue(self.next_number, size, version=0)
        self.next_number += 1

    @precondition(lambda self: self.has(SampleState.QUEUED))
    @rule(data=st.data(), incarnation=st.integers(0, 2))
    def dispatch(self, data: st.DataObject, incarnation: int) -> None:
        sample = self.pick(data, SampleState.QUEUED)
        attempt = self.ledger.dispatch(sample, "w0", incarnation)
        self.sent.append((sample.group.number, sample.group.round, sample.index, attempt, incarnation))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        before = self.ledger.late + self.ledger.duplicates
        taken = self.ledger.finish(*data.draw(st.sampled_from(self.sent)))
        dropped = self.ledger.late + self.ledger.duplicates - before
        assert (taken is None) == (dropped == 1)

    @precondition(lambda self: self.has(SampleState.RUNNING))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.ledger.lose(self.pick(data, SampleState.RUNNING))

    @precondition(lambda self: self.has(SampleState.REWARDING))
    @rule(data=st.data(), good=st.booleans())
    def judge(self, data: st.DataObject, good: bool) -> None:
        sample = self.pick(data, SampleState.REWARDING)
        (self.ledger.score if good else self.ledger.retry)(sample)

    @precondition(lambda self: self.has(GroupState.OPEN))
    @rule(data=st.data(), refill=st.booleans())
    def fail_one(self, data: st.DataObject, refill: bool) -> None:
        group = self.pick_group(data, GroupState.OPEN)
        if group.samples:
            self.ledger.fail(data.draw(st.sampled_from(list(group.samples.values()))))
        if refill:
            self.ledger.add_sample(group)

    @precondition(lambda self: self.has(GroupState.OPEN))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        group = self.pick_group(data, GroupState.OPEN)
        if group.samples and all(s.state is SampleState.SCORED for s in group.samples.values()):
            self.ledger.ready(group)

    @precondition(lambda self: self.has(GroupState.READY))
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        self.ledger.lease(self.pick_group(data, GroupState.READY))

    @precondition(lambda self: self.has(GroupState.LEASED))
    @rule(data=st.data(), good=st.booleans())
    def end_lease(self, data: st.DataObject, good: bool) -> None:
        group = self.pick_group(data, GroupState.LEASED)
        (self.ledger.acknowledge if good else self.ledger.give_back)(group)

    @precondition(lambda self: self.has(GroupState.OPEN, GroupState.READY))
    @rule(data=st.data(), ending=st.sampled_from([e for e in Ending if e is not Ending.CONSUMED]))
    def close(self, data: st.DataObject, ending: Ending) -> None:
        self.ledger.close(self.pick_group(data, GroupState.OPEN, GroupState.READY), ending)

    @precondition(lambda self: self.has(GroupState.OPEN, GroupState.READY))
    @rule(data=st.data(), size=st.integers(1, 3))
    def renew(self, data: st.DataObject, size: int) -> None:
        self.ledger.renew(self.pick_group(data, GroupState.OPEN, GroupState.READY), size, version=0)

    @rule()
    def crash(self) -> None:
        self.ledger = Ledger.from_state_dict(json.loads(json.dumps(self.ledger.state_dict())))

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check()
        assert self.ledger.imbalance() == 0
        counts = self.ledger.counts()
        assert counts["issued"] == counts["outstanding"] + sum(counts[str(ending)] for ending in Ending)


Books.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_books_balance_after_every_event = Books.TestCase

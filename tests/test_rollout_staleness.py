"""Admission keeps every group within max_staleness, and never keeps anybody waiting for ever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import InvalidRequestError
from rollout.batches.entries import Ending, GroupEntry, GroupState, SampleState
from rollout.batches.ledger import Ledger
from rollout.batches.staleness import Moment, StalenessPolicy, Timeline, room_in_tokens


class Loop:
    """A trainer and a fleet of one-sample groups that end in any order, over the real ledger."""

    def __init__(self, policy: StalenessPolicy, seed: int) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.version = 0
        self.handed_version: int | None = None
        self.staleness: list[int] = []
        self.most_ahead = 0
        self.missing: int | None = None  # the count of changes before which there can be no batch

    def ahead(self) -> list[GroupEntry]:
        return sorted(self.ledger.groups(GroupState.OPEN, GroupState.READY), key=lambda group: group.order)

    def room(self, *, is_awaited: bool = False) -> int:
        return self.policy.room(
            Moment(
                version=self.version,
                handed_version=self.handed_version,
                num_ahead=len(self.ahead()),
                is_awaited=is_awaited,
            )
        )

    def admit(self, *, is_awaited: bool = False) -> None:
        for _ in range(self.room(is_awaited=is_awaited)):
            self.ledger.issue(self.ledger.issued["prompts"], 1, version=self.version)
        self.most_ahead = max(self.most_ahead, len(self.ahead()))

    def finish_one(self) -> None:
        running = list(self.ledger.groups(GroupState.OPEN))
        assert running, "nothing runs and no batch is complete: everybody waits for ever"
        group = self.random.choice(running)
        attempt = self.ledger.dispatch(group.samples[0], "w0", 0)
        self.ledger.score(self.ledger.finish(group.number, 0, 0, attempt, 0))
        self.ledger.ready(group)
        if self.random.random() < 0.2:
            self.ledger.close(group, Ending.FILTERED)

    def hand_out(self, *, is_awaited: bool = False) -> list[GroupEntry]:
        while True:
            self.admit(is_awaited=is_awaited)
            pick = self.policy.pick(self.ahead(), self.version)
            batch = pick.groups
            assert bool(batch) == (pick.missing == 0)
            if self.missing is not None:
                changes = len(list(self.ledger.groups(GroupState.READY))) + sum(self.ledger.ended["groups"].values())
                assert not batch or changes >= self.missing, "it was not that many"
            if batch:
                break
            self.missing = (
                self.ledger.num_groups(GroupState.READY) + sum(self.ledger.ended["groups"].values()) + pick.missing
            )
            self.finish_one()
        self.missing = None
        for group in batch:
            self.ledger.lease(group)
            self.ledger.acknowledge(group)
            self.staleness.append(self.version - group.start_version)
        self.handed_version = self.version
        return batch

    def train(self) -> None:
        """Whatever ends meanwhile, and then the publish."""
        self.admit()
        for _ in range(self.random.randrange(6)):
            if self.ledger.num_groups(GroupState.OPEN):
                self.finish_one()
                self.admit()
        self.version += 1


@given(
    seed=st.integers(0, 10**6),
    prompts_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    order=st.sampled_from(["windowed", "fifo"]),
    extra=st.none() | st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_staleness_stays_within_its_bound_with_one_publish_a_batch(
    seed: int, prompts_per_step: int, max_staleness: int, order: str, extra: int | None
) -> None:
    policy = StalenessPolicy(
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        order=order,
        look_ahead=None if extra is None else prompts_per_step + extra,
    )
    loop = Loop(policy, seed)
    for _ in range(12):
        loop.hand_out()
        loop.train()
    assert max(loop.staleness) <= max_staleness
    assert loop.most_ahead <= prompts_per_step * (max_staleness + 1)


def test_generation_really_runs_ahead_as_far_as_it_may() -> None:
    loop = Loop(StalenessPolicy(prompts_per_step=4, max_staleness=2), seed=0)
    loop.admit()
    assert len(loop.ahead()) == 12
    for _ in range(8):
        loop.hand_out()
        loop.train()
    assert max(loop.staleness) == 2


def test_on_policy_nothing_is_admitted_between_a_hand_out_and_its_publish() -> None:
    loop = Loop(StalenessPolicy(prompts_per_step=4, max_staleness=0), seed=0)
    assert loop.room() == 4
    loop.hand_out()
    assert loop.room() == 0
    loop.version += 1
    assert loop.room() == 4


def test_on_policy_a_trainer_that_skips_its_publish_is_not_left_waiting() -> None:
    loop = Loop(StalenessPolicy(prompts_per_step=4, max_staleness=0), seed=0)
    loop.hand_out()
    assert len(loop.hand_out(is_awaited=True)) == 4
    assert set(loop.staleness) == {0}


def test_a_batch_passes_over_a_slow_group_until_it_is_due() -> None:
    ledger = Ledger()
    policy = StalenessPolicy(prompts_per_step=1, max_staleness=1)
    slow, quick = ledger.issue(0, 1, version=0), ledger.issue(1, 1, version=0)
    finish(ledger, quick)
    assert policy.pick([slow, quick], version=0).groups == [quick]
    ledger.lease(quick)
    due_later = ledger.issue(2, 1, version=1)
    finish(ledger, due_later)
    assert policy.pick([slow, due_later], version=1).groups == [], "slow is due at version 1"
    finish(ledger, slow)
    assert policy.pick([slow, due_later], version=1).groups == [slow]


def test_strict_fifo_waits_for_the_oldest() -> None:
    ledger = Ledger()
    policy = StalenessPolicy(prompts_per_step=2, max_staleness=3, order="fifo")
    groups = [ledger.issue(number, 1, version=0) for number in range(3)]
    finish(ledger, groups[1])
    finish(ledger, groups[2])
    assert policy.pick(groups, version=0).groups == []
    finish(ledger, groups[0])
    assert policy.pick(groups, version=0).groups == groups[:2]


def test_look_ahead_bounds_what_a_batch_is_chosen_from() -> None:
    ledger = Ledger()
    groups = [ledger.issue(number, 1, version=0) for number in range(4)]
    finish(ledger, groups[3])
    assert StalenessPolicy(prompts_per_step=1, max_staleness=3, look_ahead=3).pick(groups, version=0).groups == []
    assert StalenessPolicy(prompts_per_step=1, max_staleness=3, look_ahead=4).pick(groups, version=0).groups == [
        groups[3]
    ]


def test_a_batch_comes_in_canonical_order() -> None:
    ledger = Ledger()
    first, second = ledger.issue(0, 1, version=0), ledger.issue(1, 1, version=0)
    renewed = ledger.renew(first, 1, version=1)
    finish(ledger, second)
    finish(ledger, renewed)
    policy = StalenessPolicy(prompts_per_step=2, max_staleness=3)
    assert policy.pick([second, renewed], version=1).groups == [renewed, second]


def test_the_last_batch_may_be_short() -> None:
    ledger = Ledger()
    group = ledger.issue(0, 1, version=0)
    finish(ledger, group)
    policy = StalenessPolicy(prompts_per_step=4, max_staleness=0)
    assert policy.pick([group], version=0).groups == []
    assert policy.pick([group], version=0, is_last=True).groups == [group]
    assert policy.pick([], version=0, is_last=True).groups == []


def test_an_overdue_crowd_is_handed_out_and_not_waited_on_for_ever() -> None:
    ledger = Ledger()
    policy = StalenessPolicy(prompts_per_step=1, max_staleness=0)
    groups = [ledger.issue(number, 1, version=0) for number in range(3)]
    finish(ledger, groups[2])
    assert policy.pick(groups, version=5).groups == [groups[2]]


def test_look_ahead_in_tokens_never_starves_the_next_batch() -> None:
    ledger = Ledger()
    groups = [ledger.issue(number, 1, version=0) for number in range(3)]

    def fits(count: int, max_tokens: int) -> bool:
        return room_in_tokens(
            groups[:count], lambda _: 100, max_tokens=max_tokens, cost_of_next=100, prompts_per_step=2
        )

    assert fits(1, max_tokens=10)
    assert fits(2, max_tokens=300)
    assert not fits(2, max_tokens=299)


def test_after_a_rewind_what_the_checkpoint_held_is_no_staler_than_it_was() -> None:
    timeline = Timeline()
    timeline.rewind(saved_version=10, next_version=18)
    assert timeline.effective(18) - timeline.effective(9) == 1
    timeline.rewind(saved_version=19, next_version=30)
    assert timeline.effective(30) - timeline.effective(9) == 2
    assert timeline.effective(31) - timeline.effective(18) == 2
    assert Timeline(timeline.rewinds).effective(9) == timeline.effective(9)


@pytest.mark.parametrize(
    "settings_",
    [{"prompts_per_step": 0}, {"max_staleness": -1}, {"max_staleness": True}, {"order": "lifo"}, {"look_ahead": 1}],
)
def test_settings_that_cannot_work_are_refused_with_their_value(settings_: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=str(next(iter(settings_.values())))):
        StalenessPolicy(**{"prompts_per_step": 2, "max_staleness": 1, **settings_})


def finish(ledger: Ledger, group: GroupEntry) -> None:
    """The group of one sample becomes ready."""
    (sample,) = group.samples.values()
    attempt = ledger.dispatch(sample, "w0", 0)
    assert ledger.finish(group.number, group.round, sample.index, attempt, 0) is sample
    assert sample.state is SampleState.REWARDING
    ledger.score(sample)
    ledger.ready(group)

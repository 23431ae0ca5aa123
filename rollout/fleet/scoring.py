"""Which reward function is called when, and with what."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from rollout.batches.entries import SampleEntry, SampleState
from rollout.batches.group_work import GroupWork
from rollout.batches.reward_warnings import RewardWarnings
from rollout.batches.rewards import (
    GroupRewardFn,
    RewardError,
    RewardFn,
    RewardResult,
    RewardRunner,
    as_result,
    as_results,
)
from rollout.errors import InvalidRequestError
from rollout.fleet.protocols import Loop
from rollout.types import Decoder, Rollout

AGAIN = "The sample is drawn again (max_data_retries) and then left out, so that batches hold more of what has a reward"
GROUP_AGAIN = "The group is scored again (max_data_retries) and then dropped"


class ScoreEvents(Protocol):
    """What scoring tells, on the loop."""

    def scored(
        self,
        work: GroupWork,
        sample: SampleEntry,
        attempt: int,
        result: RewardResult | None,
        error: RewardError | None,
    ) -> None:
        """A sample has its reward, or none can be had."""

    def group_scored(
        self,
        work: GroupWork,
        attempts: dict[int, int],
        results: list[RewardResult] | None,
        error: RewardError | None,
    ) -> None:
        """A group has its rewards, in the order of `attempts` (attempt by sample index), or none can be had."""


class Scoring:
    """One function for each rollout, as soon as it is there; or one for a group, once all of it is; or none."""

    def __init__(
        self,
        runner: RewardRunner,
        loop: Loop,
        reward_fn: RewardFn | None,
        group_reward_fn: GroupRewardFn | None,
        tokenizer: Decoder | None,
    ) -> None:
        if reward_fn is not None and group_reward_fn is not None:
            raise InvalidRequestError("give reward_fn or group_reward_fn, not both")
        for name, function in (("reward_fn", reward_fn), ("group_reward_fn", group_reward_fn)):
            if function is not None and not callable(function):
                raise InvalidRequestError(f"{name} must be a function, got {function!r:.60}")
        self._runner = runner
        self._loop = loop
        self._reward_fn = reward_fn
        self._group_reward_fn = group_reward_fn
        self._tokenizer = tokenizer
        self._warnings = RewardWarnings(reward_fn or group_reward_fn, AGAIN if reward_fn is not None else GROUP_AGAIN)

    def submit(self, work: GroupWork, sample: SampleEntry, events: ScoreEvents) -> None:
        """The sample's rollout is there."""
        attempt = sample.attempt
        if self._group_reward_fn is not None:
            self.submit_group(work, events)
        elif self._reward_fn is None:
            events.scored(work, sample, attempt, None, None)
        else:
            self._score(
                work.rollouts[sample.index],
                lambda result, error: events.scored(work, sample, attempt, result, error),
            )

    def submit_group(self, work: GroupWork, events: ScoreEvents) -> None:
        """Something has changed in the group: if all of it is there, and it is scored together, it is scored now."""
        samples = [work.entry.samples[index] for index in sorted(work.entry.samples)]
        if self._group_reward_fn is None or not samples:
            return
        if any(sample.state is not SampleState.REWARDING for sample in samples):
            return
        rollouts = [work.rollouts[sample.index] for sample in samples]
        attempts = {sample.index: sample.attempt for sample in samples}
        if work.scored_as == attempts:
            return  # that call is under way
        work.scored_as = attempts
        function = self._group_reward_fn

        def done(values: Any, error: RewardError | None) -> None:
            results = None
            if error is None:
                try:
                    results = as_results(values, len(rollouts))
                except RewardError as invalid:
                    error = invalid
            self._tell(error, lambda: events.group_scored(work, attempts, results, error))

        self._runner.submit(lambda: function([own_copy(rollout) for rollout in rollouts]), done)

    def score_alone(self, rollout: Rollout, done: Callable[[RewardResult | None, RewardError | None], None]) -> None:
        """A rollout that is in no group's books, as of an evaluation. `done` is called on the loop."""
        if self._reward_fn is not None:
            self._score(rollout, done)
            return
        if self._group_reward_fn is None:
            done(None, None)
            return
        function = self._group_reward_fn

        def first(values: Any, error: RewardError | None) -> None:
            result = None
            if error is None:
                try:
                    (result,) = as_results(values, 1)
                except RewardError as invalid:
                    error = invalid
            self._tell(error, lambda: done(result, error))

        self._runner.submit(lambda: function([own_copy(rollout)]), first)

    def _score(self, rollout: Rollout, then: Callable[[RewardResult | None, RewardError | None], None]) -> None:
        function, tokenizer = self._reward_fn, self._tokenizer
        assert function is not None

        def call() -> Any:  # the text too is made off the loop
            return function(own_copy(rollout), "" if tokenizer is None else rollout.text(tokenizer))

        def done(value: Any, error: RewardError | None) -> None:
            result = None
            if error is None:
                try:
                    result = as_result(value)
                except RewardError as invalid:
                    error = invalid
            self._tell(error, lambda: then(result, error))

        self._runner.submit(call, done)

    def _tell(self, error: RewardError | None, tell: Callable[[], None]) -> None:
        def on_loop() -> None:
            if error is not None:
                self._warnings.note(error)
            tell()

        self._loop.call_soon(on_loop)


def own_copy(rollout: Rollout) -> Rollout:
    """For a user's function: one that changes what it is given changes no batch, and no length that others rely on."""
    return replace(
        rollout,
        prompt_ids=list(rollout.prompt_ids),
        token_ids=list(rollout.token_ids),
        logprobs=list(rollout.logprobs),
        loss_mask=list(rollout.loss_mask),
        version_spans=list(rollout.version_spans),
        metadata=dict(rollout.metadata),
    )

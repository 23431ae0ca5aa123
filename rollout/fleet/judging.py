"""What becomes of a result: a reward, another try, or the end of its sample."""

from collections.abc import Callable

from rollout.batches.collection import Collection
from rollout.batches.entries import SampleEntry, SampleState
from rollout.batches.group_work import GroupWork
from rollout.batches.groups import Failure, FailureKind
from rollout.batches.metrics import RolloutMetrics
from rollout.batches.rewards import RewardError, RewardResult
from rollout.fleet.scoring import Scoring
from rollout.fleet.supervisor import Supervisor
from rollout.rollout_config import RolloutConfig
from rollout.types import FinishReason


class Judge:
    """Takes results as they are accepted, and rewards as they come; see `rollout.fleet.scoring.ScoreEvents`."""

    def __init__(
        self,
        collection: Collection,
        scoring: Scoring,
        metrics: RolloutMetrics,
        supervisor: Supervisor,
        config: RolloutConfig,
        *,
        changed: Callable[[], None],
        may_be_stale: Callable[[int], None],
    ) -> None:
        """`changed`: something is possible now that was not. `may_be_stale`: the group of this number has tokens of an older
        version than the newest."""
        self._collection = collection
        self._scoring = scoring
        self._metrics = metrics
        self._supervisor = supervisor
        self._config = config
        self._changed = changed
        self._may_be_stale = may_be_stale

    def judge(self, work: GroupWork, sample: SampleEntry) -> None:
        """A result came and was accepted."""
        rollout = work.rollouts[sample.index]
        reason = rollout.finish_reason
        if reason is FinishReason.TIMEOUT:
            late = f"it took longer than rollout_timeout_s={self._config.rollout_timeout_s}"
            self.fail(work, sample, Failure(kind=FailureKind.DATA, reason=late))
        elif rollout.has_ended_well:
            self._metrics.finished(rollout)
            if rollout.min_version is not None and rollout.min_version < self._supervisor.newest_version:
                self._may_be_stale(work.entry.number)
            self._scoring.submit(work, sample, self)
        else:
            error = rollout.error or f"it ended by {reason}"
            self.fail(work, sample, Failure(kind=FailureKind.INFRA, reason=error))

    def scored(
        self,
        work: GroupWork,
        sample: SampleEntry,
        attempt: int,
        result: RewardResult | None,
        error: RewardError | None,
    ) -> None:
        """A reward came, or could not be computed. One that nobody waits for any more is dropped."""
        self._supervisor.saw_reward()
        if not self._awaits_reward(work, sample, attempt):
            return
        if error is not None:
            self._metrics.reward_errors[error.kind] += 1
            self.fail(work, sample, _of_reward(error))
        else:
            if result is not None:
                self._metrics.rewarded(result.metrics.items())
            self._collection.score(work, sample, result)
        self._changed()

    def group_scored(
        self,
        work: GroupWork,
        attempts: dict[int, int],
        results: list[RewardResult] | None,
        error: RewardError | None,
    ) -> None:
        """A group's rewards came, or could not be computed."""
        self._supervisor.saw_reward()
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
            self._metrics.reward_errors[error.kind] += 1
            work.num_reward_failures += 1
            work.scored_as = None
            if work.num_reward_failures > self._config.max_data_retries:
                self._collection.drop_group(work, _of_reward(error))
            else:
                self._scoring.submit_group(work, self)
        else:
            for sample, result in zip(current, results, strict=True):
                self._metrics.rewarded(result.metrics.items())
                self._collection.score(work, sample, result)
        self._changed()

    def _awaits_reward(self, work: GroupWork, sample: SampleEntry, attempt: int) -> bool:
        return (
            self._collection.works.get(work.entry.number) is work
            and work.entry.samples.get(sample.index) is sample
            and sample.state is SampleState.REWARDING
            and sample.attempt == attempt
        )

    def fail(self, work: GroupWork, sample: SampleEntry, failure: Failure) -> None:
        """A sample came to nothing."""
        self._metrics.failures[str(failure.kind)] += 1
        self._collection.fail(work, sample, failure)
        self._changed()
        if self._collection.works.get(work.entry.number) is work:
            self._scoring.submit_group(work, self)  # the others may have been waiting for this one


def _of_reward(error: RewardError) -> Failure:
    return Failure(kind=FailureKind.DATA, reason=str(error), cause=error.__cause__)

"""Evaluation on the fleet that trains: other prompts, between the rollouts, outside their books."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rollout.batches.prompts import Prompt
from rollout.batches.rewards import RewardError, RewardResult
from rollout.errors import InvalidRequestError
from rollout.fleet.roster import Roster
from rollout.fleet.scoring import Scoring
from rollout.types import FinishReason, Rollout, SamplingParams
from rollout.workers.wire import Finished, WorkItem

PREFIX = "eval"


@dataclass(eq=False, kw_only=True)
class EvaluationRun:
    """One call of `evaluate`: a rollout for each prompt and sample."""

    future: "Future[list[Rollout]]"
    results: dict[int, Rollout] = field(default_factory=dict)  # by position
    size: int


@dataclass(eq=False, kw_only=True)
class _Task:
    run: EvaluationRun
    position: int
    item: WorkItem
    metadata: dict[str, object]
    worker_id: str | None = None
    num_failures: int = 0


class Evaluations:
    """The samples of every evaluation under way: queued, on a worker, or waiting for their reward."""

    def __init__(self, roster: Roster, scoring: Scoring, max_retries: int) -> None:
        self._roster = roster
        self._scoring = scoring
        self._max_retries = max_retries
        self._numbers = itertools.count()
        self._queued: deque[_Task] = deque()
        self._running: dict[str, _Task] = {}  # by request id
        self._by_worker: dict[str, int] = {}
        self._runs: list[EvaluationRun] = []
        self._held: dict[str, int] = {}  # workers with a commit at the door, which take no new evaluation
        self._waiting: list[tuple[str, Callable[[], None]]] = []

    def num_on(self, worker_id: str) -> int:
        """How many samples are on one worker."""
        return self._by_worker.get(worker_id, 0)

    def begin(
        self, prompts: Sequence[Prompt], params: SamplingParams, num_samples: int, future: "Future[list[Rollout]]"
    ) -> None:
        """Queues an evaluation; the future gets its rollouts, by prompt and sample."""
        bad = next((prompt.error for prompt in prompts if prompt.error is not None), None)
        if bad is not None:
            future.set_exception(InvalidRequestError(bad))
            return
        number = next(self._numbers)
        run = EvaluationRun(future=future, size=len(prompts) * num_samples)
        self._runs.append(run)
        for position, (prompt, sample) in enumerate(itertools.product(prompts, range(num_samples))):
            item = WorkItem(
                request_id=f"{PREFIX}{number}-{position}",
                prompt_ids=prompt.prompt_ids,
                params=params,
                prompt_id=prompt.prompt_id,
                sample_index=sample,
            )
            self._queued.append(_Task(run=run, position=position, item=item, metadata=dict(prompt.metadata)))
        self._check(run)

    def dispatch(self, outbox: dict[str, list[WorkItem]], version: int) -> None:
        """What is queued goes to whoever can take it."""
        for _ in range(len(self._queued)):
            seat = self._roster.least_loaded(1, version)
            if seat is None:
                return
            task = self._queued.popleft()
            if task.run.future.done():
                continue
            if seat.worker_id in self._held:
                self._queued.append(task)
                continue
            task.worker_id = seat.worker_id
            self._running[task.item.request_id] = task
            self._by_worker[seat.worker_id] = self.num_on(seat.worker_id) + 1
            outbox.setdefault(seat.worker_id, []).append(task.item)
            self._roster.touch(seat.worker_id)

    def take(self, finished: Finished) -> bool:
        """Whether the result is of an evaluation; if so it is dealt with."""
        if not finished.rollout.rollout_id.startswith(PREFIX):
            return False
        task = self._running.get(finished.rollout.rollout_id)
        if task is None or task.item.attempt != finished.attempt:
            return True  # late
        self._release(task)
        rollout = finished.rollout
        if rollout.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT):
            rollout = replace(rollout, metadata=task.metadata)
            self._scoring.score_alone(rollout, lambda result, error: self._scored(task, rollout, result, error))
        else:
            self._retry(task, rollout.error or f"it ended by {rollout.finish_reason}", rollout)
        return True

    def refused(self, item: WorkItem, error: Exception) -> bool:
        """Whether the item is of an evaluation; if so it is queued again, or its evaluation ends with the error."""
        task = self._running.get(item.request_id)
        if task is None:
            return False
        self._release(task)
        if isinstance(error, InvalidRequestError):
            self._end(task.run, error)
        else:
            self._queued.appendleft(task)
        return True

    def lost(self, worker_id: str, error: Exception) -> None:
        """A worker died."""
        for task in [task for task in self._running.values() if task.worker_id == worker_id]:
            self._release(task)
            self._retry(task, str(error), None)

    def before_commit(self, worker_id: str, go: Callable[[], None]) -> None:
        """Calls `go` once the worker evaluates nothing; until `after_commit` it gets no new evaluation."""
        self._held[worker_id] = self._held.get(worker_id, 0) + 1
        self._waiting.append((worker_id, go))
        self._let_commit(worker_id)

    def stop_waiting(self, go: Callable[[], None]) -> None:
        """The limit is up: calls it now, if it has not been called."""
        for entry in self._waiting:
            if entry[1] is go:
                self._waiting.remove(entry)
                go()
                return

    def after_commit(self, worker_id: str) -> None:
        """It may evaluate again."""
        self._held[worker_id] -= 1
        if not self._held[worker_id]:
            del self._held[worker_id]

    def fail(self, error: BaseException) -> None:
        """Every evaluation ends with the error."""
        for run in list(self._runs):
            self._end(run, error)

    def _scored(self, task: _Task, rollout: Rollout, result: RewardResult | None, error: RewardError | None) -> None:
        if error is not None:
            rollout = replace(rollout, error=str(error))
        elif result is not None:
            rollout = replace(rollout, reward=result.reward, metadata={**task.metadata, **result.metadata})
        task.run.results[task.position] = rollout
        self._check(task.run)

    def _retry(self, task: _Task, error: str, rollout: Rollout | None) -> None:
        task.num_failures += 1
        if task.num_failures <= self._max_retries:
            task.item = replace(task.item, attempt=task.item.attempt + 1)
            self._queued.appendleft(task)
            return
        rollout = rollout if rollout is not None else _nothing(task.item)
        ended = replace(rollout, metadata=task.metadata, finish_reason=FinishReason.ERROR, error=error)
        task.run.results[task.position] = ended
        self._check(task.run)

    def _release(self, task: _Task) -> None:
        worker_id = task.worker_id
        assert worker_id is not None
        del self._running[task.item.request_id]
        self._by_worker[worker_id] -= 1
        task.worker_id = None
        self._roster.touch(worker_id)
        self._let_commit(worker_id)

    def _let_commit(self, worker_id: str) -> None:
        if self.num_on(worker_id):
            return
        ready = [entry for entry in self._waiting if entry[0] == worker_id]
        self._waiting = [entry for entry in self._waiting if entry[0] != worker_id]
        for _, go in ready:
            go()

    def _check(self, run: EvaluationRun) -> None:
        if len(run.results) == run.size and not run.future.done():
            self._runs.remove(run)
            run.future.set_result([run.results[position] for position in range(run.size)])

    def _end(self, run: EvaluationRun, error: BaseException) -> None:
        if run in self._runs:
            self._runs.remove(run)
            run.future.set_exception(error)


def _nothing(item: WorkItem) -> Rollout:
    """What is left of a sample whose worker died with it."""
    return Rollout(
        rollout_id=item.request_id,
        prompt_id=item.prompt_id,
        sample_index=item.sample_index,
        attempt=item.attempt,
        prompt_ids=list(item.prompt_ids),
        token_ids=[],
        logprobs=[],
        loss_mask=[],
        version_spans=[],
        prefill_version=None,
        finish_reason=FinishReason.ERROR,
    )

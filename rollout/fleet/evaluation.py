"""Evaluation on the fleet that trains: other prompts, between the rollouts, outside their books.

An evaluation goes first: while a sample of it waits, it gets the next place that is free on a worker, before any sample of
training. What is on a worker already is not interrupted, so with `max_samples_per_worker` an evaluation begins as soon as
samples end, and without it the engine puts it behind what it was given before.

The samples of a prompt go to one worker, which prefills it once; where none has places for all, as many of them as fit.
With a seed each prompt draws noise of its own, by its place among the prompts, and each of its samples too.

A commit waits for the evaluation on its worker, up to `evaluation_wait_s`, and that worker gets no new evaluation until the
commit has ended: each result is of one version, unless that took too long. Then its spans say so.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.batches.prompts import Prompt, Tokenizer, encode_prompt
from rollout.batches.rewards import RewardError, RewardResult
from rollout.errors import InvalidRequestError
from rollout.fleet.roster import Roster
from rollout.fleet.scoring import Scoring
from rollout.rollout_config import mix
from rollout.types import FinishReason, Rollout, SamplingParams
from rollout.workers.wire import Finished, WorkItem

PREFIX = "eval"


@dataclass(eq=False, kw_only=True)
class EvaluationRun:
    """One call of `evaluate`: a rollout for each prompt and sample."""

    future: "Future[list[Rollout]]"
    results: dict[int, Rollout] = field(default_factory=dict)  # by position
    size: int
    is_scored: bool
    """Whether the reward function is asked about its rollouts."""
    refusals: list[InvalidRequestError] = field(default_factory=list)
    """Of samples that can never work."""


@dataclass(eq=False, kw_only=True)
class _Task:
    """One sample."""

    run: EvaluationRun
    position: int
    item: WorkItem
    """As it is alone."""
    request_id: str
    """As what it runs or ran last: alone, or in a group."""
    metadata: dict[str, object]
    worker_id: str | None = None
    num_failures: int = 0


class Evaluations:
    """The samples of every evaluation under way: queued, on a worker, or waiting for their reward."""

    def __init__(
        self,
        roster: Roster,
        scoring: Scoring,
        *,
        max_retries: int,
        wait_s: float,
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`max_retries`: of one sample. `wait_s`: how long a commit waits for what its worker evaluates."""
        self.cancelled: list[tuple[str, str]] = []
        """(worker, request) of what runs and is not waited for any more; the coordinator tells the workers."""
        self._roster = roster
        self._scoring = scoring
        self._max_retries = max_retries
        self._wait_s = wait_s
        self._call_later = call_later
        self._numbers = itertools.count()
        self._queued: deque[list[_Task]] = deque()  # each of one prompt, neighbours, tried equally often
        self._running: dict[str, _Task] = {}  # by request id
        self._by_worker: dict[str, int] = {}
        self._runs: list[EvaluationRun] = []
        self._held: dict[str, int] = {}  # workers with a commit at the door, which take no new evaluation
        self._waiting: list[tuple[str, Callable[[], None]]] = []

    def num_on(self, worker_id: str) -> int:
        """How many samples are on one worker."""
        return self._by_worker.get(worker_id, 0)

    @property
    def has_commits(self) -> bool:
        """Whether an update of some worker, or a publish to it, is under way."""
        return bool(self._held)

    def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_samples: int,
        future: "Future[list[Rollout]]",
        *,
        is_scored: bool,
    ) -> None:
        """Queues an evaluation; the future gets its rollouts, by prompt and sample."""
        number = next(self._numbers)
        run = EvaluationRun(future=future, size=len(prompts) * num_samples, is_scored=is_scored)
        self._runs.append(run)
        for place, prompt in enumerate(prompts):
            tasks: list[_Task] = []
            for sample in range(num_samples):
                position = place * num_samples + sample
                item = WorkItem(
                    request_id=f"{PREFIX}{number}-{position}",
                    prompt_ids=prompt.prompt_ids,
                    params=_seeded(params, place),
                    prompt_id=prompt.prompt_id,
                    sample_index=sample,
                )
                metadata = dict(prompt.metadata)
                tasks.append(
                    _Task(run=run, position=position, item=item, request_id=item.request_id, metadata=metadata)
                )
            self._queued.append(tasks)
        self._check(run)

    def dispatch(self, outbox: dict[str, list[WorkItem]], version: int) -> None:
        """What is queued goes to whoever can take it; what nobody waits for any more is given up."""
        for run in [run for run in self._runs if run.future.done()]:
            self._drop(run)
        while self._queued:
            size = self._roster.at_most(len(self._queued[0]))
            while (seat := self._roster.least_loaded(size, version, barred=self._held)) is None and size > 1:
                size //= 2  # or training, which takes single places, would leave it none
            if seat is None:
                return
            tasks = self._queued.popleft()
            if tasks[size:]:
                self._queued.appendleft(tasks[size:])
            item = replace(tasks[0].item, size=size)
            for task, request_id in zip(tasks[:size], item.request_ids, strict=True):
                task.worker_id, task.request_id = seat.worker_id, request_id
                self._running[request_id] = task
            self._by_worker[seat.worker_id] = self.num_on(seat.worker_id) + size
            outbox.setdefault(seat.worker_id, []).append(item)
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
        if rollout.has_ended_well or rollout.finish_reason is FinishReason.TIMEOUT:
            rollout = replace(rollout, metadata=task.metadata)
            if not task.run.is_scored:
                self._scored(task, rollout, None, None)
                return True
            self._scoring.score_alone(rollout, lambda result, error: self._scored(task, rollout, result, error))
        else:
            self._retry(task, rollout.error or f"it ended by {rollout.finish_reason}", rollout)
        return True

    def refused(self, item: WorkItem, error: Exception) -> bool:
        """Whether the item is of an evaluation; if so it is queued again, or ends with the error if it can never work."""
        if not item.request_id.startswith(PREFIX):
            return False
        named = (self._running.get(name) for name in item.request_ids)
        tasks = [task for task in named if task is not None and task.item.attempt == item.attempt]
        for task in tasks:
            self._release(task)
        if isinstance(error, InvalidRequestError):
            for task in tasks:
                task.run.refusals.append(error)
                self._fail(task, str(error), None)
        else:
            half = len(tasks) // 2  # it may be more than the worker can ever hold
            self._queued.extendleft(part for part in (tasks[half:], tasks[:half]) if part)
        return True

    def lost(self, worker_id: str, error: Exception) -> None:
        """A worker died."""
        for task in [task for task in self._running.values() if task.worker_id == worker_id]:
            self._release(task)
            self._retry(task, str(error), None)

    def before_commit(self, worker_id: str, go: Callable[[], None]) -> None:
        """Calls `go` once the worker evaluates nothing, or the limit is up; until `after_commit` it gets no new
        evaluation."""
        self._held[worker_id] = self._held.get(worker_id, 0) + 1
        if not self.num_on(worker_id):
            go()
            return
        entry = (worker_id, go)
        self._waiting.append(entry)
        self._call_later(self._wait_s, lambda: self._stop_waiting(entry))

    def after_commit(self, worker_id: str) -> None:
        """It may evaluate again."""
        self._held[worker_id] -= 1
        if not self._held[worker_id]:
            del self._held[worker_id]

    def fail(self, error: BaseException) -> None:
        """Every evaluation ends with the error."""
        for run in list(self._runs):
            self._drop(run)
            if run.future.set_running_or_notify_cancel():
                run.future.set_exception(error)

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
            self._queued.appendleft([task])
        else:
            self._fail(task, error, rollout)

    def _fail(self, task: _Task, error: str, rollout: Rollout | None) -> None:
        rollout = rollout if rollout is not None else _nothing(task.item)
        ended = replace(rollout, metadata=task.metadata, finish_reason=FinishReason.ERROR, error=error)
        task.run.results[task.position] = ended
        self._check(task.run)

    def _release(self, task: _Task) -> None:
        worker_id = task.worker_id
        assert worker_id is not None
        del self._running[task.request_id]
        self._by_worker[worker_id] -= 1
        task.worker_id = None
        self._roster.touch(worker_id)
        self._let_commit(worker_id)

    def _stop_waiting(self, entry: tuple[str, Callable[[], None]]) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            entry[1]()

    def _let_commit(self, worker_id: str) -> None:
        if self.num_on(worker_id):
            return
        ready = [entry for entry in self._waiting if entry[0] == worker_id]
        self._waiting = [entry for entry in self._waiting if entry[0] != worker_id]
        for _, go in ready:
            go()

    def _check(self, run: EvaluationRun) -> None:
        if len(run.results) < run.size or run not in self._runs:
            return
        self._runs.remove(run)
        if not run.future.set_running_or_notify_cancel():
            return
        if run.refusals and len(run.refusals) == run.size:
            run.future.set_exception(run.refusals[0])
        else:
            run.future.set_result([run.results[position] for position in range(run.size)])

    def _drop(self, run: EvaluationRun) -> None:
        self._runs.remove(run)
        self._queued = deque(tasks for tasks in self._queued if tasks[0].run is not run)
        for task in [task for task in self._running.values() if task.run is run]:
            assert task.worker_id is not None
            self.cancelled.append((task.worker_id, task.request_id))
            self._release(task)


def check_evaluation(rows: Any, params: Any, num_samples: Any) -> None:
    """InvalidRequestError for arguments that an evaluation cannot have: on the loop they would end the training."""
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise InvalidRequestError(f"it takes a list of prompts, got {rows!r:.60}")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {params!r:.60}")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise InvalidRequestError(f"num_samples must be an integer of at least 1, got {num_samples!r}")


def evaluation_prompts(rows: Iterable[Any], tokenizer: Tokenizer | None) -> list[Prompt]:
    """Prompts as a controller takes them, named by their places. InvalidRequestError names the first that cannot be read."""
    prompts: list[Prompt] = []
    for number, row in enumerate(rows):
        try:
            ids, metadata = encode_prompt(row, tokenizer)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"evaluation prompt {number}: {error}") from None
        prompts.append(Prompt(number=number, prompt_id=f"e{number}", prompt_ids=ids, metadata=metadata))
    return prompts


def _seeded(params: SamplingParams, place: int) -> SamplingParams:
    """With a seed, one of its own for the prompt at each place: noise depends on the seed, the sample's index and the
    token's position, so that prompts which occur twice would draw the same."""
    return params if params.seed is None else replace(params, seed=mix(mix(params.seed) ^ place) >> 1)


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

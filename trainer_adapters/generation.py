"""Rollouts for prompts that a trainer brings, where one that fails fails alone."""

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from typing import Protocol

from rollout import (
    EngineDeadError,
    EngineState,
    FinishReason,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    RolloutController,
    SamplingParams,
)
from trainer_adapters.errors import AdapterError

log = logging.getLogger("rollsync")

GRACE_S = 30.0
"""How long after its own limit a request's result may come."""


class Generator(Protocol):
    """One rollout for each prompt, in their order."""

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, group_size: int) -> list[Rollout]:
        """Equal neighbours among the prompts are samples of one prompt, which one engine prefills once for each `group_size`
        of them. No two of the rows draw the same noise, with a seed neither; the same seed draws it again.
        A sample that could not be generated is not `is_usable`, says why in `error`, and touches no other one.
        Raises AdapterError if not one could be, and what the engine or fleet raises when it serves nothing."""


def generator_of(source: GenerationEngine | RolloutController, *, timeout_s: float, max_retries: int) -> Generator:
    """`timeout_s` bounds each sample. `max_retries`: how often one is tried again that an engine lost; a controller has
    its own setting for that."""
    if isinstance(source, GenerationEngine):
        return EngineGenerator(source, timeout_s=timeout_s, max_retries=max_retries)
    return ControllerGenerator(source, timeout_s=timeout_s)


def is_usable(rollout: Rollout) -> bool:
    """Whether it came to an end of its own: at a stop, or at `max_new_tokens`."""
    return bool(rollout.token_ids) and rollout.has_ended_well


class EngineGenerator:
    """Asks one engine. A sample that the engine lost (ERROR) goes on from the tokens that it had; if the engine died, it is
    restarted for that. One that was cancelled (ABORT) or ran out of time is not tried again."""

    def __init__(self, engine: GenerationEngine, *, timeout_s: float, max_retries: int) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._max_retries = max_retries

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, group_size: int) -> list[Rollout]:
        self._revive()
        sized = list(groups(prompts, group_size))
        of_group = [_of_group(params, place) for place in range(len(sized))]
        of_row = [own for own, (_, size) in zip(of_group, sized, strict=True) for _ in range(size)]
        rollouts = self._wait(self._group(ids, own, size) for own, (ids, size) in zip(of_group, sized, strict=True))
        for _ in range(self._max_retries):
            lost = [i for i, r in enumerate(rollouts) if r.finish_reason is FinishReason.ERROR]
            if not lost:
                break
            self._revive()
            again = self._wait(self._again(rollouts[i], of_row[i]) for i in lost)
            for i, rollout in zip(lost, again, strict=True):
                rollouts[i] = rollout
        return _checked(rollouts)

    def _group(self, prompt_ids: list[int], params: SamplingParams, size: int) -> "Sequence[Future[Rollout]]":
        return self._submitted(
            [_refused(prompt_ids, place) for place in range(size)],
            lambda: self._engine.submit_group(prompt_ids, params, size=size, timeout_s=self._timeout_s),
        )

    def _again(self, lost: Rollout, params: SamplingParams) -> "Sequence[Future[Rollout]]":
        def submit() -> "Sequence[Future[Rollout]]":
            had = lost if lost.token_ids else None
            return [
                self._engine.submit(
                    lost.prompt_ids,
                    params,
                    sample_index=lost.sample_index,
                    timeout_s=self._timeout_s,
                    resume_from=had,
                )
            ]

        return self._submitted([lost], submit)

    @staticmethod
    def _submitted(
        otherwise: Sequence[Rollout], submit: "Callable[[], Sequence[Future[Rollout]]]"
    ) -> "Sequence[Future[Rollout]]":
        """`otherwise`: what the samples are if they are refused, but for the reason."""
        try:
            return submit()
        except (InvalidRequestError, EngineDeadError) as error:  # of this prompt; of all that are under way
            refused: list[Future[Rollout]] = [Future() for _ in otherwise]
            for future, rollout in zip(refused, otherwise, strict=True):
                future.set_result(replace(rollout, error=str(error)))
            return refused

    def _wait(self, submissions: "Iterable[Sequence[Future[Rollout]]]") -> list[Rollout]:
        """The results of all; each submission is made as it is iterated over."""
        futures: list[Future[Rollout]] = []
        try:
            for submitted in submissions:
                futures.extend(submitted)
            return [future.result(self._timeout_s + GRACE_S) for future in futures]
        except BaseException:
            # A caller that is interrupted, or refused further on, gets no results: what it asked for must not go on in its
            # name.
            for future in futures:
                future.cancel()
            raise

    def _revive(self) -> None:
        if self._engine.state is EngineState.DEAD:
            self._engine.restart()


class ControllerGenerator:
    """Asks a fleet, through `RolloutController.generate`, which retries on other workers, sample by sample. The controller's
    own prompts rest meanwhile: it is drained before the first request."""

    def __init__(self, controller: RolloutController, *, timeout_s: float) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._is_drained = False

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, group_size: int) -> list[Rollout]:
        if not self._is_drained:
            self._controller.drain(self._timeout_s)
            self._is_drained = True
        sized = list(groups(prompts, group_size))
        samples: dict[int, list[Rollout]] = {}  # by the group's place
        for size in {size for _, size in sized}:  # one, unless the prompts are no multiple of the group's size
            places = [place for place, (_, its) in enumerate(sized) if its == size]
            made = self._generate([sized[place][0] for place in places], _of_group(params, size), size)
            for number, place in enumerate(places):
                samples[place] = made[number * size : (number + 1) * size]
        return _checked([rollout for place in range(len(sized)) for rollout in samples[place]])

    def _generate(self, prompts: list[list[int]], params: SamplingParams, size: int) -> list[Rollout]:
        try:
            return self._controller.generate(prompts, params, num_samples=size, timeout_s=self._timeout_s)
        except InvalidRequestError as error:  # of every one of them
            refused = [_refused(prompt_ids, place) for prompt_ids in prompts for place in range(size)]
            return [replace(rollout, error=str(error)) for rollout in refused]


def warn_if_renormalising(params: SamplingParams) -> None:
    """For a trainer that corrects by importance ratios."""
    if params.top_p < 1 or params.top_k:
        warnings.warn(
            f"top_p={params.top_p} and top_k={params.top_k} renormalise the sampling log-probs over the tokens that they keep, "
            "while the trainer's are over all: the importance ratios are biased below 1. Set top_p=1.0 and top_k=0, or do "
            "without the correction (GRPO: vllm_importance_sampling_correction=False)",
            UserWarning,
            stacklevel=4,
        )


def groups(prompts: Sequence[list[int]], group_size: int) -> Iterator[tuple[list[int], int]]:
    """Equal neighbours as (prompt, how many), at most `group_size` at once."""
    for prompt_ids, same in groupby(prompts):
        left = len(list(same))
        while left:
            size = min(left, group_size)
            yield prompt_ids, size
            left -= size


def seed_of(seed: int, place: int | str) -> int:
    """One for each place, the same in every run with `seed`, and without pattern."""
    return random.Random(f"{seed}/{place}").getrandbits(63)


def _of_group(params: SamplingParams, number: int) -> SamplingParams:
    """Noise depends on the seed, the sample's place in its group and the token's position; groups differ by the seed."""
    return params if params.seed is None else replace(params, seed=seed_of(params.seed, number))


def _checked(rollouts: list[Rollout]) -> list[Rollout]:
    broken = [rollout for rollout in rollouts if not is_usable(rollout)]
    for rollout in broken:
        log.warning("sample %s failed (%s): %s", rollout.rollout_id, rollout.finish_reason, rollout.error)
    if broken and len(broken) == len(rollouts):
        raise AdapterError(
            f"none of {len(rollouts)} samples could be generated; the first: {broken[0].error or broken[0].finish_reason}"
        )
    return rollouts


def _refused(prompt_ids: list[int], place: int) -> Rollout:
    """A sample that no engine took. `place`: in its group, on which its noise depends, also when it is tried again."""
    return Rollout(
        rollout_id="refused",
        sample_index=place,
        prompt_ids=prompt_ids,
        token_ids=[],
        logprobs=[],
        loss_mask=[],
        version_spans=[],
        prefill_version=None,
        finish_reason=FinishReason.ERROR,
    )

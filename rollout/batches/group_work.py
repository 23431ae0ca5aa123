"""A group on its way: its entry in the books, with what there is of its rollouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rollout.batches.entries import GroupEntry
from rollout.batches.groups import in_canonical_order
from rollout.batches.prompts import Prompt
from rollout.batches.records import rollout_from_json, rollout_to_json, saveable
from rollout.errors import InvalidRequestError
from rollout.types import Rollout

SAMPLE_ID = re.compile(r"g([0-9]+)(?:r([0-9]+))?-([0-9]+)")


@dataclass(eq=False, slots=True, kw_only=True)
class GroupWork:
    """An outstanding group with what there is of its rollouts."""

    entry: GroupEntry
    prompt: Prompt
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Finished ones, by sample index."""
    partials: dict[int, Rollout] = field(default_factory=dict)
    """What a sample goes on from in its next attempt."""
    reward_metadata: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What reward functions have joined to the rollouts' metadata, by sample index."""
    admitted_at: float = 0.0
    num_reward_failures: int = 0
    """Of the group's own reward function."""
    scored_as: dict[int, int] | None = None
    """What its reward function was last called for: attempt by sample index."""
    lease_version: int | None = None
    """The fleet's version when it was last handed out."""
    step: int | None = None
    """The batch that it was trained in, counted from 1 over the whole run."""

    def ordered(self) -> tuple[Rollout, ...]:
        """Its finished rollouts, by sample index."""
        return in_canonical_order(self.rollouts.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-safe: all but its entry, which the ledger saves."""
        return {
            "number": self.entry.number,
            "prompt_ids": self.prompt.prompt_ids,
            "rollouts": [rollout_to_json(rollout) for rollout in self.ordered()],
            "reward_metadata": {str(index): saveable(told) for index, told in sorted(self.reward_metadata.items())},
            "partials": [rollout_to_json(partial) for _, partial in sorted(self.partials.items())],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], entry: GroupEntry, prompt: Prompt, *, now: float) -> Self:
        """The inverse. InvalidRequestError if the prompt is another than it was."""
        if prompt.prompt_ids != saved["prompt_ids"]:
            raise InvalidRequestError(
                f"prompt {prompt.number} is not what it was when the checkpoint was made; pass the same prompts, "
                "tokenizer, seed and shuffle"
            )
        work = cls(entry=entry, prompt=prompt, admitted_at=now)
        work.reward_metadata = {int(index): told for index, told in saved["reward_metadata"].items()}
        for one in saved["rollouts"]:
            index = one["sample_index"]
            metadata = {**prompt.metadata, **work.reward_metadata.get(index, {})}
            work.rollouts[index] = rollout_from_json(one, metadata)
        for one in saved["partials"]:
            work.partials[one["sample_index"]] = rollout_from_json(one, {})
        return work


def parse_sample_id(sample_id: str) -> tuple[int, int, int] | None:
    """(prompt number, round, sample index) of an id that this package made; None for another's."""
    match = SAMPLE_ID.fullmatch(sample_id)
    return None if match is None else (int(match[1]), int(match[2] or 0), int(match[3]))

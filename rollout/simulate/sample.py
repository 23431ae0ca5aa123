"""A sample that a simulated worker generates: which tokens it has at a moment, and of which versions they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.rollout_config import mix
from rollout.types import FinishReason, Rollout, VersionSpan
from rollout.workers.wire import WorkItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """New weights in a worker."""

    at: float  # virtual seconds
    version: int


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedSample:
    """A sample that is being generated, or waits for its turn."""

    request_id: str
    item: WorkItem
    sample_index: int
    length: int
    """Tokens that it will have."""
    before: Rollout | None
    """What it goes on from."""
    started_at: float | None = None
    """When its first token here was due; None: it waits."""
    first_commit: int = 0
    """The worker's newest commit when it started, by its place among them."""
    is_over: bool = False

    def rollout(
        self,
        reason: FinishReason | None,
        error: str | None,
        *,
        commits: Sequence[Commit],
        until: float,
        tokens_per_s: float,
        worker_id: str,
    ) -> Rollout:
        """With the tokens that it has at the time `until`; with all of them if it ended well."""
        item, before = self.item, self.before
        token_ids = [] if before is None else list(before.token_ids)
        spans = [] if before is None else list(before.version_spans)
        had = len(token_ids)

        def tokens_at(moment: float) -> int:
            assert self.started_at is not None
            return had + max(0, int((moment - self.started_at) * tokens_per_s))

        total = had
        if self.started_at is not None:
            whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            total = max(had, self.length if whole else min(self.length - 1, tokens_at(until)))
        for number in range(self.first_commit, len(commits) if total > had else 0):
            version = commits[number].version
            start = had if number == self.first_commit else tokens_at(commits[number].at)
            is_last = number + 1 == len(commits)
            end = total if is_last else min(total, tokens_at(commits[number + 1].at))
            if end > max(start, len(token_ids)):
                if not spans or spans[-1].version != version:
                    spans.append(VersionSpan(len(token_ids), version))
                token_ids += [version] * (end - len(token_ids))
        return Rollout(
            rollout_id=self.request_id,
            group_id=item.group_id,
            prompt_id=item.prompt_id,
            sample_index=self.sample_index,
            attempt=item.attempt,
            prompt_ids=list(item.prompt_ids),
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            loss_mask=[1] * len(token_ids),
            version_spans=spans,
            prefill_version=None if self.started_at is None else commits[self.first_commit].version,
            finish_reason=reason,
            error=error,
            worker_id=worker_id,
        )


def uniform(seed: int, index: int) -> float:
    """In (0, 1), the same for the same seed and index."""
    return (mix(mix(seed) ^ index) + 0.5) / 2**64

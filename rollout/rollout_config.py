"""Settings of one controller."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rollout.batches.groups import FailurePolicy, OnFailure
from rollout.batches.staleness import Order, StalenessPolicy
from rollout.errors import InvalidRequestError
from rollout.types import SamplingParams

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """All optional."""

    num_workers: int = 0
    """Ray workers, each with an engine; 0: one engine in this process."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """Reserve what the Ray workers book in one placement group, by this strategy; None: each is placed alone."""
    group_size: int = 8
    """Samples of each prompt."""
    prompts_per_step: int = 32
    """Groups of a batch."""
    max_staleness: int = 1
    """How many versions older than the hand-out a token may be; 0 is strictly on-policy. See `rollout.batches.staleness`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How each sample is drawn. Its seed, or else the one below, is mixed with the prompt's number, so that no two groups
    share their noise."""
    seed: int = 0
    """Of the shuffling, and of the sampling where `sampling` has none."""
    num_epochs: int | None = 1
    """How often the prompts are gone through; None: for ever."""
    shuffle: bool = False
    """Another order in each epoch, from the seed."""

    admission: Order = "windowed"
    """Which groups make a batch: "windowed", "fifo" or "expiring". See `rollout.batches.staleness.StalenessPolicy`."""
    look_ahead: int | None = None
    """Groups that a batch is chosen from, at least `prompts_per_step`; None: all that are admitted."""
    max_tokens_ahead: int | None = None
    """Upper bound on the tokens, counted at their longest, of the groups that are not handed out, beyond those of the
    next batch; None: groups alone are counted."""
    max_samples_per_worker: int | None = None
    """Samples on one worker at once; what is admitted beyond waits here, oldest first. None: no bound."""
    on_stale: Literal["expire", "raise"] = "expire"
    """What becomes of a group that more publishes than one a batch have made too old: another for the same prompt, or an
    error from `next_batch`."""
    max_requeues: int = 3
    """How often a prompt's group may expire before the prompt itself does."""

    max_infra_retries: int = 3
    """Of one sample, after deaths of workers or engines. It goes on from where it was, if that is known."""
    max_data_retries: int = 1
    """Of one sample, after a time-out or a reward that could not be computed. Each has noise of its own."""
    on_failed_sample: OnFailure = "shrink"
    """When its retries are used up: the group goes on without it, is dropped, or gets another in its place."""
    min_group_size: int = 2
    """A group that shrinks below this is dropped."""
    drop_equal_rewards: bool = False
    """Filter the groups whose rewards are all equal; for other rules see `RolloutController`'s `keep_group`."""
    max_groups_without_output: int | None = None
    """Groups that may end unused with none ready in between, before the run is taken for barren; None: ten batches."""

    rollout_timeout_s: float | None = None
    """Time limit of one sample; None: none."""
    reward_concurrency: int = 16
    """Reward functions at work at once."""
    reward_timeout_s: float = 60.0
    """Time limit of one reward."""
    no_progress_s: float = 600.0
    """With work outstanding, how long no token, result or reward may come before `next_batch` raises."""
    reward_stall_s: float = 300.0
    """How long rewards may be pending with none coming."""
    pause_stall_s: float = 300.0
    """How long all workers may be unable to take work: paused, fenced, stale or dead."""
    suspect_limit_s: float = 60.0
    """How long nothing may be heard of a worker before it is replaced."""
    snapshot_every_s: float | None = 30.0
    """How often the partial rollouts of each worker are noted, to go on from when it dies; None: never."""
    evaluation_wait_s: float = 30.0
    """How long a publish to a worker that evaluates waits for the evaluation, so that each result is of one version."""
    worker_restarts: int = 8
    """How often a worker that died is replaced, over the whole run of that worker: at once, or after a wait that grows with
    each further death when it made no token in between, and with each restart that failed."""

    rollouts_jsonl: Path | str | None = None
    """A file to which every group that ends is appended, a line a rollout; the updates of the engines go to `updates.jsonl`
    beside it. A line's step is the batch that trained on it, counted from 1 over the whole run. `rollsync report` reads
    both."""
    versions_file: Path | str | None = None
    """A file that keeps the highest version ever published, for a run that goes on from an older checkpoint."""
    progress_bar: bool = False
    """A live line: rollouts handed out, their rate, the version and the staleness of the last batch."""

    def __post_init__(self) -> None:
        for name, low in (
            *(("num_workers", 0), ("group_size", 1), ("seed", 0), ("max_requeues", 0), ("reward_concurrency", 1)),
            ("worker_restarts", 0),
        ):
            self._check_integer(name, low)
        for name in (
            *("max_tokens_ahead", "max_samples_per_worker", "max_groups_without_output"),
            *("num_epochs", "look_ahead"),
        ):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)
        limits = (
            "suspect_limit_s",
            "reward_timeout_s",
            "no_progress_s",
            "reward_stall_s",
            "pause_stall_s",
            "evaluation_wait_s",
        )
        for name in (*limits, "rollout_timeout_s", "snapshot_every_s"):
            value = getattr(self, name)
            if value is None and name not in limits:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
                raise InvalidRequestError(f"{name} must be a positive number of seconds, got {value!r}")
        if self.on_stale not in ("expire", "raise"):
            raise InvalidRequestError(f'on_stale must be "expire" or "raise", got {self.on_stale!r}')
        if self.max_samples_per_worker is not None and self.max_samples_per_worker < self.group_size:
            raise InvalidRequestError(
                f"max_samples_per_worker={self.max_samples_per_worker} has no room for a group of {self.group_size}, which "
                "stays on one worker"
            )
        self._check_kinds()
        self.staleness_policy()
        self.failure_policy()

    def staleness_policy(self) -> StalenessPolicy:
        """The part of it that is about staleness."""
        return StalenessPolicy(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            order=self.admission,
            look_ahead=self.look_ahead,
        )

    def failure_policy(self) -> FailurePolicy:
        """The part of it that is about samples that fail."""
        return FailurePolicy(
            max_infra_retries=self.max_infra_retries,
            max_data_retries=self.max_data_retries,
            then=self.on_failed_sample,
            min_group_size=self.min_group_size,
            max_refills=self.group_size,
        )

    def seed_of(self, number: int, round: int, num_data_failures: int) -> int:
        """The sampling seed of a group, or of a sample of it that failed before: below 2**63, and without pattern."""
        base = self.sampling.seed if self.sampling.seed is not None else self.seed
        return mix(mix(mix(mix(base) ^ number) ^ round) ^ num_data_failures) >> 1

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != _default(f))
        return f"RolloutConfig({', '.join(given)})"

    def _check_kinds(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequestError(f"sampling must be SamplingParams, got {self.sampling!r:.60}")
        if self.placement not in (None, *PLACEMENTS):
            raise InvalidRequestError(f"placement must be None or one of {PLACEMENTS}, got {self.placement!r}")
        for name in ("rollouts_jsonl", "versions_file"):
            if not isinstance(getattr(self, name), (str, Path, type(None))):
                raise InvalidRequestError(f"{name} must be a path or None, got {getattr(self, name)!r}")
        for name in ("shuffle", "drop_equal_rewards", "progress_bar"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_integer(self, name: str, low: int) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidRequestError(f"{name} must be an integer of at least {low}, got {value!r}")


def _default(config_field: Any) -> Any:
    return SamplingParams() if config_field.name == "sampling" else config_field.default


def mix(value: int) -> int:
    """A bijection of 64-bit integers. Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)

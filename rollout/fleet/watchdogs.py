"""When a fleet that looks alive is not: each condition has a reason to read, and all but the first a limit."""

from dataclasses import dataclass

from rollout.rollout_config import RolloutConfig


@dataclass(kw_only=True)
class Signs:
    """When something was last seen to happen, in the loop's seconds."""

    progress_at: float
    """A token, a result, a reward, an admission or a hand-out; or nothing was outstanding."""
    reward_at: float
    """A reward came; or none was pending."""
    serving_at: float
    """Some worker could take work."""


@dataclass(frozen=True, kw_only=True)
class Outstanding:
    """What is to be done at a moment, and by whom."""

    now: float
    """In the loop's seconds, as all of Signs."""
    num_running: int
    num_queued: int
    num_rewarding: int
    """Samples on workers, waiting for one, and waiting for their rewards."""
    num_barren: int
    """Groups in a row that ended unused."""
    last_failure: str | None
    is_deserted: bool
    """No worker is left."""
    not_serving: str | None
    """A worker that takes no work, with its reason."""


def stall(signs: Signs, outstanding: Outstanding, config: RolloutConfig) -> str | None:
    """What is wrong, in a sentence that names the limit; None if nothing is."""
    now, num_rewarding = outstanding.now, outstanding.num_rewarding
    if outstanding.is_deserted and not num_rewarding:
        return "no worker is left: the last one has been removed; controller.add_worker() brings one"
    if is_barren(outstanding.num_barren, config):
        because = f"; the last failure: {outstanding.last_failure}" if outstanding.last_failure else ""
        return (
            f"zero output: the last {outstanding.num_barren} groups were all filtered, failed or expired "
            f"(max_groups_without_output={barren_limit_of(config)}){because}"
        )
    if num_rewarding and now - signs.reward_at > config.reward_stall_s:
        return (
            f"reward stall: {num_rewarding} rollouts wait for their rewards and none came for "
            f"{now - signs.reward_at:.0f} s (reward_stall_s={config.reward_stall_s:g})"
        )
    if now - signs.serving_at > config.pause_stall_s:
        return (
            f"pause stall: no worker could take work for {now - signs.serving_at:.0f} s "
            f"(pause_stall_s={config.pause_stall_s:g}); it is paused, fenced, stale or dead"
            + (f"; {outstanding.not_serving}" if outstanding.not_serving is not None else "")
        )
    num_running, num_queued = outstanding.num_running, outstanding.num_queued
    if (num_running or num_queued) and now - signs.progress_at > config.no_progress_s:
        return (
            f"no progress: {num_running} samples run, {num_queued} wait for a worker that takes them, and no token, result or "
            f"reward came for {now - signs.progress_at:.0f} s (no_progress_s={config.no_progress_s:g})"
        )
    return None


def is_barren(num_barren: int, config: RolloutConfig) -> bool:
    """Whether so many groups in a row ended unused that it is a stall."""
    return num_barren >= barren_limit_of(config)


def barren_limit_of(config: RolloutConfig) -> int:
    """How many groups in a row may end unused."""
    if config.max_groups_without_output is not None:
        return config.max_groups_without_output
    return 10 * config.prompts_per_step

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


def stall(
    signs: Signs, config: RolloutConfig, *, now: float, num_running: int, num_queued: int, num_rewarding: int,
    num_barren: int, last_failure: str | None, is_deserted: bool,
    not_serving: str | None,
) -> str | None:  # fmt: skip
    """What is wrong, in a sentence that names the limit; None if nothing is."""
    if is_deserted and not num_rewarding:
        return "no worker is left: the last one has been removed; controller.add_worker() brings one"
    barren_limit = barren_limit_of(config)
    if num_barren >= barren_limit:
        because = f"; the last failure: {last_failure}" if last_failure else ""
        return (
            f"zero output: the last {num_barren} groups were all filtered, failed or expired "
            f"(max_groups_without_output={barren_limit}){because}"
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
            + (f"; {not_serving}" if not_serving is not None else "")
        )
    if (num_running or num_queued) and now - signs.progress_at > config.no_progress_s:
        return (
            f"no progress: {num_running} samples run, {num_queued} wait for a worker that takes them, and no token, result or "
            f"reward came for {now - signs.progress_at:.0f} s (no_progress_s={config.no_progress_s:g})"
        )
    return None


def barren_limit_of(config: RolloutConfig) -> int:
    """How many groups in a row may end unused."""
    if config.max_groups_without_output is not None:
        return config.max_groups_without_output
    return 10 * config.prompts_per_step

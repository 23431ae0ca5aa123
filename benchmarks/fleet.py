"""What the controller costs, and what running ahead of the trainer buys: simulated fleets, the real controller.

    python benchmarks/fleet.py overhead     # CPU per rollout at 1, 8, 64, 512 workers, the simulation of the workers included
    python benchmarks/fleet.py staleness    # step time and length bias under a heavy tail, by max_staleness; --plot draws it
    python benchmarks/fleet.py hour         # an hour of 512 workers: how much faster than real time
    python benchmarks/fleet.py memory       # resident memory over a million rollouts

Times of "overhead" and "hour" are CPU seconds of this process, which has one thread at work; those of "staleness" are of the
virtual clock, and so the same on every machine.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout import Rollout, RolloutConfig, RolloutController, SamplingParams
from rollout.simulate import LogNormalLengths, SimulatedFleet, SimulatedTrainer

GROUP_SIZE = 8
PROMPTS = [[2 + n % 50, 3, 4] for n in range(1000)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "staleness", "hour", "memory"])
    parser.add_argument("--tokens", type=int, default=500, help="mean response length, of overhead and hour")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="of memory")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512], help="of overhead")
    parser.add_argument("--steps", type=int, default=150, help="of staleness, at each max_staleness")
    parser.add_argument("--plot", type=Path, help="of staleness: a PNG file to draw to")
    args = parser.parse_args(argv)
    match args.what:
        case "overhead":
            overhead(args.tokens, args.workers)
        case "staleness":
            rows = staleness(args.steps)
            if args.plot is not None:
                plot(rows, args.plot)
        case "hour":
            hour(args.tokens)
        case "memory":
            memory(args.rollouts)


def overhead(tokens: int, workers: Sequence[int]) -> None:
    """CPU per rollout, from prompt to acknowledged batch."""
    print("| workers | rollouts | rollouts/s | CPU us per rollout | against 8 workers |\n|---|---|---|---|---|")
    at_eight = 0.0
    for num_workers in workers:
        fleet, controller = a_fleet(num_workers, tokens=tokens)
        with controller:
            trainer = SimulatedTrainer(controller, fleet, step_s=20.0)
            trainer.run(1)
            before, began = controller.metrics()["rollout/samples_consumed"], time.process_time()
            trainer.run(max(3, 128 // num_workers))
            seconds = time.process_time() - began
            rollouts = controller.metrics()["rollout/samples_consumed"] - before
        each = seconds / rollouts
        at_eight = each if num_workers == 8 else at_eight
        ratio = f"{each / at_eight:.2f}x" if at_eight else ""
        print(f"| {num_workers} | {rollouts:.0f} | {1 / each:.0f} | {1e6 * each:.0f} | {ratio} |", flush=True)


@dataclass(frozen=True, kw_only=True)
class StalenessRow:
    """How a run went at one `max_staleness`."""

    max_staleness: int
    step_s: float
    """Mean, of the virtual clock."""
    trainer_waits: float
    """Share of the time."""
    workers_idle: float
    """Share of the time."""
    staleness_mean: float
    length_bias: float
    """See `rollout.batches.metrics.length_bias`."""


def staleness(num_steps: int) -> list[StalenessRow]:
    """A lognormal tail (sigma 1, cut at 8 times the mean), the trainer as slow as the mean generation."""
    print("| max_staleness | step s | against 0 | trainer waits | workers idle | staleness mean | length bias |")
    print("|---|---|---|---|---|---|---|")
    rows: list[StalenessRow] = []
    for max_staleness in (0, 1, 2, 4):
        row = run_at(max_staleness, num_steps)
        rows.append(row)
        print(
            f"| {row.max_staleness} | {row.step_s:.1f} | {row.step_s / rows[0].step_s:.2f}x | {row.trainer_waits:.0%} | "
            f"{row.workers_idle:.0%} | {row.staleness_mean:.2f} | {row.length_bias:.3f} |",
            flush=True,
        )
    return rows


def run_at(max_staleness: int, num_steps: int) -> StalenessRow:
    """One of its rows, after five steps that do not count."""
    mean, tokens_per_s, num_workers, slots = 500, 50.0, 8, 32
    fleet = SimulatedFleet(
        num_workers,
        lengths=LogNormalLengths(mean=mean, sigma=1.0, longest=8 * mean),
        slots=slots,
        tokens_per_s=tokens_per_s,
    )
    config = a_config(num_workers * slots // GROUP_SIZE, 8 * mean, max_staleness=max_staleness)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        trainer = SimulatedTrainer(controller, fleet, step_s=mean / tokens_per_s)
        trainer.run(5)
        records = trainer.run(num_steps)
        metrics = controller.metrics()
    return StalenessRow(
        max_staleness=max_staleness,
        step_s=sum(record.step_s for record in records) / len(records),
        trainer_waits=metrics["trainer/wait_share"],
        workers_idle=metrics["engine/idle_share"],
        staleness_mean=metrics["rollout/staleness_mean"],
        length_bias=metrics["rollout/length_bias"],
    )


def plot(rows: Sequence[StalenessRow], path: Path) -> None:
    """Step time and length bias, each on an axis of its own that begins at 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    times = figure.subplots()
    bias = times.twinx()
    where = range(len(rows))
    times.bar(where, [row.step_s for row in rows], width=0.5, color="tab:blue", alpha=0.6)
    bias.plot(where, [row.length_bias for row in rows], "o-", color="tab:red")
    times.set_xticks(where, [str(row.max_staleness) for row in rows])
    times.set_xlabel("max_staleness (0: synchronous)")
    times.set_ylabel("step time, s", color="tab:blue")
    bias.set_ylabel("length bias", color="tab:red")
    bias.set_ylim(0, max(0.1, 1.2 * max(row.length_bias for row in rows)))
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def hour(tokens: int) -> None:
    """3600 virtual seconds of 512 workers."""
    fleet, controller = a_fleet(512, tokens=tokens)
    began, steps = time.process_time(), 0
    with controller:
        trainer = SimulatedTrainer(controller, fleet, step_s=20.0)
        while fleet.loop.now() < 3600:
            trainer.run(1)
            steps += 1
        rollouts = controller.metrics()["rollout/samples_consumed"]
    seconds = time.process_time() - began
    print(
        f"{fleet.loop.now():.0f} virtual seconds in {seconds:.0f} CPU seconds: {fleet.loop.now() / seconds:.0f}x; {steps} steps, "
        f"{rollouts:.0f} rollouts, {fleet.loop.num_events} events"
    )


def memory(rollouts: int) -> None:
    """Resident memory as a run goes on."""
    fleet, controller = a_fleet(64, tokens=20)
    process, done = psutil.Process(), 0.0
    print("| rollouts | MiB |\n|---|---|")
    with controller:
        trainer = SimulatedTrainer(controller, fleet, step_s=1.0)
        while done < rollouts:
            trainer.run(max(1, rollouts // 10 // (128 * GROUP_SIZE)))
            done = controller.metrics()["rollout/samples_consumed"]
            print(f"| {done:.0f} | {process.memory_info().rss / 2**20:.0f} |", flush=True)


def a_fleet(num_workers: int, *, tokens: int) -> tuple[SimulatedFleet, RolloutController]:
    """16 samples at once on each worker, two groups of each worker in a batch."""
    fleet = SimulatedFleet(
        num_workers,
        lengths=LogNormalLengths(mean=tokens, sigma=1.0, longest=8 * tokens),
        slots=16,
        tokens_per_s=tokens / 10,
    )
    return fleet, fleet.controller(PROMPTS, reward, config=a_config(2 * num_workers, 8 * tokens))


def a_config(prompts_per_step: int, max_new_tokens: int, *, max_staleness: int = 1) -> RolloutConfig:
    return RolloutConfig(
        group_size=GROUP_SIZE,
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        num_epochs=None,
        snapshot_every_s=None,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def reward(rollout: Rollout, text: str) -> float:
    return float(len(rollout.token_ids) % 2)


if __name__ == "__main__":
    # A full collection looks at every token of every rollout alive: with the default thresholds it is a third of the cost.
    gc.set_threshold(100_000, 50, 100)
    main()

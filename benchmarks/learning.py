"""It learns: a small model from random weights, by GRPO and by PPO, while its weights change under what it generates.

    python benchmarks/learning.py                            # both algorithms, three kinds of update, five seeds
    python benchmarks/learning.py --algorithm grpo --modes live synchronous --seeds 2
    python benchmarks/learning.py --ablate                   # GRPO without one correctness feature at a time

A Llama of 100,000 parameters sorts three digits; the reward is the share of right positions. A RolloutController generates
with one Ray worker, the trainer has the other core. The curves are the greedy reward on 200 prompts that it never trains
on, by plain forwards after the run, so that measuring takes no time of it.

    live          generation goes on while a batch trains; new weights meet it in flight
    drained       the same, but what is being generated is waited for before new weights are published
    synchronous   generation and training take turns; each batch is of the weights that train on it

The modes differ in nothing else. Written to --out: curves.json, curves.png, and a folder for each run, with the picture and
one rollout of each group, that `rollsync report` makes a page of.
"""

import argparse
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
import transformers
from learning_run import Behaviour, Curve, Setting, learn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers.utils.logging import disable_progress_bar

GOAL = 0.9
MODES = {
    "live": {"max_staleness": 1},
    "drained": {"max_staleness": 1, "drains": True},
    "synchronous": {"max_staleness": 0},
}
FRESH = Setting(algorithm="grpo", max_staleness=0)
STALE = replace(FRESH, lag=8)
ABLATIONS = {
    "synchronous": FRESH,
    "stale prefixes allowed": replace(FRESH, stale_prefixes=True),
    "a quarter fails and is left out": replace(FRESH, failing=0.25),
    "failed samples trained on": replace(FRESH, failing=0.25, trains_failed=True),
    "eight versions stale": STALE,
    "no importance correction": replace(STALE, behaviour=Behaviour.CURRENT),
    "log-probs by their labels": replace(STALE, behaviour=Behaviour.LABELLED),
    "labels eight versions too new": replace(STALE, behaviour=Behaviour.LABELLED, label_error=8),
    "labels eight versions too old": replace(STALE, behaviour=Behaviour.LABELLED, label_error=-8),
}
"""Each row after the one that has the feature."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", choices=["grpo", "ppo"], default=["grpo", "ppo"], help="(both)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    parser.add_argument(
        "--ablate",
        nargs="*",
        choices=ABLATIONS,
        metavar="ROW",
        help="these ablations instead, all without a name, with GRPO and an engine in this process",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--budget", type=int, default=40_000, help="samples of a run (default 40,000)")
    parser.add_argument("--workers", type=int, default=1, help="Ray workers; 0: one engine in this process (default 1)")
    parser.add_argument("--out", type=Path, help="a new folder (default runs/learning-<time>)")
    args = parser.parse_args(argv)
    for name, low in (("seeds", 1), ("budget", 1), ("workers", 0)):
        if getattr(args, name) < low:
            parser.error(f"argument --{name}: must be at least {low}, got {getattr(args, name)}")
    out = args.out or Path("runs") / f"learning-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists():
        parser.error(f"argument --out: {out} exists; give a new folder")
    torch.set_num_threads(1)  # beside as many of the engine; more gain nothing on a model of this size

    if args.ablate is not None:
        settings = {name: ABLATIONS[name] for name in args.ablate or ABLATIONS}
        args.workers = 0  # they go step by step, and so come out the same each time
    else:
        settings = {
            f"{algorithm}, {mode}": Setting(algorithm=algorithm, **MODES[mode])
            for algorithm in args.algorithm
            for mode in args.modes
        }
    one = next(iter(settings.values()))
    engine = f"{args.workers} Ray workers" if args.workers else "the engine in this process"
    print(
        f"{platform.machine()}, {engine}, 1 thread for each engine, 1 for the trainer, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; batches of {one.prompts_per_batch} prompts x {one.group_size} samples in "
        f"{one.num_minibatches} minibatches, AdamW {one.learning_rate:g}, {args.budget} samples a run, {args.seeds} seeds",
        flush=True,
    )
    if args.workers:
        import ray

        ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    disable_progress_bar()  # of the models that are saved for the workers
    curves: dict[str, list[Curve]] = {name: [] for name in settings}
    folders: list[Path] = []
    # seed by seed, so that a slow minute of the machine strikes all alike
    for seed in range(args.seeds):
        for name, setting in settings.items():
            folders.append(folder := out / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}")
            num_batches = max(args.budget // setting.batch_size, 1)
            curve = learn(setting, seed, num_batches, folder, num_workers=args.workers)
            curves[name].append(curve)
            print(line(name, curve), flush=True)
    print_table(curves)
    write_json(curves, settings, out / "curves.json")
    plot(curves, settings, out / "curves.png")
    for folder in folders:
        shutil.copy(out / "curves.png", folder)
    print(f"\ncurves: {out / 'curves.png'}, {out / 'curves.json'}")


def line(name: str, curve: Curve) -> str:
    """One run."""
    version = curve.version_at(GOAL)
    when = "never" if version is None else f"after {curve.samples[version]} samples, {curve.seconds[version]:.1f} s"
    return (
        f"{name:38} seed {curve.seed}: {GOAL:g} {when}; at the end, {curve.samples[-1]} samples and "
        f"{curve.seconds[-1]:.1f} s, {curve.held_out[-1]:.3f}"
    )


def print_table(curves: Mapping[str, Sequence[Curve]]) -> None:
    """Mean and, behind ±, standard deviation over the seeds; of those that reached the goal."""
    heads = ("samples", "seconds", "reward", "spanning", "stale", "gap")
    print(f"\n{'':38} {'reached':>8}" + "".join(f"{head:>16}" for head in heads))
    for name, runs in curves.items():
        reached = [(curve, version) for curve in runs if (version := curve.version_at(GOAL)) is not None]
        cells = [
            spread([curve.samples[version] for curve, version in reached], ".0f"),
            spread([curve.seconds[version] for curve, version in reached], ".1f"),
            spread([curve.held_out[-1] for curve in runs], ".3f"),
            f"{fmean(fmean(curve.spanning) for curve in runs):.1%}",
            f"{fmean(fmean(curve.staleness) for curve in runs):.2f}",
            f"{fmean(fmean(curve.logprob_gap) for curve in runs):.1e}",
        ]
        print(f"{name:38} {len(reached):>4} of {len(runs)}" + "".join(f"{cell:>16}" for cell in cells))
    print(
        f"samples, seconds: until the held-out reward reached {GOAL:g}. reward: held-out, at the end. spanning: rollouts that "
        "an update\nmet in flight. stale: versions from a rollout's oldest token to the trainer's. gap: |trainer's log-prob - "
        "engine's|, nats."
    )


def spread(values: Sequence[float], spec: str) -> str:
    if not values:
        return "-"
    mean = format(fmean(values), spec)
    return f"{mean} ± {stdev(values):{spec}}" if len(values) > 1 else mean


def write_json(curves: Mapping[str, Sequence[Curve]], settings: Mapping[str, Setting], path: Path) -> None:
    rows = {
        name: {
            "setting": asdict(settings[name]),
            "runs": [{"samples": curve.samples, **asdict(curve)} for curve in runs],
        }
        for name, runs in curves.items()
    }
    path.write_text(json.dumps({"goal": GOAL, "rows": rows}, indent=1), encoding="utf-8")


def panels(
    curves: Mapping[str, Sequence[Curve]], settings: Mapping[str, Setting]
) -> dict[str, dict[str, Sequence[Curve]]]:
    """The rows of each algorithm, by what tells them apart."""
    by_algorithm: dict[str, dict[str, Sequence[Curve]]] = {}
    for name, runs in curves.items():
        algorithm = settings[name].algorithm
        by_algorithm.setdefault(algorithm, {})[name.removeprefix(f"{algorithm}, ")] = runs
    return by_algorithm


def plot(curves: Mapping[str, Sequence[Curve]], settings: Mapping[str, Setting], path: Path) -> None:
    """For each algorithm: held-out reward against samples and against wall time, the mean of the seeds and one standard
    deviation around it."""
    by_algorithm = panels(curves, settings)
    figure = Figure(figsize=(12, 4.5 * len(by_algorithm)), layout="constrained")
    axes = figure.subplots(len(by_algorithm), 2, sharey=True, squeeze=False)
    for (algorithm, rows), (by_samples, by_seconds) in zip(by_algorithm.items(), axes, strict=True):
        for name, runs in rows.items():
            held_out = np.array([curve.held_out for curve in runs])
            draw(by_samples, name, np.array(runs[0].samples), held_out)
            # seeds take different times: each is read off where all of them still ran
            seconds = np.linspace(0, min(curve.seconds[-1] for curve in runs), 200)
            draw(by_seconds, name, seconds, np.array([np.interp(seconds, c.seconds, c.held_out) for c in runs]))
        by_samples.set(title=f"{algorithm.upper()}", xlabel="samples", ylabel="held-out reward, greedy", ylim=(0, 1))
        by_seconds.set(title=f"{algorithm.upper()}", xlabel="seconds")
        for panel in (by_samples, by_seconds):
            panel.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
        by_samples.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def draw(panel: Axes, name: str, x: np.ndarray, values: np.ndarray) -> None:
    mean, deviation = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0.0
    (drawn,) = panel.plot(x, mean, label=name)
    panel.fill_between(x, mean - deviation, mean + deviation, color=drawn.get_color(), alpha=0.2, linewidth=0)


if __name__ == "__main__":
    main()

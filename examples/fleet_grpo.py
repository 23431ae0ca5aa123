"""The demo's job on a fleet: Ray workers generate, this process trains, and its weights reach them while they generate.

    python examples/fleet_grpo.py                # two workers; SmolLM2-135M-Instruct learns one-digit products
    python examples/fleet_grpo.py --workers 0    # the same loop over one engine in this process

Each worker hosts an engine with weights of its own. The controller keeps all of them busy: it admits prompts as far ahead
as `max_staleness` lets it, has each finished rollout rewarded beside generation, and hands out a batch of complete groups as
a lease. The trainer steps on its own model and publishes: the weights are staged once, in shared memory where the workers
are on this machine, and each worker goes over to them in a pause between two of its steps. Requests in flight stay in
flight, and are of both versions.

A worker that dies (try `kill -9`, the pids are printed) is replaced and given the newest weights; what it was generating
goes on elsewhere. With `--checkpoint FOLDER` a run that was stopped, or killed, goes on when the same command is given
again. `examples/ray_job/` submits this very script to a cluster.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import checkpoints
import torch
from run_folder import RunFolder
from smollm2 import ModelNotFoundError, load_model, model_folder
from tasks import DEFAULT_TASK, TASKS, Task

from rollout import RewardResult, Rollout, RolloutConfig, RolloutController, RolloutError, RolloutGroup, SamplingParams
from rollout.worker_config import WorkerConfig
from sync import SyncConfig, SyncError, WeightSync
from trainer_adapters import group_advantages, grpo_loss, pad_rollouts, token_logprobs

MAX_GRAD_NORM = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if something failed, 130 after Ctrl-C. Bad arguments exit with 2."""
    parser, args = parse_args(argv)
    try:
        config = fleet_config(args)
        saved = checkpoints.newest(args.checkpoint) if args.checkpoint else None
        model, tokenizer = load_model(str(saved or args.model))
        run = RunFolder(args.out, tokenizer=tokenizer)
    except (RolloutError, ModelNotFoundError, OSError) as error:
        parser.error(str(error))
    print(
        f"{args.model} learns {args.task}: {args.steps} steps of {args.prompts_per_step} prompts x {args.group_size} "
        f"rollouts of up to {args.max_new_tokens} tokens, seed {args.seed}",
        flush=True,
    )
    code = 0
    try:
        train(model, tokenizer, config, saved, args, run)
    except KeyboardInterrupt:
        print("interrupted; what there is has been written", flush=True)
        code = 130
    except (RolloutError, SyncError, OSError) as error:  # OSError: the cluster that RAY_ADDRESS names is not there
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = 1
    run.print_summary()
    return code


def fleet_config(args: argparse.Namespace) -> RolloutConfig:
    """How the fleet generates. The controller writes the rollouts and the engines' updates into the run's folder itself."""
    return RolloutConfig(
        num_workers=args.workers,
        placement="PACK" if args.workers else None,  # all of them or none, on as few machines as can be
        group_size=args.group_size,
        prompts_per_step=args.prompts_per_step,
        max_staleness=args.max_staleness,
        sampling=SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature),
        seed=args.seed,
        rollouts_jsonl=args.out / "rollouts.jsonl",
        versions_file=args.checkpoint / "versions.json" if args.checkpoint else None,
    )


def train(
    model: Any, tokenizer: Any, config: RolloutConfig, saved: Path | None, args: argparse.Namespace, run: RunFolder
) -> None:
    """Each step: lease a batch, learn from it, publish the new weights."""
    task = TASKS[args.task]
    data = task.dataset(seed=args.seed, size=args.steps * args.prompts_per_step)

    def reward(rollout: Rollout, text: str) -> RewardResult:
        entry, answer = data[rollout.metadata["number"]], task.extract(text)
        described = {"prompt": entry["question"], "solution": entry["answer"], "answer": answer}
        return RewardResult(reward=float(data.score_answer(answer, entry)), metadata=described)

    controller = RolloutController(
        model_folder(args.model) if args.workers else load_model(str(saved or args.model))[0],
        [{"prompt": prompt(task, data[n]["question"], tokenizer), "number": n} for n in range(len(data))],
        reward,
        tokenizer=tokenizer,
        config=config,
        workers=worker_config(args) if args.workers else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    first_step = 1 if saved is None else checkpoints.restore(saved, optimizer, controller) + 1
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.train()
    if args.workers:
        print(f"starting {args.workers} workers, each with {args.cpus_per_worker:g} of Ray's CPUs", flush=True)
    with controller, WeightSync(controller, config=SyncConfig(run_folder=args.checkpoint)) as weight_sync:
        if args.workers:
            print_placement(controller)
        if any(worker["state"] == "stale" for worker in controller.status()["workers"].values()):
            weight_sync.publish(model)  # the run goes on: its workers serve nothing until they hold its weights
        for step in range(first_step, args.steps + 1):
            started_at = time.monotonic()
            with controller.next_batch() as lease:  # an exception gives the groups back; a clean exit says: trained
                num_mixed = learn(model, optimizer, lease.groups, pad_id, args.temperature)
            report = weight_sync.publish(model)
            if step == first_step:
                print(f"weights: {report.num_bytes / 1e6:.3g} MB a version, by {report.transport}", flush=True)
            for name, cause in report.failures.items():
                print(f"{name} did not take version {report.version}; it gets the newest when it is back: {cause}")

            seconds = time.monotonic() - started_at
            rollouts = lease.rollouts
            run.count(rollouts)
            run.write_step(
                {
                    "step": step,
                    "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
                    "mixed_groups": num_mixed,
                    "tokens_per_s": sum(len(rollout.token_ids) for rollout in rollouts) / seconds,
                    "staleness": lease.staleness,
                    "spanning": sum(rollout.spans_update for rollout in rollouts),
                    "pause_wait_ms": 1000 * report.pause_wait_s,
                    "pause_held_ms": 1000 * report.commit_s,
                    "straddlers": report.straddlers,
                    "version": report.version,
                    "seconds": seconds,
                }
            )
            if args.checkpoint and (step % args.save_every == 0 or step == args.steps):
                checkpoints.save(args.checkpoint, step, model, tokenizer, optimizer, controller)


def learn(
    model: Any, optimizer: torch.optim.Optimizer, groups: Sequence[RolloutGroup], pad_id: int, temperature: float
) -> int:
    """One GRPO step, backward group by group. Returns how many groups had something to teach: equal rewards make all
    advantages, and so all gradients, of a group zero."""
    mixed = [group for group in groups if len({rollout.reward for rollout in group}) > 1]
    num_tokens = sum(sum(rollout.loss_mask) for group in mixed for rollout in group)
    for group in mixed:
        batch = pad_rollouts([group], pad_id)
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        logprobs = token_logprobs(logits[:, :-1], batch.targets, temperature)
        loss, metrics = grpo_loss(
            logprobs,
            batch.old_logprobs,
            group_advantages(batch.rewards, batch.group_index),
            batch.loss_mask,
            proximal_logprobs=logprobs.detach(),  # one step per batch: the clip is around where it starts
        )
        (loss * metrics.num_tokens / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return len(mixed)


def prompt(task: Task, question: str, tokenizer: Any) -> str | list[dict[str, str]]:
    """Chat messages, to which the controller applies the chat template; text where the tokenizer has none."""
    if tokenizer.chat_template is None:
        return f"{task.instruction}\n{question}\n"
    return [{"role": "system", "content": task.instruction}, {"role": "user", "content": question}]


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """What each worker takes of its machine. It loads the model itself, in the trainer's dtype."""
    return WorkerConfig(
        model=model_folder(args.model),
        dtype=torch.float32,
        num_cpus=args.cpus_per_worker,
        num_threads=max(1, int(args.cpus_per_worker)),
    )


def print_placement(controller: RolloutController) -> None:
    """Which process runs where."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    healths = [worker.health() for worker in controller.workers()]
    workers = (f"{health.worker_id} (pid {health.pid}) on node {health.node_id[:8]}" for health in healths)
    print(f"trainer on node {here[:8]}; workers {', '.join(workers)}", flush=True)


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="Ray workers; 0: one engine here (default 2)")
    parser.add_argument(
        "--cpus-per-worker",
        type=float,
        default=0.5,
        help="what each books with Ray; it runs as many threads, at least one (default 0.5)",
    )
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each published (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--max-staleness", type=int, default=1, help="versions a token may be behind (default 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default 1)")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate (default 2e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default 0)")
    parser.add_argument("--out", type=Path, help="the run's folder (default runs/fleet-<time>)")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from and to save in (default: none)")
    parser.add_argument("--save-every", type=int, default=4, help="steps between two checkpoints (default 4)")
    args = parser.parse_args(argv)
    for name in ("steps", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1, got {getattr(args, name)}")
    if args.workers and importlib.util.find_spec("ray") is None:
        parser.error(
            "workers are Ray actors: pip install 'ray[default]', or --workers 0 for one engine in this process"
        )
    if importlib.util.find_spec("reasoning_gym") is None:
        parser.error("the tasks come in the package reasoning-gym: pip install reasoning-gym==0.1.25")
    if args.out is None:
        args.out = Path("runs") / f"fleet-{datetime.now():%Y%m%d-%H%M%S}"
    return parser, args


if __name__ == "__main__":
    sys.exit(main())

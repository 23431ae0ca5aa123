"""GRPO on a real language model whose weights change while it generates.

    python examples/grpo.py    # SmolLM2-135M-Instruct learns one-digit products; about five minutes on two cores
    python examples/grpo.py --task spell_backward --steps 30 --model path/to/a/causal-lm

Trainer and engine share one set of parameters. Each group that has been trained makes room for one new prompt, so the
engine generates the next step's groups while this step's train; the latest of them are in flight when the optimizer
steps inside `engine.update()`, and go on under the new version. No rollout is more than one version old when it trains.
A group whose rewards are all equal has nothing to teach: it counts in the reward, and its backward is skipped.

`--seed` fixes the prompts and the sampling noise. Which token an update meets is a matter of time, so runs still differ.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from questions import Questions
from run_folder import RunFolder
from smollm2 import ModelNotFoundError, load_model
from tasks import DEFAULT_TASK, TASKS, Task

from rollout import EngineConfig, GenerationEngine, RolloutError
from trainer_adapters import group_advantages, grpo_loss, pad_rollouts, token_logprobs

MAX_GRAD_NORM = 1.0
UPDATE_TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if the engine failed, 130 after Ctrl-C. Bad arguments exit with 2."""
    parser, args = parse_args(argv)
    try:
        model, tokenizer = load_model(args.model)
        run = RunFolder(args.out, tokenizer=tokenizer)
    except (ModelNotFoundError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    print(
        f"{args.model} learns {args.task}: {args.steps} steps of {args.prompts_per_step} prompts x {args.group_size} "
        f"rollouts of up to {args.max_new_tokens} tokens, seed {args.seed}",
        flush=True,
    )
    code = 0
    try:
        train(model, tokenizer, TASKS[args.task], args, run)
    except KeyboardInterrupt:
        print("interrupted; what there is has been written", flush=True)
        code = 130
    except RolloutError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = 1
    run.print_summary()
    return code


def train(model: Any, tokenizer: Any, task: Task, args: argparse.Namespace, run: RunFolder) -> None:
    """Each step: collect its groups, run them backward one by one, step inside a live update."""
    num_groups = args.prompts_per_step
    questions = Questions(task, tokenizer, seed=args.seed, size=args.steps * num_groups)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    model.train()
    with GenerationEngine(model, EngineConfig(num_threads=args.threads)) as engine:

        def submit(number: int) -> tuple[int, Any]:
            sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
            return number, questions.submit(engine, number, size=args.group_size, **sampling)

        queue = deque(submit(number) for number in range(num_groups))
        for step in range(1, args.steps + 1):
            started_at = time.monotonic()
            groups = [questions.graded(*queue.popleft()) for _ in range(num_groups)]
            rollouts = [rollout for group in groups for rollout in group]
            trained_version = engine.version
            run.write_rollouts(rollouts, step=step, trained_version=trained_version)

            # Equal rewards make all advantages, and so all gradients, of a group zero.
            mixed = [len({rollout.reward for rollout in group}) > 1 for group in groups]
            num_tokens = sum(
                sum(r.loss_mask) for group, learns in zip(groups, mixed, strict=True) if learns for r in group
            )
            for position, group in enumerate(groups):
                if mixed[position]:
                    batch = pad_rollouts([group], pad_id)
                    logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
                    logprobs = token_logprobs(logits[:, :-1], batch.targets, args.temperature)
                    loss, loss_metrics = grpo_loss(
                        logprobs,
                        batch.old_logprobs,
                        group_advantages(batch.rewards, batch.group_index),
                        batch.loss_mask,
                        proximal_logprobs=logprobs.detach(),  # one step per batch: the clip is around where it starts
                    )
                    (loss * loss_metrics.num_tokens / num_tokens).backward()
                if (number := step * num_groups + position) < args.steps * num_groups:
                    queue.append(submit(number))
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            with engine.update(timeout_s=UPDATE_TIMEOUT_S):
                optimizer.step()
            optimizer.zero_grad()

            update = engine.last_update
            run.write_update(update)
            seconds = time.monotonic() - started_at
            run.write_step(
                {
                    "step": step,
                    "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
                    "mixed_groups": sum(mixed),
                    "tokens_per_s": sum(len(rollout.token_ids) for rollout in rollouts) / seconds,
                    "staleness": trained_version - min(rollout.min_version for rollout in rollouts),
                    "spanning": sum(rollout.spans_update for rollout in rollouts),
                    "pause_wait_ms": 1000 * update.wait_s,
                    "pause_held_ms": 1000 * update.held_s,
                    "straddlers": update.straddlers,
                    "version": update.version,
                    "seconds": seconds,
                }
            )


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument(
        "--task", default=DEFAULT_TASK, metavar="TASK", help=f"one of {', '.join(TASKS)} (default {DEFAULT_TASK})"
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each a live update (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt, at least 2 (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default 1)")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate (default 2e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default 0)")
    parser.add_argument("--out", type=Path, help="the run's folder (default runs/grpo-<time>)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    args = parser.parse_args(argv)
    if args.task not in TASKS:
        parser.error(f"argument --task: {args.task!r} is not one of {', '.join(TASKS)}")
    minimum = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 1, "threads": 1, "seed": 0}
    for name, low in minimum.items():
        value = getattr(args, name)
        if value is not None and not low <= value < 2**31:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least {low}, got {value}")
    for name in ("temperature", "lr"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"argument --{name}: must be above 0, got {getattr(args, name)}")
    if importlib.util.find_spec("reasoning_gym") is None:
        parser.error("the tasks come in the package reasoning-gym: pip install reasoning-gym==0.1.25")
    if args.out is None:
        args.out = Path("runs") / f"grpo-{datetime.now():%Y%m%d-%H%M%S}"
    return parser, args


if __name__ == "__main__":
    sys.exit(main())

"""GRPO that trains LoRA adapters (PEFT) only, on an engine that knows nothing of adapters.

    python examples/lora.py    # adapters on SmolLM2-135M-Instruct learn one-digit products; about four minutes on two cores

The engine has weights of its own, as plain as the model was. `PolicyView` offers it each base weight with the adapter added,
W + scale * B @ A, computed on the way: the trainer's base weights are only read, so a thousand publishes leave them as
they are, where merging and unmerging would round them each time.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from extras import need_extra
from questions import Questions
from run_folder import RunFolder
from smollm2 import load_model
from tasks import DEFAULT_TASK, TASKS

from rollout import GenerationEngine
from sync import WeightSync
from trainer_adapters import PolicyView, group_advantages, grpo_loss, pad_rollouts, token_logprobs


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model, tokenizer = load_model(args.model)
    run = RunFolder(args.out, tokenizer=tokenizer)
    train(model, tokenizer, args, run)
    run.print_summary()
    return 0


def train(base: Any, tokenizer: Any, args: argparse.Namespace, run: RunFolder) -> Any:
    """The model with its adapters, trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(args.seed)
    questions = Questions(TASKS[args.task], tokenizer, seed=args.seed, size=args.steps * args.prompts_per_step)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    # The engine copies the base before PEFT puts its layers into it.
    with GenerationEngine(base, copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        num_trained, num_all = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
        print(f"trains {num_trained:,} of {num_all:,} numbers ({num_trained / num_all:.1%})", flush=True)
        optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
        policy = PolicyView(model)
        model.train()

        def submit(step: int) -> list[Any]:
            numbers = range((step - 1) * args.prompts_per_step, step * args.prompts_per_step)
            return [
                (n, questions.submit(engine, n, size=args.group_size, max_new_tokens=args.max_new_tokens))
                for n in numbers
            ]

        in_flight = submit(1)
        for step in range(1, args.steps + 1):
            started_at = time.monotonic()
            groups = [questions.graded(number, futures) for number, futures in in_flight]
            rollouts = [rollout for group in groups for rollout in group]
            trained_version = engine.version
            run.write_rollouts(rollouts, step=step, trained_version=trained_version)
            in_flight = submit(step + 1) if step < args.steps else []

            # Equal rewards make all advantages, and so all gradients, of a group zero.
            mixed = [group for group in groups if len({rollout.reward for rollout in group}) > 1]
            num_tokens = sum(sum(rollout.loss_mask) for group in mixed for rollout in group)
            for group in mixed:
                batch = pad_rollouts([group], pad_id)
                logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
                logprobs = token_logprobs(logits[:, :-1], batch.targets)
                loss, metrics = grpo_loss(
                    logprobs,
                    batch.old_logprobs,
                    group_advantages(batch.rewards, batch.group_index),
                    batch.loss_mask,
                    proximal_logprobs=logprobs.detach(),  # one step per batch: the clip is around where it starts
                )
                (loss * metrics.num_tokens / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report = weight_sync.publish(policy)

            run.write_update(engine.last_update)
            seconds = time.monotonic() - started_at
            run.write_step(
                {
                    "step": step,
                    "reward": sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts),
                    "tokens_per_s": sum(len(rollout.token_ids) for rollout in rollouts) / seconds,
                    "staleness": trained_version - min(rollout.min_version or 0 for rollout in rollouts),
                    "spanning": sum(rollout.spans_update for rollout in rollouts),
                    "stage_ms": 1000 * report.stage_s,
                    "pause_wait_ms": 1000 * report.pause_wait_s,
                    "pause_held_ms": 1000 * report.commit_s,
                    "straddlers": report.straddlers,
                    "version": report.version,
                    "seconds": seconds,
                }
            )
    return model


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--rank", type=int, default=8, help="of each adapter (default 8)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each with one publish (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--lr", type=float, default=5e-4, help="AdamW's learning rate (default 5e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the adapters (default 0)")
    parser.add_argument("--out", type=Path, help="the run's folder (default runs/lora-<time>)")
    args = parser.parse_args(argv)
    need_extra(parser, "peft", "peft")
    if args.out is None:
        args.out = Path("runs") / f"lora-{datetime.now():%Y%m%d-%H%M%S}"
    return args


if __name__ == "__main__":
    sys.exit(main())

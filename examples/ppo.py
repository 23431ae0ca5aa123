"""PPO with a critic, on a language model whose engine never stops: several optimizer steps a batch, one publish.

    python examples/ppo.py         # SmolLM2-135M-Instruct learns one-digit products; about five minutes on two cores

The engine has weights of its own. While it generates the next batch, the trainer goes through this one several times, in
minibatches; then `WeightSync` brings it the result, once, so that the steps in between do not age what it is generating.

The critic is a linear head over the policy's last hidden states. A rollout's reward lies on its last token, less a penalty
at each token for leaving the reference policy, the model as it was at the start; GAE makes advantages of both.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from questions import Questions
from run_folder import RunFolder
from smollm2 import load_model
from tasks import DEFAULT_TASK, TASKS
from torch import Tensor, nn

from rollout import GenerationEngine
from sync import WeightSync
from trainer_adapters import (
    RolloutBatch,
    ValueHead,
    gae,
    normalised,
    pad_rollouts,
    ppo_loss,
    reference_kl,
    reference_log_ratio,
    token_logprobs,
    token_rewards,
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model, tokenizer = load_model(args.model)
    run = RunFolder(args.out, tokenizer=tokenizer)
    train(model, tokenizer, args, run)
    run.print_summary()
    return 0


def train(model: Any, tokenizer: Any, args: argparse.Namespace, run: RunFolder) -> None:
    torch.manual_seed(args.seed)
    questions = Questions(TASKS[args.task], tokenizer, seed=args.seed, size=args.steps * args.prompts_per_step)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    model.train()
    learner = Learner(model, ValueHead(model.config.hidden_size))
    optimizer = torch.optim.AdamW(
        [
            {"params": model.parameters(), "lr": args.lr},
            {"params": learner.critic.parameters(), "lr": args.critic_lr},
        ],
        weight_decay=0.0,
    )

    with GenerationEngine(model, copy_weights=True) as engine, WeightSync(engine) as weight_sync:

        def submit(step: int) -> list[Any]:
            numbers = range((step - 1) * args.prompts_per_step, step * args.prompts_per_step)
            return [
                (n, questions.submit(engine, n, size=args.samples, max_new_tokens=args.max_new_tokens)) for n in numbers
            ]

        in_flight = submit(1)
        for step in range(1, args.steps + 1):
            started_at = time.monotonic()
            groups = [questions.graded(number, futures) for number, futures in in_flight]
            rollouts = [rollout for group in groups for rollout in group]
            trained_version = engine.version
            run.write_rollouts(rollouts, step=step, trained_version=trained_version)
            in_flight = submit(step + 1) if step < args.steps else []

            # What the batch is measured by, all of the weights before its first step.
            batch = pad_rollouts(groups, pad_id)
            mask = batch.loss_mask
            with torch.no_grad():
                old_logprobs, old_values = learner(batch)
                reference_logprobs = logprobs_of(reference, batch)
            log_ratio = reference_log_ratio(old_logprobs, reference_logprobs)
            rewards = token_rewards(batch.rewards, mask, kl=log_ratio, kl_coef=args.kl_coef)
            advantages, returns = gae(rewards, old_values, mask)
            advantages = normalised(advantages, mask)

            for _ in range(args.epochs):
                for rows in torch.randperm(len(rollouts)).split(args.minibatch):
                    part = batch.rows(rows)
                    logprobs, values = learner(part)
                    loss, metrics = ppo_loss(
                        logprobs,
                        part.old_logprobs,  # of the versions that sampled the tokens: what staleness is corrected by
                        advantages[rows],
                        part.loss_mask,
                        # of the weights before this batch: what the clip is around
                        proximal_logprobs=old_logprobs[rows],
                        values=values,
                        old_values=old_values[rows],
                        returns=returns[rows],
                    )
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

            report = weight_sync.publish(model)
            run.write_update(engine.last_update)
            seconds = time.monotonic() - started_at
            run.write_step(
                {
                    "step": step,
                    "reward": batch.rewards.mean().item(),
                    "kl": reference_kl(old_logprobs, reference_logprobs)[mask].mean().item(),
                    "explained_variance": metrics.explained_variance,
                    "value_loss": metrics.value_loss,
                    "clip_share": metrics.policy.clip_share,
                    "tokens_per_s": sum(len(rollout.token_ids) for rollout in rollouts) / seconds,
                    "staleness": trained_version - min(rollout.min_version or 0 for rollout in rollouts),
                    "spanning": sum(rollout.spans_update for rollout in rollouts),
                    "pause_wait_ms": 1000 * report.pause_wait_s,
                    "pause_held_ms": 1000 * report.commit_s,
                    "straddlers": report.straddlers,
                    "version": report.version,
                    "seconds": seconds,
                }
            )


@dataclass(frozen=True)
class Learner:
    """The policy and its critic."""

    model: Any
    critic: ValueHead

    def __call__(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and values [B, T-1] of the targets. The critic reads the policy's hidden states and does not shape
        them."""
        output = self.model(
            batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, output_hidden_states=True
        )
        values = self.critic(output.hidden_states[-1].detach())
        return token_logprobs(output.logits[:, :-1], batch.targets), values[:, :-1]


def logprobs_of(model: Any, batch: RolloutBatch) -> Tensor:
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return token_logprobs(logits[:, :-1], batch.targets)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="batches, each with one publish (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="different prompts of a batch (default 4)")
    parser.add_argument("--samples", type=int, default=4, help="rollouts of a prompt (default 4)")
    parser.add_argument("--epochs", type=int, default=2, help="how often a batch is gone through (default 2)")
    parser.add_argument("--minibatch", type=int, default=8, help="rollouts of an optimizer step (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--lr", type=float, default=1e-5, help="the policy's learning rate (default 1e-5)")
    parser.add_argument("--critic-lr", type=float, default=1e-3, help="the critic's learning rate (default 1e-3)")
    parser.add_argument("--kl-coef", type=float, default=0.02, help="weight of the KL penalty (default 0.02)")
    parser.add_argument("--seed", type=int, default=0, help="of questions and minibatches (default 0)")
    parser.add_argument("--out", type=Path, help="the run's folder (default runs/ppo-<time>)")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("runs") / f"ppo-{datetime.now():%Y%m%d-%H%M%S}"
    return args


if __name__ == "__main__":
    sys.exit(main())

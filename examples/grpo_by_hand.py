"""The loop of `grpo.py` with everything visible: no losses, batches or run folders from the library, only an engine.

    python examples/grpo_by_hand.py    # SmolLM2-135M-Instruct learns one-digit products; about four minutes on two cores

Read `train` from top to bottom. Each group that has been trained on makes room for a new prompt, so the engine generates the
next step's rollouts meanwhile; the latest of them are in flight when the optimizer steps inside `engine.update()`, and go on
under the new weights. Each token keeps the log-prob that it was sampled with, so the loss knows what the policy of that
moment thought of it.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from questions import Questions
from smollm2 import load_model
from tasks import DEFAULT_TASK, TASKS
from torch import Tensor

from rollout import GenerationEngine, Rollout, SamplingParams

MAX_RATIO = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model, tokenizer = load_model(args.model)
    train(model, tokenizer, args)
    return 0


def train(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    num_prompts = args.prompts_per_step
    questions = Questions(TASKS[args.task], tokenizer, seed=args.seed, size=args.steps * num_prompts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    model.train()

    with GenerationEngine(model) as engine:  # generates with the very Parameters that the optimizer changes

        def submit(number: int) -> tuple[int, Any]:
            """A prompt, `group_size` samples of it; returns at once, with their futures."""
            params = SamplingParams(max_new_tokens=args.max_new_tokens, seed=(args.seed << 32) + number)
            return number, engine.submit_group(questions.prompt_ids(number), params, size=args.group_size)

        in_flight = deque(submit(number) for number in range(num_prompts))
        for step in range(1, args.steps + 1):
            # 1. This step's rollouts, with their rewards.
            groups = [questions.graded(*in_flight.popleft()) for _ in range(num_prompts)]
            rollouts = [rollout for group in groups for rollout in group]
            staleness = engine.version - min(rollout.min_version or 0 for rollout in rollouts)

            # 2. A backward for each group, in the place of which a group of the next step begins. A group of equal rewards
            # has nothing to teach and counts for nothing; all tokens of the others count alike.
            mixed = [len({rollout.reward for rollout in group}) > 1 for group in groups]
            num_tokens = sum(
                len(r.token_ids) for group, learns in zip(groups, mixed, strict=True) if learns for r in group
            )
            for position, group in enumerate(groups):
                if mixed[position]:
                    input_ids, mask, old_logprobs = tensors_of(group)
                    logits = model(input_ids, use_cache=False).logits[:, :-1].float()
                    logprobs = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
                    losses = policy_losses(logprobs, old_logprobs, advantages_of(group))
                    (losses[mask].sum() / num_tokens).backward()
                if (number := step * num_prompts + position) < len(questions):
                    in_flight.append(submit(number))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            # 3. The live update: generation stands still for this block, between two of its steps.
            with engine.update():
                optimizer.step()
            optimizer.zero_grad()

            reward = sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts)
            spanning = sum(rollout.spans_update for rollout in rollouts)
            print(
                f"step {step:>3}  reward {reward:.3f}  staleness {staleness}  spanning {spanning} of {len(rollouts)}  "
                f"held {1000 * engine.last_update.held_s:.0f} ms  version {engine.version}",
                flush=True,
            )


def tensors_of(group: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids [B, T], padded on the right; and, of the tokens that the positions [B, T-1] predict, whether the policy
    sampled them, and the log-probs that it sampled them with.

    Padding needs no attention mask: no token attends to what comes after it."""
    width = max(len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in group)
    input_ids = torch.zeros(len(group), width, dtype=torch.long)
    mask = torch.zeros(len(group), width - 1, dtype=torch.bool)
    old_logprobs = torch.zeros(len(group), width - 1)
    for row, rollout in enumerate(group):
        start, end = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.token_ids)
        input_ids[row, :end] = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        mask[row, start - 1 : end - 1] = True
        old_logprobs[row, start - 1 : end - 1] = torch.tensor(rollout.logprobs)
    return input_ids, mask, old_logprobs


def advantages_of(group: Sequence[Rollout]) -> Tensor:
    """[B]: how much better each did than its group, in standard deviations; all 0 where they did equally well."""
    rewards = torch.tensor([rollout.reward for rollout in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def policy_losses(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """[B, T-1]: the policy gradient of each token, weighted by how likely it has become since it was sampled.

    There is one step for each batch, so that the clip around the weights where the batch began never binds."""
    weight = (logprobs.detach() - old_logprobs).exp().clamp(max=MAX_RATIO)
    return -weight * advantages[:, None] * logprobs


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each a live update (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt, at least 2 (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate (default 2e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and sampling (default 0)")
    args = parser.parse_args(argv)
    if args.group_size < 2:  # the deviation of a single reward is NaN, and so would all weights be
        parser.error(f"argument --group-size: must be at least 2, got {args.group_size}")
    return args


if __name__ == "__main__":
    sys.exit(main())

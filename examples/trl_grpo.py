"""TRL's GRPO trainer with an engine behind it: one argument more than TRL alone.

    pip install 'rollsync[trl]'
    python examples/trl_grpo.py    # SmolLM2-135M-Instruct learns one-digit products; about six minutes on two cores
    python examples/trl_grpo.py --task spell_backward --steps 30 --model path/to/a/causal-lm

TRL picks the prompts, computes rewards and advantages, and steps; the engine generates, in one continuous batch, with the
trainer's own Parameters. After each step the engine takes the new version, so every rollout is of the newest policy:
`sampling/sampling_logp_difference/max` in TRL's logs stays at rounding error. The reward function also sees the policy
version of each rollout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras import need_extra
from smollm2 import load_model
from tasks import DEFAULT_TASK, TASKS

from rollout import GenerationEngine


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """TRL's logs, a dict a step."""
    args = parse_args(argv)
    from datasets import Dataset
    from trl import GRPOConfig

    from trainer_adapters.trl import EngineGRPOTrainer

    model, tokenizer = load_model(args.model)
    task = TASKS[args.task]
    data = task.dataset(seed=args.seed, size=args.steps * args.prompts_per_step)

    def verified(completions: list[Any], number: list[int], policy_version: list[int], **_: Any) -> list[float]:
        answers = [task.extract(messages[0]["content"]) for messages in completions]
        pairs = zip(answers, number, strict=True)
        return [float(data.score_answer(answer, data[position])) for answer, position in pairs]

    config = GRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.group_size,
        gradient_accumulation_steps=args.prompts_per_step,  # the step's prompts are generated together, trained in turn
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        seed=args.seed,
        bf16=False,  # weights are fp32: under autocast the trainer's log-probs would differ from the engine's
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    with GenerationEngine(model, tokenizer=tokenizer) as engine:
        trainer = EngineGRPOTrainer(
            model,
            verified,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": chat(task.instruction, data[i]["question"]), "number": i} for i in range(len(data))]
            ),
            processing_class=tokenizer,
            engine=engine,
        )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, step in enumerate(steps, start=1):
        print(
            f"step {number:>3}  reward {step['reward']:.3f}  version {step['engine/version']:.0f}  "
            f"{step['rollout/tokens_per_s']:.0f} tokens/s  log-prob difference at most "
            f"{step['sampling/sampling_logp_difference/max']:.1e}"
        )
    return steps


def chat(instruction: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default 1)")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate (default 2e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and training (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/trl-grpo"), help="TRL's output folder")
    args = parser.parse_args(argv)
    need_extra(parser, "trl", "trl")
    return args


if __name__ == "__main__":
    sys.exit(0 if main() else 1)

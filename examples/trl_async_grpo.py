"""TRL's AsyncGRPO trainer with an engine in the place of its vLLM server: two arguments more than TRL alone.

    pip install 'rollsync[trl]'
    python examples/trl_async_grpo.py --model path/to/a/causal-lm      # AsyncGRPO's attention needs a GPU

The engine has weights of its own. It generates while the trainer trains, and takes new weights while it generates: they are
staged beside the requests in flight, then copied in one short pause, and the requests go on. Every sample carries the
version of its oldest token; TRL's `sample/staleness_max` says how old the oldest was, and `ratio` what that did. For a model
of yours that is partly frozen: `EngineWeightTransfer(engine, policy=model)`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from extras import need_extra
from tasks import DEFAULT_TASK, TASKS
from transformers import AutoTokenizer

from rollout import EngineConfig, GenerationEngine


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    with engine_for(args) as engine:
        trainer = trainer_over(engine, args)
        trainer.train()
    print_steps(trainer)
    return 0


def engine_for(args: argparse.Namespace) -> GenerationEngine:
    """Computes in the precision that the trainer computes in, or the importance ratios would show the difference."""
    config = EngineConfig(num_threads=args.threads, autocast_dtype=None if args.cpu else torch.bfloat16)
    return GenerationEngine.from_pretrained(args.model, config, dtype=torch.float32, device="cpu" if args.cpu else None)


def trainer_over(engine: GenerationEngine, args: argparse.Namespace) -> Any:
    """TRL's trainer, which loads its own copy of the model, between the engine's two ends."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trainer_adapters.trl.async_grpo import EngineRolloutWorker, EngineWeightTransfer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    task = TASKS[args.task]
    data = task.dataset(seed=args.seed, size=64)

    def verified(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        answers = [task.extract(messages[0]["content"]) for messages in completions]
        pairs = zip(answers, number, strict=True)
        return [float(data.score_answer(answer, data[position])) for answer, position in pairs]

    config = AsyncGRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.group_size,
        gradient_accumulation_steps=args.prompts_per_step,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        max_staleness=args.max_staleness,
        token_budget=0,  # left out, TRL asks a vLLM server for it
        learning_rate=args.lr,
        seed=args.seed,
        bf16=not args.cpu,
        use_cpu=args.cpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_list(
        [{"prompt": chat(task.instruction, data[i]["question"]), "number": i} for i in range(len(data))]
    )
    worker = EngineRolloutWorker(
        engine, args=config, prompts=dataset, reward_funcs=verified, processing_class=tokenizer
    )
    return AsyncGRPOTrainer(
        args.model,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=EngineWeightTransfer(engine),
    )


def print_steps(trainer: Any) -> None:
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, step in enumerate(steps, start=1):
        print(
            f"step {number:>3}  reward {step['reward']:.3f}  staleness at most {step['sample/staleness_max']:.0f}  "
            f"ratio {step['ratio']:.3f}  weight sync {step['perf/weight_sync_s']:.3f} s"
        )


def chat(instruction: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a transformers folder or a hub name; both sides load it")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default 12)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="upper bound on a response (default 24)")
    parser.add_argument("--max-staleness", type=int, default=2, help="versions that a sample may be old (default 2)")
    parser.add_argument("--lr", type=float, default=1e-5, help="AdamW's learning rate (default 1e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and training (default 0)")
    parser.add_argument("--threads", type=int, help="the engine's torch threads (default: torch's own choice)")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, where the model has an attention for it")
    parser.add_argument("--out", type=Path, default=Path("runs/trl-async-grpo"), help="TRL's output folder")
    args = parser.parse_args(argv)
    need_extra(parser, "trl", "trl")
    return args


if __name__ == "__main__":
    sys.exit(main())

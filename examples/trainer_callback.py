"""Hugging Face's Trainer with one callback more, and an engine that always has its newest weights.

    python examples/trainer_callback.py    # SmolLM2-135M-Instruct learns one-digit products; about two minutes on two cores

`WeightSyncCallback` publishes after each optimizer step. A second callback, `HeldOut`, has the engine answer questions that
are not trained on: it asks after a step and reads the answers after a later one, so that the training never waits for
them. An answer that is being written when new weights come goes on under them; its version spans say which wrote what.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from questions import Questions
from smollm2 import load_model
from tasks import DEFAULT_TASK, TASKS
from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from rollout import GenerationEngine, Rollout, SamplingParams
from sync import WeightSync
from trainer_adapters import WeightSyncCallback


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model, tokenizer = load_model(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    task = TASKS[args.task]
    trained = Questions(task, tokenizer, seed=args.seed, size=args.steps * args.batch_size)
    held_out = Questions(task, tokenizer, seed=args.seed + 1, size=args.held_out)
    kept_back = {tuple(held_out.prompt_ids(number)) for number in range(len(held_out))}
    numbers = [number for number in range(len(trained)) if tuple(trained.prompt_ids(number)) not in kept_back]

    with GenerationEngine(model, copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        evaluation = HeldOut(engine, held_out)
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=str(args.out),
                max_steps=args.steps,
                per_device_train_batch_size=args.batch_size,
                learning_rate=args.lr,
                lr_scheduler_type="constant",
                seed=args.seed,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                dataloader_pin_memory=False,
                disable_tqdm=True,
            ),
            train_dataset=[example_of(trained, number, tokenizer) for number in numbers],
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            callbacks=[WeightSyncCallback(weight_sync), evaluation],  # in this order: publish, then ask
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return 0


def example_of(questions: Questions, number: int, tokenizer: Any) -> dict[str, list[int]]:
    """A prompt and its right answer, of which the answer counts in the loss."""
    prompt_ids = questions.prompt_ids(number)
    answer_ids = [*tokenizer.encode(questions.answer(number), add_special_tokens=False), tokenizer.eos_token_id]
    input_ids = prompt_ids + answer_ids
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "labels": [-100] * len(prompt_ids) + answer_ids,
    }


class HeldOut(TrainerCallback):
    """Keeps the engine answering held-out questions, greedily, and prints how well it does. A round of questions begins
    when the one before it has been read."""

    def __init__(self, engine: GenerationEngine, questions: Questions) -> None:
        self.scores: list[float] = []
        """Of each round, in order."""
        self._engine = engine
        self._questions = questions
        self._asked: list[tuple[int, Sequence[Future[Rollout]]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ask()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        line = f"step {state.global_step:>3}  loss {logs['loss']:.3f}  version {self._engine.version}"
        if all(future.done() for _, futures in self._asked for future in futures):
            line += f"  {self._read()}"
            self._ask()
        print(line, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read()
        self._ask()
        print(f"at the end: {self._read()}", flush=True)

    def _ask(self) -> None:
        params = SamplingParams(temperature=0, max_new_tokens=16)
        self._asked = [
            (number, [self._engine.submit(self._questions.prompt_ids(number), params)])
            for number in range(len(self._questions))
        ]

    def _read(self) -> str:
        """Waits for the answers."""
        rollouts = [rollout for number, futures in self._asked for rollout in self._questions.graded(number, futures)]
        self.scores.append(sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts))
        oldest = min(rollout.min_version or 0 for rollout in rollouts)
        newest = max(rollout.max_version or 0 for rollout in rollouts)
        versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        return f"held out {self.scores[-1]:.3f}, {len(rollouts)} answers by {versions}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a transformers folder or a hub name")
    parser.add_argument("--task", default=DEFAULT_TASK, choices=TASKS, help=f"default {DEFAULT_TASK}")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each with one publish (default 12)")
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a step (default 16)")
    parser.add_argument("--held-out", type=int, default=32, help="questions that are not trained on (default 32)")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate (default 2e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the training (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer-callback"), help="the Trainer's output folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

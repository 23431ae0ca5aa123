"""What TRL needs beside a tiny model: a tokenizer whose words are numbers, prompts, and a reward."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from fakes import EOS_ID, VOCAB_SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Token i, from 3 on, is the word "w<i>": the ids of a prompt can be read off its text."""
    words = {"<pad>": 0, "<eos>": EOS_ID, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def prompts(count: int) -> Dataset:
    """Different ones, of three to five tokens."""
    texts = [" ".join(f"w{5 + (7 * row + i) % 50}" for i in range(3 + row % 3)) for row in range(count)]
    return Dataset.from_dict({"prompt": texts, "answer": list(range(count))})


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """For a config of TRL's: 3 steps of 2 prompts x 4 samples on a CPU."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **changes,
    }


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: how many of the tokens are even."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Logs(TrainerCallback):
    """Keeps what was logged, a dict a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.steps.append(dict(logs))

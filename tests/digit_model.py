"""A random Llama in a folder that is right about every fourth time on `TASK`: it writes words of that task's questions and
the digits 1, 2 and 3, of which the last one is its answer. So most groups of its rollouts have unequal rewards."""

from pathlib import Path

from fakes import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TASK = "count_bits"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}answer {% endif %}"
WORDS = ["<pad>", "<eos>", "<unk>", "answer", "How", "many", "bits", "are", "there", "binary", "number", "1", "2", "3"]


def save_digit_model(folder: Path) -> Path:
    """For the examples, which take a transformers folder."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    tiny_llama(vocab_size=len(WORDS)).save_pretrained(folder)
    return folder

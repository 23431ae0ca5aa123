"""A random Llama in a folder, with a tokenizer whose words are mostly digits, so that some of its answers are right."""

from pathlib import Path

from fakes import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}answer {% endif %}"
WORDS = ["<pad>", "<eos>", "<unk>", "answer", "multiplication", "result", *map(str, range(10))]


def save_digit_model(folder: Path) -> Path:
    """For the examples, which take a transformers folder."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    tiny_llama(vocab_size=len(WORDS)).save_pretrained(folder)
    return folder

"""The reasoning-gym tasks that the examples train on, and how an answer is found in a response.

An allow-list, because a reward must never run what a model wrote: of reasoning-gym 0.1.25, `string_insertion`,
`spiral_matrix`, `binary_matrix` and `n_queens` give the answer to `eval`, `countdown`, `puzzle24`, `simple_integration`
and `polynomial_multiplication` to sympy's parser (which evals too), and `coin_flip` to `Fraction`, where `1e999999999`
takes all memory. The verifiers of the tasks below compare text or numbers; each was read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
MAX_ANSWER_CHARS = 200


def last_number(text: str) -> str:
    """The last number in the text, without thousands separators; "" if there is none. "2 + 3 = 5." gives "5"."""
    numbers = _NUMBER.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text))
    return numbers[-1][:MAX_ANSWER_CHARS] if numbers else ""


def first_line(text: str) -> str:
    """The first line that is not blank, without quotes around it and a full stop at its end; "" if there is none."""
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".").strip("\"'`* ")[:MAX_ANSWER_CHARS] if lines else ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One reasoning-gym data set in a form that a small model gets partly right."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its data set is made with, beyond seed and size."""
    instruction: str
    """The system prompt."""
    extract: Callable[[str], str]
    """Finds the answer in a response; the verifier sees nothing else."""

    def dataset(self, *, seed: int, size: int) -> Any:
        """Entries with "question" and "answer", the same for the same seed; `.score_answer(answer, entry)` verifies."""
        import reasoning_gym

        return reasoning_gym.create_dataset(self.name, seed=seed, size=size, **self.settings)


def _number(name: str, **settings: Any) -> Task:
    return Task(name=name, settings=settings, instruction="Answer with one number.", extract=last_number)


def _text(name: str, **settings: Any) -> Task:
    return Task(name=name, settings=settings, instruction="Give only the answer.", extract=first_line)


TASKS = {
    task.name: task
    for task in (
        # compare Decimals, else count a substring in part (utils.compute_decimal_reward)
        _number("products", max_digits=1),
        _number("chain_sum", max_terms=2, max_digits=1),
        # compare Decimals
        _number("decimal_chain_sum", max_terms=2, max_digits=1, max_decimal_places=1),
        # compare floats
        _number("number_format", max_num_candidates=2, min_n=1, max_n=100),
        # ProceduralDataset's own verifier: equal text, else a substring counts in part
        _number("gcd", max_value=20),
        _number("count_bits", max_n=32),
        _number("letter_counting", min_words=1, max_words=3),
        _number("leg_counting", min_animals=1, max_animals=2, max_instances=3),
        _number("number_sequence", max_complexity=1, min_value=0, max_value=50),
        _number("simple_equations", max_terms=2, max_value=10),
        _text("caesar_cipher", max_words=3, max_rotation=3),
        # compare letter by letter
        _text("spell_backward", max_word_len=4),
        # compare words between commas
        _text("word_sorting", max_words=3, max_word_length=5),
        # compare text without case and spaces
        _text("needle_haystack", min_num_statements=3, max_num_statements=5),
        _text("family_relationships", max_family_size=5),
    )
}
DEFAULT_TASK = "products"

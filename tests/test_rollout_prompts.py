"""Prompts of every kind become ids once, in an order that a cursor can go on from."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollout import InvalidRequestError
from rollout.batches.prompts import Prompt, Prompts, encode_prompt


class CountingTokenizer:
    """Characters are ids; a template wraps the turns. Counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        return [0, *map(ord, text)]

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert tokenize
        assert not return_dict
        self.calls += 1
        return [9, *(ord(c) for message in conversation for c in message["content"]), 8]


def take(prompts: Prompts, count: int) -> list[Prompt]:
    taken = [prompts.next() for _ in range(count)]
    assert None not in taken
    return [prompt for prompt in taken if prompt is not None]


@pytest.mark.parametrize("row", [[5, 6], (5, 6), torch.tensor([5, 6]), np.array([5, 6]), {"prompt": [5, 6]}])
def test_token_ids_are_taken_as_they_are(row: object) -> None:
    """trl#5224, verl#6719: nothing is decoded and encoded again."""
    assert encode_prompt(row, None)[0] == [5, 6]


def test_text_messages_and_columns() -> None:
    tokenizer = CountingTokenizer()
    assert encode_prompt("ab", tokenizer) == ([0, 97, 98], {})
    messages = [{"role": "user", "content": "ab"}]
    assert encode_prompt(messages, tokenizer) == ([9, 97, 98, 8], {})
    row = {"prompt": messages, "answer": 3, "level": "easy"}
    assert encode_prompt(row, tokenizer) == ([9, 97, 98, 8], {"answer": 3, "level": "easy"})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("text", "needs a tokenizer"),
        ([{"role": "user", "content": "x"}], "needs a tokenizer"),
        ([], "empty"),
        ({"question": "x"}, '"prompt"'),
        ({"prompt": {"prompt": [1]}}, '"prompt" must be'),
        ([[1, 2]], "flat list"),
        ([1.5], "flat list"),
        ([True], "flat list"),
        (7, "got int"),
        (b"abc", "got bytes"),
    ],
)
def test_what_is_no_prompt_is_refused_with_the_remedy(row: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        encode_prompt(row, None)


def test_a_bad_prompt_is_handed_out_with_its_error_and_the_next_one_follows() -> None:
    first, second = take(Prompts([[], [1]]), 2)
    assert "prompt 0: the prompt is empty" in (first.error or "")
    assert second.prompt_ids == [1]
    assert second.error is None


class Strict(CountingTokenizer):
    """As a real one: it cannot encode half a surrogate pair, and its template refuses what it was not written for."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        if conversation[0]["role"] != "user":
            raise RuntimeError("a conversation must start with the user")
        return super().apply_chat_template(conversation, **kwargs)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("half \ud83d", "UnicodeEncodeError"),
        ([{"role": "system", "content": "x"}], "must start with the user"),
        ([{"role": "user"}], "KeyError: 'content'"),
        ({"prompt": [{"content": "x"}]}, "KeyError: 'role'"),
    ],
)
def test_a_prompt_that_the_tokenizer_or_its_template_refuses_fails_alone(bad: object, says: str) -> None:
    first, second, third = take(Prompts(["a", bad, "b"], Strict()), 3)
    assert (first.error, third.error) == (None, None)
    assert (third.prompt_id, third.prompt_ids) == ("p2", [98])
    assert "prompt 1: the tokenizer cannot encode" in (second.error or "")
    assert says in (second.error or "")


class Refusing(list[list[int]]):
    """A dataset that encodes its rows itself."""

    def __getitem__(self, position: Any) -> Any:
        if position == 1:
            raise InvalidRequestError("the row has no text")
        return super().__getitem__(position)


def test_a_row_that_its_source_refuses_fails_alone() -> None:
    taken = take(Prompts(Refusing([[5], [6], [7]]), num_epochs=2), 6)
    assert [prompt.error for prompt in taken] == [None, "prompt 1: the row has no text", None] * 2
    assert [prompt.number for prompt in taken] == list(range(6))


def test_ids_are_deterministic_and_name_the_row_in_every_epoch() -> None:
    prompts = Prompts([[1], [2]], num_epochs=2)
    assert [(p.number, p.prompt_id) for p in take(prompts, 4)] == [(0, "p0"), (1, "p1"), (2, "p0"), (3, "p1")]
    assert prompts.is_exhausted
    assert prompts.next() is None


def test_the_template_is_applied_once_and_not_once_an_epoch() -> None:
    tokenizer = CountingTokenizer()
    prompts = Prompts([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}], tokenizer, num_epochs=3)
    taken = take(prompts, 6)
    assert tokenizer.calls == 2
    assert [prompt.metadata["n"] for prompt in taken] == [1, 2] * 3


def test_each_epoch_is_shuffled_by_the_seed_alone() -> None:
    rows = [[n + 2] for n in range(20)]
    orders = [[p.prompt_ids[0] for p in take(Prompts(rows, num_epochs=2, shuffle_seed=s), 40)] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:20]) == sorted(orders[0][20:])
    assert orders[0][:20] != orders[0][20:]


def test_a_cursor_goes_on_where_it_was_and_reads_again_what_is_outstanding() -> None:
    rows = [[n + 2] for n in range(10)]
    first = Prompts(rows, num_epochs=2, shuffle_seed=3)
    taken = take(first, 13)
    second = Prompts(rows, num_epochs=2, shuffle_seed=3)
    outstanding = second.rewind(13, [2, 11])
    assert outstanding == {2: taken[2], 11: taken[11]}
    assert take(second, 7) == take(first, 7)
    assert second.next() is None


class Repeatable:
    """An iterable without positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[n + 2] for n in range(self.count)])


def test_an_iterable_is_read_in_order_and_again_in_each_epoch() -> None:
    prompts = Prompts(Repeatable(3), num_epochs=2)
    assert [p.prompt_ids[0] for p in take(prompts, 6)] == [2, 3, 4, 2, 3, 4]
    assert prompts.next() is None
    resumed = Prompts(Repeatable(3), num_epochs=2)
    assert resumed.rewind(4, [1])[1].prompt_ids == [3]
    assert [p.prompt_ids[0] for p in take(resumed, 2)] == [3, 4]


def test_a_generator_has_one_epoch() -> None:
    prompts = Prompts(([n] for n in (5, 6)), num_epochs=None)
    assert [p.prompt_ids for p in take(prompts, 2)] == [[5], [6]]
    assert prompts.next() is None


def test_what_is_known_of_the_end_of_an_iterable_is_known_without_reading_it() -> None:
    def rows() -> Iterator[list[int]]:
        yield [5]
        raise AssertionError("it was read")

    prompts = Prompts(rows())
    take(prompts, 1)
    assert not prompts.is_known_exhausted
    short = Prompts(Repeatable(1))
    take(short, 1)
    assert short.next() is None
    assert short.is_known_exhausted


def test_a_source_that_got_shorter_is_refused_when_going_on() -> None:
    with pytest.raises(InvalidRequestError, match="ends after 3"):
        Prompts(Repeatable(3)).rewind(5, [])


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ([], {}),
        ("text", {}),
        ({"prompt": [1]}, {}),
        (7, {}),
        ([[1]], {"num_epochs": 0}),
        (Repeatable(2), {"shuffle_seed": 1}),
        (([n] for n in (5, 6)), {"num_epochs": 2}),
        ([[1]], {"num_epochs": 1.5}),
    ],
)
def test_sources_that_cannot_work_are_refused(source: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Prompts(source, **settings)

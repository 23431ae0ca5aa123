"""Prompts: text, chat messages, token ids or rows of a dataset in; token ids with deterministic names out."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from rollout.errors import InvalidRequestError

CACHED_PROMPTS = 10_000


class Tokenizer(Protocol):
    """The part of a tokenizer that turns prompts into ids."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]: ...


@runtime_checkable
class Rows(Protocol):
    """What can be read by position: a list, a tuple, a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready to be generated from."""

    number: int
    """Its place in the order of the run: 0, 1, 2, ... over all epochs."""
    prompt_id: str
    """Names the row it came from, the same in every epoch."""
    prompt_ids: list[int]  # [prompt_len]; empty if `error`
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the row, but for the prompt."""
    error: str | None = None
    """Why it cannot be generated from. It is accounted for like any other."""


def encode_prompt(row: Any, tokenizer: Tokenizer | None) -> tuple[list[int], Mapping[str, Any]]:
    """The ids and the columns of a prompt, which is one of

    - token ids: a list of ints, a 1-D tensor or array;
    - text, encoded as it stands, special tokens as the tokenizer adds them;
    - chat messages: a list of dicts, through the chat template, with the opening of the assistant's turn;
    - a dict with one of these as "prompt"; its other columns become metadata.

    The template is applied here and nowhere else: from here on there are only ids. InvalidRequestError names what is
    wrong with the prompt and the remedy.
    """
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise InvalidRequestError(f'a dict needs a "prompt", got the columns {sorted(map(str, row))}')
        if isinstance(row["prompt"], Mapping):
            raise InvalidRequestError('"prompt" must be text, messages or token ids, got a dict')
        ids, _ = encode_prompt(row["prompt"], tokenizer)
        return ids, _columns(row)
    if isinstance(row, (torch.Tensor, np.ndarray)):
        row = row.tolist()
    if isinstance(row, str):
        ids = tokenized("text", partial(_tokenizer(tokenizer, "text").encode, row))
    elif isinstance(row, (bytes, bytearray)) or not isinstance(row, Sequence):
        raise InvalidRequestError(f"a prompt must be text, messages, token ids or a dict, got {type(row).__name__}")
    elif row and all(isinstance(message, Mapping) for message in row):
        template = _tokenizer(tokenizer, "chat messages").apply_chat_template
        messages = [dict(message) for message in row]
        ids = tokenized(
            "chat messages",
            partial(template, messages, add_generation_prompt=True, tokenize=True, return_dict=False),
        )
    else:
        ids = list(row)
    if not ids:
        raise InvalidRequestError("the prompt is empty; it needs at least one token (the BOS id, say)")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise InvalidRequestError(f"a prompt's token ids must be one flat list of ints, got {ids!r:.60}")
    return list(ids), {}


def tokenized(what: str, encode: Callable[[], list[int]]) -> list[int]:
    """What `encode` returns. Whatever the tokenizer or its chat template raises is an InvalidRequestError, of that one
    prompt: half a surrogate pair in a text, roles in an order that the template refuses, a message without content."""
    try:
        return encode()
    except Exception as error:  # a chat template is a program of the model's author and may raise anything
        raise InvalidRequestError(
            f"the tokenizer cannot encode this prompt of {what}: {type(error).__name__}: {str(error) or 'no reason given':.300}"
            "; correct the prompt, or pass token ids"
        ) from error


class Prompts:
    """Hands out prompts in an order that depends on the seed alone, and can go on from a cursor.

    A sequence is read by position; with `shuffle_seed` each epoch has an order of its own. An iterable is read from its
    beginning, which must be repeatable for more than one epoch and to go on from a checkpoint: skipping is reading.
    """

    def __init__(
        self,
        source: "Iterable[Any] | Rows",
        tokenizer: Tokenizer | None = None,
        *,
        num_epochs: int | None = 1,
        shuffle_seed: int | None = None,
    ) -> None:
        if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, (Iterable, Rows)):
            raise InvalidRequestError(f"prompts must be a list, a dataset or an iterable, got {type(source).__name__}")
        self.length = len(source) if isinstance(source, Rows) else None
        """Rows of an epoch; None while that is not known."""
        if self.length == 0:
            raise InvalidRequestError("prompts must hold at least one prompt, got none")
        if num_epochs is not None and (
            isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 1
        ):
            raise InvalidRequestError(
                f"num_epochs must be an integer of at least 1, or None for no end, got {num_epochs!r}"
            )
        if num_epochs is not None and num_epochs > 1 and isinstance(source, Iterator):
            raise InvalidRequestError(
                f"num_epochs={num_epochs} reads the prompts again, and a {type(source).__name__} can be read once; pass a "
                "list, a dataset or an object whose __iter__ begins anew"
            )
        if shuffle_seed is not None and self.length is None:
            raise InvalidRequestError("an iterable cannot be shuffled; pass a list or a dataset, or shuffle=False")
        self.cursor = 0
        """The number of the next prompt: how many have been handed out."""
        self._source = source
        self._tokenizer = tokenizer
        self._num_epochs = num_epochs
        self._shuffle_seed = shuffle_seed
        self._order: tuple[int, Sequence[int]] | None = None  # (epoch, its order)
        self._rows: Iterator[Any] | None = None
        self._num_read = 0  # of the iterable, in this epoch
        self._epoch = 0  # of the iterable
        self._has_ended = False  # the iterable, in its last epoch
        self._next: list[Any] = []  # a row read ahead, to know whether there is one
        self._ids: dict[int, list[int]] = {}  # of a sequence's rows: the template is applied once, not once an epoch

    def next(self) -> Prompt | None:
        """The next prompt, or None if there are no more. A row that a sequence refuses with InvalidRequestError is a prompt
        with that error; what else the source raises is let through."""
        if self.is_exhausted:
            return None
        number = self.cursor
        prompt = self._prompt(number, *self._place(number))
        self.cursor += 1
        return prompt

    @property
    def is_exhausted(self) -> bool:
        """Whether there are no more. May read one row ahead."""
        if self.length is not None:
            return self._num_epochs is not None and self.cursor >= self.length * self._num_epochs
        return not self._fill()

    @property
    def is_known_exhausted(self) -> bool:
        """What is known of that without reading: a source that blocks its reader blocks nobody else."""
        return self.is_exhausted if self.length is not None else self._has_ended

    def rewind(self, cursor: int, numbers: Iterable[int]) -> dict[int, Prompt]:
        """Goes on at `cursor`, and reads again the prompts of these numbers, all below it. For an object that has handed
        out none yet, or reads a sequence; the source must be the one it was."""
        wanted = sorted(set(numbers))
        found: dict[int, Prompt] = {}
        if self.length is not None:
            for number in wanted:
                found[number] = self._prompt(number, *self._place(number))
            self.cursor = cursor
            return found
        if self.cursor:
            raise InvalidRequestError("prompts from an iterable have been read already; restore into a new controller")
        for number in range(cursor):
            prompt = self.next()
            if prompt is None:
                raise InvalidRequestError(
                    f"the checkpoint is {cursor} prompts into its source, this one ends after {number}; pass the same"
                )
            if number in wanted:
                found[number] = prompt
        return found

    def _place(self, number: int) -> tuple[int, Callable[[], Any]]:
        """The position of the row, and how to read it."""
        if self.length is not None:
            epoch, position = divmod(number, self.length)
            position = self._order_of(epoch)[position]
            return position, partial(cast(Rows, self._source).__getitem__, position)
        self._fill()
        return self._num_read - 1, self._next.pop

    def _order_of(self, epoch: int) -> Sequence[int]:
        assert self.length is not None
        if self._shuffle_seed is None:
            return range(self.length)
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.length))
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _fill(self) -> bool:
        self._has_ended = not self._read_ahead()
        return not self._has_ended

    def _read_ahead(self) -> bool:
        while not self._next:
            if self._rows is None:
                if self._num_epochs is not None and self._epoch >= self._num_epochs:
                    return False
                self._rows = iter(cast(Iterable[Any], self._source))
            row = list(itertools.islice(self._rows, 1))
            if row:
                self._next = row
                self._num_read += 1
            elif self._num_read == 0:
                return False  # an iterator that was used up by the epoch before, or never had anything
            else:
                self._rows, self._num_read, self._epoch = None, 0, self._epoch + 1
        return True

    def _prompt(self, number: int, position: int, read: Callable[[], Any]) -> Prompt:
        prompt_id = f"p{position}"
        try:
            ids, metadata = self._encode(position, read())
        except InvalidRequestError as error:
            return Prompt(number=number, prompt_id=prompt_id, prompt_ids=[], error=f"prompt {position}: {error}")
        return Prompt(number=number, prompt_id=prompt_id, prompt_ids=ids, metadata=metadata)

    def _encode(self, position: int, row: Any) -> tuple[list[int], Mapping[str, Any]]:
        known = self._ids.get(position)
        if known is not None:
            return known, _columns(row) if isinstance(row, Mapping) else {}
        ids, metadata = encode_prompt(row, self._tokenizer)
        if self.length is not None and self._num_epochs != 1 and len(self._ids) < CACHED_PROMPTS:
            self._ids[position] = ids
        return ids, metadata


def _columns(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items() if name != "prompt"}


def _tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError(f"a prompt of {what} needs a tokenizer; pass tokenizer=..., or token ids")
    return tokenizer

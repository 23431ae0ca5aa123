"""Stop strings: where text, not a token, ends a rollout."""

from collections.abc import Callable, Sequence

UNREADABLE = "the tokenizer cannot decode the request's tokens, to look for its stop strings"
MARGIN = 8
"""Tokens looked at beyond those that a stop string can span: some decode to nothing by themselves."""


def find_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> str | None:
    """The first of `stop` in the text of the last tokens, or None.

    Asked after each token, it answers at the token that completes a stop string: a token with text is at least one byte
    of it (byte-level vocabularies split a character), so a string of n bytes lies within the last n of them, and only
    the last few tokens are decoded.
    """
    window = max(len(text.encode()) for text in stop) + MARGIN
    text = decode(list(token_ids[-window:]))
    found = [(text.index(candidate), candidate) for candidate in stop if candidate in text]
    return min(found)[1] if found else None

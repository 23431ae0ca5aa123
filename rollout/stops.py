"""Stop strings: where text, not a token, ends a rollout."""

from collections.abc import Callable, Sequence

MARGIN = 8
"""Tokens looked at beyond those that a stop string can span: some decode to nothing by themselves."""


def find_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> str | None:
    """The first of `stop` in the text of the last tokens, or None.

    Asked after each token, it answers at the token that completes a stop string: a token is at least one character, so
    a string of n characters is completed within the last n tokens, and only the last few are decoded.
    """
    window = max(len(text) for text in stop) + MARGIN
    text = decode(list(token_ids[-window:]))
    found = [(text.index(candidate), candidate) for candidate in stop if candidate in text]
    return min(found)[1] if found else None

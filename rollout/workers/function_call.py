"""A function's way to a worker's engine, and its result's way back."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, TypeVar

from rollout.errors import InvalidRequestError, RolloutError, WorkerUnreachableError
from rollout.workers.calls import PendingCalls
from rollout.workers.incarnation import Incarnation
from rollout.workers.remote import Answer, Failure

R = TypeVar("R")


def call_in_worker(
    calls: PendingCalls, now: Incarnation, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> "Future[R]":
    """See `Worker.call`. `calls`: those of the handle, whose incarnation of the moment is `now`."""
    now.check_living("call")
    now.watch()
    name, limit_s = getattr(fn, "__qualname__", repr(fn)), now.config.call_timeout_s
    future = calls.add(
        limit_s + now.config.grace_s,
        WorkerUnreachableError(
            f"worker {now.host.name} did not answer call({name}) within {limit_s:g} s; is it overloaded or stopped?"
        ),
    )

    def on_answer(get: Callable[[], Answer | Failure]) -> None:
        calls.answer(future, lambda: now.heard(get))

    try:
        now.host.ask_later("call", fn, args, kwargs, limit_s, on_answer=on_answer)
    except (TypeError, pickle.PicklingError) as error:
        refused = InvalidRequestError(
            f"call({name}) cannot be sent to worker {now.host.name}; pass a function of a module and plain data ({error})"
        )
        calls.answer(future, partial(_raise, refused))
        raise refused from error
    return future


def _raise(error: RolloutError) -> NoReturn:
    raise error

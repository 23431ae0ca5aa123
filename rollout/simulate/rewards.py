"""Reward functions on a virtual clock."""

import inspect
from collections.abc import Callable
from typing import Any

from rollout.batches.rewards import RewardError, as_error
from rollout.errors import InvalidRequestError
from rollout.simulate.clock import VirtualLoop


class SimulatedRewards:
    """Calls each function after `delay_s`; what it raises is a reward error, as in a real pool."""

    def __init__(self, loop: VirtualLoop, delay_s: float = 0.0) -> None:
        self._loop = loop
        self._delay_s = delay_s

    def submit(self, call: Callable[[], Any], done: Callable[[Any, RewardError | None], None]) -> None:
        if self._delay_s:
            self._loop.call_later(self._delay_s, lambda: _run(call, done))
        else:
            self._loop.call_soon(lambda: _run(call, done))

    def stop(self, timeout_s: float) -> None:
        """There is nothing to end."""


def _run(call: Callable[[], Any], done: Callable[[Any, RewardError | None], None]) -> None:
    try:
        value = call()
    except Exception as error:
        done(None, as_error(error))
        return
    if inspect.iscoroutine(value):
        value.close()
        raise InvalidRequestError("a virtual clock cannot run coroutines; pass a plain reward function")
    done(value, None)

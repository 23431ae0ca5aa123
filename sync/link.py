"""What a weight sync knows of one target."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from rollout import GenerationEngine, RolloutError
from sync.receiver import hello
from sync.ticket import Claim, TargetStatus

logger = logging.getLogger(__name__)


class Target(Protocol):
    """Whatever hosts an engine: the engine itself, or a worker in another process."""

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `fn(engine, *args)` on the engine's control thread, after what was called before."""


@runtime_checkable
class JoiningTarget(Target, Protocol):
    """A target that may come back as a new incarnation, without the weights."""

    def on_join(self, callback: Callable[["JoiningTarget"], None]) -> None:
        """Have `callback` called with each new incarnation, before it serves anything."""


@runtime_checkable
class FencingTarget(Target, Protocol):
    """A target that can be kept from serving until it holds a version."""

    def require_version(self, version: int) -> None:
        """It takes no request below this version from now on, also after it has come back."""


class Link:
    """One target, by name, and what it said last."""

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.target = target
        self.status: TargetStatus | None = None
        """None until it has answered for the first time."""

    def ask(self, claim: Claim | None) -> "Future[TargetStatus]":
        """What it holds, and whom it obeys from now on: this claim, if it may. An engine of this process answers at once,
        also while its control thread is busy."""
        if not isinstance(self.target, GenerationEngine):
            return self.call(hello, claim)
        answer: Future[TargetStatus] = Future()
        answer.set_result(hello(self.target, claim))
        return answer

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """`target.call`; a target that refuses gives a failed future."""
        try:
            return self.target.call(fn, *args)
        except RolloutError as refused:
            failed: Future[Any] = Future()
            failed.set_exception(refused)
            return failed

    def fence(self, version: int) -> None:
        """Keep a target that missed a version from serving an older one, where that is in its hands."""
        if isinstance(self.target, FencingTarget):
            try:
                self.target.require_version(version)
            except RolloutError as error:
                logger.info("%s cannot be told that it needs version %d: %s", self.name, version, error)

    def is_inside_update(self) -> bool:
        """Whether the calling thread is inside this target's own update, where waiting for it would never end."""
        return isinstance(self.target, GenerationEngine) and self.target.is_inside_update

"""What a weight sync knows of one target."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from rollout import GenerationEngine, RolloutError
from sync.errors import SyncError
from sync.futures import failed
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


@runtime_checkable
class WaitingTarget(Target, Protocol):
    """A target that serves nothing below a version, whether anybody has published that or not."""

    @property
    def serve_from_version(self) -> int: ...


@runtime_checkable
class UpdatingTarget(Target, Protocol):
    """A target that has a say in when it is updated."""

    def call_update(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """`call`, for a function that updates the engine: when that cuts nothing in two, after what was called before."""


@runtime_checkable
class TargetGroup(Protocol):
    """Targets that come and go, such as a controller's workers."""

    def targets(self) -> "Sequence[NamedTarget]":
        """Those of the moment."""


@runtime_checkable
class RememberingGroup(TargetGroup, Protocol):
    """A group that knows of versions from before its members came."""

    @property
    def highest_version(self) -> int | None:
        """The highest that was ever published in its run; None: none was."""


class NamedTarget(Target, Protocol):
    """A target with a name that stays, also when the object that stands for it is another one."""

    @property
    def worker_id(self) -> str: ...


class Links(list["Link"]):
    """The links of a weight sync; those of groups follow their members at each `refresh`."""

    def __init__(self, targets: "Sequence[Target | TargetGroup]") -> None:
        super().__init__()
        self._on_join: Callable[[Link], None] | None = None
        self._groups = [target for target in targets if isinstance(target, TargetGroup)]
        single = [target for target in targets if not isinstance(target, TargetGroup)]
        self._add([(_name_of(target, index), target) for index, target in enumerate(single)])
        self._of_groups: set[str] = set()
        self.refresh()

    def listen(self, on_join: "Callable[[Link], None]") -> None:
        """`Link.listen`, of these and of those to come."""
        self._on_join = on_join
        for link in self:
            link.listen(on_join)

    def refresh(self) -> None:
        """Who has joined a group is linked, who has left it is not any more."""
        members = {target.worker_id: target for group in self._groups for target in group.targets()}
        for left in [link for link in self if link.name in self._of_groups - members.keys()]:
            left.ignore()
            self.remove(left)
        known, self._of_groups = self._of_groups, set(members)
        self._add([(name, target) for name, target in members.items() if name not in known])

    @property
    def highest_version(self) -> int | None:
        """The highest that a group remembers; None: none does."""
        remembering = [group for group in self._groups if isinstance(group, RememberingGroup)]
        known = [version for group in remembering if (version := group.highest_version) is not None]
        return max(known, default=None)

    def _add(self, named: "Sequence[tuple[str, Target]]") -> None:
        for name, target in named:
            if any(link.name == name for link in self):  # a report could not tell them apart
                raise SyncError(f"two targets are called {name}; give each worker a worker_id of its own")
            link = Link(name, target)
            self.append(link)
            if self._on_join is not None:
                link.listen(self._on_join)


class Link:
    """One target, by name, and what it said last."""

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.target = target
        self.status: TargetStatus | None = None
        """None until it has answered for the first time."""
        self._on_join: Callable[[Link], None] | None = None

    def listen(self, on_join: "Callable[[Link], None]") -> None:
        """Have it called whenever the target has come back as a new incarnation, until `ignore`."""
        self._on_join = on_join
        if isinstance(self.target, JoiningTarget):
            self.target.on_join(self._joined)

    def ignore(self) -> None:
        """What the target, which never lets go of its listeners, keeps from now on is this object alone."""
        self._on_join = None

    def _joined(self, _: object) -> None:
        if (on_join := self._on_join) is not None:
            on_join(self)

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
            return failed(refused)

    def call_update(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """The same for a function that updates the engine, when the target sees fit."""
        if not isinstance(self.target, UpdatingTarget):
            return self.call(fn, *args)
        try:
            return self.target.call_update(fn, *args)
        except RolloutError as refused:
            return failed(refused)

    def fence(self, version: int) -> None:
        """Keep a target that missed a version from serving an older one, where that is in its hands."""
        if isinstance(self.target, FencingTarget):
            try:
                self.target.require_version(version)
            except RolloutError as error:
                logger.info("%s cannot be told that it needs version %d: %s", self.name, version, error)

    @property
    def serves_from(self) -> int:
        """It serves nothing below this version."""
        return self.target.serve_from_version if isinstance(self.target, WaitingTarget) else 0

    def is_inside_update(self) -> bool:
        """Whether the calling thread is inside this target's own update, where waiting for it would never end."""
        return isinstance(self.target, GenerationEngine) and self.target.is_inside_update

    def is_on_its_thread(self) -> bool:
        """Whether the calling thread is the one on which this target would commit."""
        return isinstance(self.target, GenerationEngine) and self.target.is_control_thread


def _name_of(target: Target, index: int) -> str:
    return str(getattr(target, "worker_id", f"engine[{index}]"))

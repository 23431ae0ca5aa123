"""The seam between `WeightSync` and the ways in which bytes travel."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from sync.layout import Layout
from sync.place import Deadline
from sync.receiver import CommitMode
from sync.ticket import Package, TargetStatus


class Link(Protocol):
    """One target of a publish, as a transport sees it."""

    @property
    def name(self) -> str: ...

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `fn(engine, *args)` where the engine lives, after what was called before. Never raises: a target that
        refuses gives a failed future."""


class Transport(Protocol):
    """Brings one version at a time to the engines that it can reach.

    `WeightSync` asks for memory (`run`), fills it, and has it sent to all targets or some (`send`), as often as it takes:
    a target that comes late gets the same bytes later. Nothing is ever committed here.
    """

    @property
    def name(self) -> str:
        """As the report has it."""

    def commit_mode(self, status: TargetStatus) -> CommitMode:
        """How this target takes what was sent. Raises SyncError for one that this transport cannot serve."""

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        """Memory for the next version, [layout.num_bytes] uint8, gaps between slots zero. May be what `run` gave before, if no
        receiver can read that any more and it is not `spared`, whose version may have to be sent yet."""

    def send(
        self, package: Package, run: Tensor, links: Sequence[Link], deadline: Deadline
    ) -> Mapping[str, "Future[Any]"]:
        """Bring a sealed version to these targets' receivers, and say for each of them, by name, when it is staged or how
        that failed. Does not wait longer than `deadline`; need not wait at all. A target that fails holds up the others
        for a bounded time only."""

    def close(self) -> None:
        """Give back memory, files and groups. What engines have mapped stays theirs."""

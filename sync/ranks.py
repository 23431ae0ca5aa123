"""A trainer of several ranks publishes as one: every rank calls `publish`, all return or raise alike.

The first rank holds the targets. The others take part in gathering, and wait for its word. What they say to each other
goes through groups of their own, over gloo, so that nothing of it can get between the trainer's collectives.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sync.errors import ManifestError, SyncError, SyncTimeoutError
from sync.place import ANSWER_GRACE_S, Deadline
from sync.report import SyncReport

MESSAGE_BYTES = 65_536
TOLD_CHARACTERS = 4_000
WORD_GRACE_S = 2 * ANSWER_GRACE_S
"""How long after the limit the first rank's word may come: it waits as long as its targets may take."""
GROUP_TIMEOUT = timedelta(hours=2)
"""Beyond every publish's own limit, which is the one that ends a wait."""


class Ranks(Protocol):
    """The ranks that publish together."""

    leads: bool
    """Whether this rank holds the targets."""

    is_alone: bool

    @contextmanager
    def together(self, phase: str, deadline: Deadline) -> Iterator[None]:
        """A block that every rank runs its part of. When it has been left on all of them, it is left here; if it failed
        on any, it raises on all: the failure itself where it happened, elsewhere a SyncError that names the rank."""

    def share(self, report: Callable[[], SyncReport], deadline: Deadline) -> SyncReport:
        """The first rank makes the report, or fails to; all return it, or raise alike."""


class OneRank:
    """A trainer in one process."""

    leads = True
    is_alone = True

    @contextmanager
    def together(self, phase: str, deadline: Deadline) -> Iterator[None]:
        yield

    def share(self, report: Callable[[], SyncReport], deadline: Deadline) -> SyncReport:
        return report()


class TrainerRanks:
    """The ranks of torch.distributed's default group. Made on all of them, as every group is."""

    is_alone = False

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self.leads = self._rank == 0
        # Two: a report may be on its way, from the committing thread, while the next publish stages.
        self._steps = _Exchange(self._rank, self._size)
        self._reports = _Exchange(self._rank, self._size)

    @contextmanager
    def together(self, phase: str, deadline: Deadline) -> Iterator[None]:
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        told = _failure_to_tell(failure)
        everyone = self._steps.gather_and_tell(told, phase, deadline)
        if failure is not None:
            raise failure
        _raise_if_failed(everyone)

    def share(self, report: Callable[[], SyncReport], deadline: Deadline) -> SyncReport:
        if not self.leads:
            told = self._reports.hear("the report", deadline)
            _raise_if_failed(told)
            fields = told["report"]
            return SyncReport(**{**fields, "fenced": tuple(fields["fenced"]), "overtaken": tuple(fields["overtaken"])})
        try:
            made = report()
        except BaseException as error:
            self._reports.tell(_failure_to_tell(error))
            raise
        told = asdict(made)
        told["failures"] = {
            name: cause[: TOLD_CHARACTERS // max(1, len(made.failures))] for name, cause in made.failures.items()
        }
        self._reports.tell({"report": told})
        return made


def ranks_of_this_process() -> Ranks:
    """The ranks of torch.distributed's default group if there is one of several, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TrainerRanks()
    return OneRank()


class _Exchange:
    """Messages between the first rank and the others, in a group of their own."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self._broken: str | None = None
        self._sending: list[dist.Work] = []

    def gather_and_tell(self, mine: dict[str, Any], phase: str, deadline: Deadline) -> dict[str, Any]:
        """What the first rank makes of everybody's message."""
        if self._rank != 0:
            self.tell(mine)
            return self.hear(phase, deadline)
        everyone = dict(mine) if "failure" in mine else {}
        everyone.setdefault("rank", 0)
        until = time.monotonic() + deadline.remaining_s() + WORD_GRACE_S
        for rank in range(1, self._size):
            try:
                theirs = self._receive(rank, max(0.01, until - time.monotonic()))
            except RuntimeError as error:
                self._broken = f"rank {rank} did not come to {phase} in time ({_first_line(error)})"
                everyone = {"failure": self._broken, "kind": "timeout", "rank": rank}
                break
            if "failure" in theirs and "failure" not in everyone:
                everyone = {**theirs, "rank": rank}
        self.tell(everyone)
        if everyone.get("kind") == "timeout" and self._broken is not None:
            raise SyncTimeoutError(_lost_step(self._broken))
        return everyone

    def tell(self, message: dict[str, Any]) -> None:
        """From the first rank to all others, from another one to the first."""
        content = _encode(message)
        self._sending = [work for work in self._sending if not work.is_completed()]
        for rank in range(1, self._size) if self._rank == 0 else [0]:
            with suppress(RuntimeError):  # one that has gone does not hear, the others shall
                work = dist.isend(content, rank, self._group)
                assert work is not None
                self._sending.append(work)  # a send is taken back when its handle goes
                if self._rank == 0:
                    # They listen already; this process may end right after its last word.
                    work.wait(timedelta(seconds=WORD_GRACE_S))

    def hear(self, phase: str, deadline: Deadline) -> dict[str, Any]:
        """The first rank's word. Raises SyncTimeoutError."""
        if self._broken is not None:
            raise SyncError(_lost_step(self._broken))
        try:
            return self._receive(0, deadline.remaining_s() + 2 * WORD_GRACE_S)
        except RuntimeError as error:
            self._broken = f"rank 0 did not say in time how {phase} went ({_first_line(error)})"
            raise SyncTimeoutError(_lost_step(self._broken)) from error

    def _receive(self, rank: int, timeout_s: float) -> dict[str, Any]:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        content = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        work = dist.irecv(content, rank, self._group)
        assert work is not None
        work.wait(timedelta(seconds=timeout_s))
        return _decode(content)


def _encode(message: dict[str, Any]) -> Tensor:
    content = json.dumps(message).encode()
    assert len(content) <= MESSAGE_BYTES
    return torch.frombuffer(bytearray(content.ljust(MESSAGE_BYTES)), dtype=torch.uint8)


def _decode(content: Tensor) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(content.tolist()))
    return message


def _failure_to_tell(failure: BaseException | None) -> dict[str, Any]:
    if failure is None:
        return {}
    kind = "manifest" if isinstance(failure, ManifestError) else "timeout" if isinstance(failure, TimeoutError) else ""
    return {"failure": f"{type(failure).__name__}: {failure}"[:TOLD_CHARACTERS], "kind": kind, "rank": dist.get_rank()}


def _raise_if_failed(told: dict[str, Any]) -> None:
    if "failure" in told:
        kind = {"manifest": ManifestError, "timeout": SyncTimeoutError}.get(told["kind"], SyncError)
        raise kind(f"rank {told['rank']} failed, and all ranks publish alike: {told['failure']}")


def _lost_step(why: str) -> str:
    return (
        f"{why}; every rank must call publish() for every version. The ranks have lost step: make a new WeightSync on all "
        "of them to go on"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__

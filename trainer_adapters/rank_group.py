"""A trainer's ranks, of which the first makes something and deals it out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from trainer_adapters.errors import AdapterError

GROUP_TIMEOUT_S = 86_400.0
"""Beyond every limit on a batch, which is the one that ends a wait: the first rank tells the others."""

T = TypeVar("T")


class RankGroup:
    """The ranks of torch.distributed's default group, or this process alone. Made on all of them, as every group is."""

    def __init__(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """`timeout_s`: how long a rank waits for the first one; longer than what that does may take."""
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._timeout_s = timeout_s
        limit = timedelta(seconds=timeout_s)
        # One of its own, over gloo: a wait for rollouts must neither hold a GPU nor get between the trainer's collectives.
        self._group = None if self.size == 1 else dist.new_group(backend="gloo", timeout=limit)

    def deal(self, make: Callable[[], Sequence[T]]) -> T:
        """Calls `make` on the first rank and returns the part of its result that is this rank's. Raises its error there,
        and on the others an AdapterError that tells of it, or that the first rank has gone or said nothing in time."""
        if self.size == 1:
            return make()[0]
        parts: list[T | Failed] | None = None
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                parts = list(make())
            except BaseException as error:  # Ctrl-C too
                failure = error  # the others wait for their parts, and would do so for ever
                parts = [Failed(f"{type(error).__name__}: {error}")] * self.size
        mine: list[Any] = [None]
        try:
            dist.scatter_object_list(mine, parts, src=0, group=self._group)
        except RuntimeError as error:
            if failure is None:
                lost = (
                    "another rank did not take its part" if self.rank == 0 else "the first rank did not give its part"
                )
                raise AdapterError(f"{lost} within {self._timeout_s:g} s, or has gone: {error}") from error
        if failure is not None:
            raise failure  # outside the `except` above: what came of it is not its cause
        if isinstance(mine[0], Failed):
            raise AdapterError(f"the first rank failed, and with it all of them: {mine[0].reason}")
        part: T = mine[0]
        return part


@dataclass(frozen=True)
class Failed:
    """What the other ranks hear of an error on the first one."""

    reason: str

"""One element of each weight, compared as often as the engine steps: it tells of writes that move no version counter."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


class Comparison(Protocol):
    """One that is under way."""

    def is_done(self) -> bool:
        """Whether it has come to a result. Never waits."""

    def result(self) -> bool:
        """Whether something differs; once it is done."""


Start = Callable[[Callable[[], torch.Tensor]], Comparison]
"""Starts a comparison, given as a function that makes a bool tensor of one element."""


class Probe:
    """Remembers the middle element of each of `weights`."""

    def __init__(self, weights: Iterable[torch.Tensor], start: Start) -> None:
        probed = [t for t in weights if t.numel() > 0 and t.is_contiguous()]
        self._weights = sorted(probed, key=lambda t: str(t.dtype))  # here and not at each step, see `_bits`
        self._start = start
        self.record()

    def record(self) -> None:
        """Takes the present elements as the right ones."""
        self._elements = [t.detach().view(-1)[t.numel() // 2] for t in self._weights]
        self._recorded = _bits(self._elements)
        if self._recorded.is_cuda:
            # comparisons run on a stream of their own, which nothing else orders after this one
            torch.cuda.synchronize(self._recorded.device)
        self._comparison: Comparison | None = None  # one that is under way compares with what was right before

    def differs(self) -> bool:
        """Whether an element is another than was recorded, as far as comparisons have come: where they are `at_once`, as of
        now; `OnSideStream`, as of an earlier call, mostly the last."""
        different = self._read()
        if self._comparison is None and not different:
            self._comparison = self._start(self._compare)
            different = self._read()
        return different

    def _compare(self) -> torch.Tensor:
        return (_bits(self._elements) != self._recorded).any()

    def _read(self) -> bool:
        if self._comparison is None or not self._comparison.is_done():
            return False
        different = self._comparison.result()
        self._comparison = None
        return different


def at_once(compare: Callable[[], torch.Tensor]) -> Comparison:
    """Compares before it returns, for weights on a CPU."""
    return _Done(bool(compare()))


@dataclass(frozen=True)
class _Done:
    different: bool

    def is_done(self) -> bool:
        return True

    def result(self) -> bool:
        return self.different


class OnSideStream:
    """Compares on a CUDA stream of its own, so that no step waits for it: a result that is read where it is made would wait
    for the batch that runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compare: Callable[[], torch.Tensor]) -> Comparison:
        with torch.cuda.stream(self._stream):
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            answer.copy_(compare(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Copied(answer, event)


class _Copied:
    def __init__(self, answer: torch.Tensor, event: torch.cuda.Event) -> None:
        self._answer, self._event = answer, event

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> bool:
        return bool(self._answer)


def start_on(device: torch.device) -> Start:
    """How to compare weights on `device`."""
    return OnSideStream(device) if device.type == "cuda" else at_once


def _bits(elements: list[torch.Tensor]) -> torch.Tensor:
    """As integers [num_elements]: NaN, which an optimizer may have written, is not equal to itself. `elements` of one type
    stand together: few kernels, whatever their number."""
    stacks = [torch.stack(list(alike)) for _, alike in groupby(elements, key=lambda element: element.dtype)]
    integers = [stack.view(INTEGERS[stack.element_size()]).to(torch.int64) for stack in stacks]
    return torch.cat(integers) if integers else torch.empty(0, dtype=torch.int64)

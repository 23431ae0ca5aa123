"""The memory in which versions are staged for engines of the trainer's own process."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from fakes_sync import BUCKET_BYTES, FakeEngine, marked
from transport_helpers import sealed

from sync.layout import Layout
from sync.link import Link
from sync.manifest import Manifest
from sync.place import Deadline
from sync.transports import InProcess


class Host:
    """An engine that does at once what it is called for."""

    worker_id = "host"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.engine = FakeEngine(marked(0.0, dtype))

    @property
    def layout(self) -> Layout:
        return Layout(Manifest.of(self.engine.model), BUCKET_BYTES)

    def call(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(fn(self.engine, *args))
        return answer


def test_each_kind_of_engine_has_its_memory_again_for_the_next_version() -> None:
    transport = InProcess()
    layouts = [Host(dtype).layout for dtype in (torch.float32, torch.bfloat16)]
    runs = [transport.run(layout) for layout in layouts]
    assert [transport.run(layout) is run for layout, run in zip(layouts, runs, strict=True)] == [True, True]


def sent(host: Host) -> tuple[InProcess, torch.Tensor]:
    """A version that the host's engine has staged and not committed."""
    transport = InProcess()
    package, run = sealed(transport, host.layout, marked(1.0), 1)
    transport.send(package, run, [Link("host", host)], Deadline.after(30))
    return transport, run


def test_memory_that_an_engine_may_still_read_is_not_written_again() -> None:
    host = Host()
    transport, run = sent(host)
    assert transport.run(host.layout) is not run


def test_an_engine_that_has_gone_reads_nothing() -> None:
    host = Host()
    layout = host.layout
    transport, run = sent(host)
    del host
    assert transport.run(layout) is run

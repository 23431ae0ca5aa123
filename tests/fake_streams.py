"""A device with streams, for asynchronous batching on a CPU: it runs its work at once, or as late as it may.

Both are schedules that a GPU may choose. What upstream queues on its streams (a batch's forward, the copy of its tokens to
the host) waits in one queue; an event or a stream that somebody waits for runs it up to that point.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api, input_outputs

from rollout import EngineConfig, GenerationEngine


class FakeDevice:
    """`late`: nothing runs before somebody waits for it."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.log: list[str] = []  # "launch", "run" and "book" with the number of the batch
        self.submitted = self.done = 0
        self._work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.submitted += 1
        self._work.append(work)
        if not self.late:
            self.run(self.submitted)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self._work.popleft()()


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.position = device, 0

    def synchronize(self) -> None:
        self.device.run(self.position)


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record_event(self, event: FakeEvent) -> None:
        event.position = self.device.submitted

    def wait_event(self, event: FakeEvent) -> None:
        """All streams share one queue."""

    def synchronize(self) -> None:
        self.device.run(self.device.submitted)


class FakePair(input_outputs.HostDeviceIOPair):
    def __init__(self, fake: FakeDevice, **kwargs: Any) -> None:
        self.fake = fake
        self.host_io = input_outputs.ContinuousBatchingIOs(**kwargs)
        self.device_io = input_outputs.ContinuousBatchingIOs(**kwargs)
        self.h2d_over, self.compute_over, self.d2h_over = (FakeEvent(fake) for _ in range(3))

    def transfer_outputs_d2h(self, stream: FakeStream) -> None:
        self.fake.submit(lambda: super(FakePair, self).transfer_outputs_d2h(None))


class FakeAsyncIOs(input_outputs.ContinuousBatchingAsyncIOs):
    fake: FakeDevice

    def __init__(self, **kwargs: Any) -> None:
        self.current_pair = 0
        self.io_pairs = [FakePair(self.fake, **kwargs) for _ in range(2)]
        self.h2d_stream, self.d2h_stream, self.compute_stream = (FakeStream(self.fake) for _ in range(3))
        self.max_batch_tokens = kwargs["cache"].max_batch_tokens


def async_engine(
    model: PreTrainedModel, patch: pytest.MonkeyPatch, config: EngineConfig | None = None, *, late: bool, **kwargs: Any
) -> tuple[GenerationEngine, FakeDevice]:
    """An engine with asynchronous batching on a fake device, and the device."""
    fake = FakeDevice(late=late)
    patch.setattr(continuous_api, "ContinuousBatchingAsyncIOs", type("FakeIOs", (FakeAsyncIOs,), {"fake": fake}))
    settings = ContinuousBatchingConfig(use_async_batching=True)
    given = {name: getattr(config, name) for name in vars(config)} if config is not None else {}
    engine = GenerationEngine(model, EngineConfig(**{**given, "continuous_batching": settings}), **kwargs)
    processor = engine.manager.batch_processor
    cache, ios, compute = processor.cache, processor.inputs_and_outputs, processor.model_runner.compute_batch
    copy_blocks, book = cache.perform_cache_copy, type(processor)._book
    engine.manager.logit_processor.static = True  # as for graphs: its shortcuts are those of the batch prepared last
    numbers = iter(range(10**9))
    launched: dict[int, int] = {}

    def launch(model: torch.nn.Module, batch: Any) -> None:
        pair, number = ios.current_pair, next(numbers)
        launched[pair] = number
        fake.log.append(f"launch {number}")

        def run() -> None:
            fake.log.append(f"run {number}")
            now, ios.current_pair = ios.current_pair, pair
            cache.plans.clear()
            with torch.no_grad():
                compute(model, batch)
            ios.current_pair = now

        fake.submit(run)

    def copy_in_order(blocks: Any) -> None:
        ios.compute_stream.synchronize()
        copy_blocks(blocks)

    class Logged(type(processor)):
        def _book(self) -> None:
            fake.log.append(f"book {launched[ios.current_pair]}")
            book(self)

    processor.model_runner.compute_batch, cache.perform_cache_copy = launch, copy_in_order
    processor.__class__ = Logged
    return engine, fake

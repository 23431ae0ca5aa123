"""When a training loop publishes."""

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW

from sync import SyncError, SyncReport
from trainer_adapters import AdapterError, PolicyView, SyncOnStep


class Publisher:
    """Stands in for a WeightSync: keeps the weight that each publish would have carried."""

    def __init__(self) -> None:
        self.published: list[float] = []

    def publish(self, source: Any, *, timeout_s: float) -> SyncReport:
        self.published.append(dict(source.tensors())["weight"].item())
        return SyncReport(
            version=len(self.published),
            num_bytes=4,
            num_tensors=1,
            stage_s=0.0,
            send_s=0.0,
            pause_wait_s=0.0,
            commit_s=0.0,
            straddlers=0,
            fenced=(),
            failures={},
            overtaken=(),
            transport="in_process",
        )


def counter() -> tuple[nn.Linear, SGD]:
    """A weight that each step makes larger by one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, SGD(model.parameters(), lr=1.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (-model(torch.ones(1, 1)).sum()).backward()
    optimizer.step()


@pytest.mark.parametrize(("every", "published"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (8, [])])
def test_publishes_at_the_start_and_after_every_nth_step(every: int, published: list[float]) -> None:
    (model, optimizer), publisher = counter(), Publisher()
    with SyncOnStep(publisher, PolicyView(model), optimizer, every_n_steps=every):
        for _ in range(7):
            step(model, optimizer)
    assert publisher.published == [0, *published]


def test_publishes_nothing_before_it_is_entered_or_after_it_is_left() -> None:
    (model, optimizer), publisher = counter(), Publisher()
    sync_on_step = SyncOnStep(publisher, PolicyView(model), optimizer)
    step(model, optimizer)
    assert sync_on_step.last_report is None
    with sync_on_step:
        step(model, optimizer)
    step(model, optimizer)
    assert publisher.published == [1, 2]
    assert sync_on_step.last_report is not None
    assert sync_on_step.last_report.version == 2


def test_hook_is_removed_when_the_loop_fails() -> None:
    (model, optimizer), publisher = counter(), Publisher()
    with pytest.raises(KeyError), SyncOnStep(publisher, PolicyView(model), optimizer):
        raise KeyError
    step(model, optimizer)
    assert publisher.published == [0]


def test_accumulated_micro_steps_of_accelerate_publish_once() -> None:
    publisher = Publisher()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(*counter())
    with SyncOnStep(publisher, PolicyView(model), optimizer):
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(-model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert publisher.published == pytest.approx([0, 1, 2])


def fp16_step(factor: float, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(-factor * model(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("is_fused", [False, True])
def test_step_that_fp16_left_out_publishes_nothing_and_is_not_counted(is_fused: bool) -> None:
    (model, _), publisher = counter(), Publisher()
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.0, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with SyncOnStep(publisher, PolicyView(model), optimizer, every_n_steps=2):
        for factor in (1.0, math.inf, 1.0, math.inf, 1.0, 1.0):
            fp16_step(factor, model, optimizer, scaler)
    assert publisher.published == pytest.approx([0, 2, 4])


def test_failed_publish_raises_out_of_the_step() -> None:
    class Broken(Publisher):
        def publish(self, source: Any, *, timeout_s: float) -> SyncReport:
            if self.published:
                raise SyncError("no engine took version 2")
            return super().publish(source, timeout_s=timeout_s)

    model, optimizer = counter()
    with (
        SyncOnStep(Broken(), PolicyView(model), optimizer),
        pytest.raises(SyncError, match="no engine took version 2"),
    ):
        step(model, optimizer)


def test_entering_twice_is_refused() -> None:
    model, optimizer = counter()
    with (
        SyncOnStep(Publisher(), PolicyView(model), optimizer) as sync_on_step,
        pytest.raises(AdapterError, match="entered already"),
    ):
        sync_on_step.__enter__()


@pytest.mark.parametrize("every", [0, True, 1.5, math.nan, "2"])
def test_every_n_steps_must_be_a_whole_number_of_at_least_one(every: Any) -> None:
    model, optimizer = counter()
    with pytest.raises(AdapterError, match="every_n_steps must be at least 1, a whole number, got"):
        SyncOnStep(Publisher(), PolicyView(model), optimizer, every_n_steps=every)

"""A hundred publishes in a row: the same bytes at both ends, and no growth of any kind.

trl#6688: merging and unmerging drifts the trained model. slime#1731, verl#6958: shared segments leak at each sync.
"""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_llama
from footprint import Footprint, files_below, footprint, footprint_of
from process_target import ProcessTarget
from torch import nn

from rollout import GenerationEngine
from sync import SyncConfig, WeightSync
from sync.place import MEMORY_FOLDER
from sync.transports import SharedMemory

NUM_PUBLISHES = 100
WARM_UP = 10
CONFIG = SyncConfig(bucket_bytes=64 * 1024)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "tie_word_embeddings": True}
"""4.6 MB in fp32, tied: what leaks of it at each publish shows beside an allocator's noise."""
GROWTH_KIB = 24 * 1024
"""What a process may grow by over ninety publishes: a leak of one staging each would be seventeen times as much."""


def wide() -> Any:
    return tiny_llama(**WIDE)


def wide_bfloat16() -> Any:
    return tiny_llama(**WIDE).bfloat16()


def weights_of(engine: GenerationEngine) -> dict[str, bytes]:
    """Of the engine, as bytes: `target.call(weights_of)`."""
    return _bytes_of(engine.model)


def _bytes_of(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    return {
        name: tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


class Trainer:
    """A model under training, whose tensors are exactly what its own steps made of them."""

    def __init__(self) -> None:
        self.model = wide().train()
        self._reference = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self._generator = torch.Generator().manual_seed(7)

    def step(self) -> None:
        noise = torch.randn((), generator=self._generator)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.add_(noise, alpha=0.01)
                self._reference[name].add_(noise, alpha=0.01)

    def check(self) -> None:
        """Publishing has altered nothing."""
        assert self.model.training
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, self._reference[name]), name
            assert parameter.requires_grad
            assert parameter.grad is None
        assert self.model.lm_head.weight is self.model.model.embed_tokens.weight


def check_growth(before: Footprint, after: Footprint) -> None:
    assert after.fds <= before.fds
    assert after.threads <= before.threads
    assert len(after.maps) == len(before.maps)
    assert after.rss_kib - before.rss_kib < GROWTH_KIB


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private place on the memory file system."""
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.exists() else None) as path:
        yield Path(path)


def test_a_hundred_publishes_in_process_change_nothing_but_the_weights(folder: Path) -> None:
    trainer = Trainer()
    engines = [GenerationEngine(wide(), copy_weights=True), GenerationEngine(wide_bfloat16(), copy_weights=True)]
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        weight_sync = stack.enter_context(WeightSync(engines, config=CONFIG))
        for number in range(1, NUM_PUBLISHES + 1):
            trainer.step()
            assert weight_sync.publish(trainer.model).version == number
            assert _bytes_of(engines[0].model) == _bytes_of(trainer.model)
            assert _bytes_of(engines[1].model) == _bytes_of(trainer.model, torch.bfloat16)
            if number == WARM_UP:
                gc.collect()
                before = footprint(folder)
        gc.collect()
        check_growth(before, footprint(folder))
        trainer.check()


@pytest.mark.parametrize("commit", ["copy", "remap"])
def test_a_hundred_publishes_through_shared_memory_leave_nothing_behind(commit: Any, folder: Path) -> None:
    trainer = Trainer()
    with (
        ProcessTarget("full", wide) as full,
        ProcessTarget("half", wide_bfloat16) as half,
        WeightSync([full, half], SharedMemory(commit, folder=folder), CONFIG) as weight_sync,
    ):
        for number in range(1, NUM_PUBLISHES + 1):
            trainer.step()
            report = weight_sync.publish(trainer.model)
            assert (report.version, report.fenced) == (number, ())
            if number % 10 == 0:
                assert full.call(weights_of).result(30) == _bytes_of(trainer.model)
                assert half.call(weights_of).result(30) == _bytes_of(trainer.model, torch.bfloat16)
            if number == WARM_UP:
                gc.collect()
                before = [footprint(folder), *_footprints(folder, full, half)]
                files = len(files_below(folder))
        gc.collect()
        after = [footprint(folder), *_footprints(folder, full, half)]
        for old, new in zip(before, after, strict=True):
            check_growth(old, new)
        assert len(files_below(folder)) == files
        trainer.check()
    gc.collect()
    assert footprint(folder).maps == ()
    assert files_below(folder) == []


def _footprints(folder: Path, *targets: ProcessTarget) -> list[Footprint]:
    return [target.call(footprint_of, folder).result(30) for target in targets]

"""What a module of tests leaves behind is noticed at its end: see `_nothing_is_left_behind` in conftest.py."""

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import tiny_llama, wait_until
from leftovers import held
from transformers import ContinuousBatchingConfig

from rollout import GenerationEngine
from sync import WeightSync
from sync.transports.run_folder import RunFolder

New = Callable[[], list[str]]


@pytest.fixture
def new() -> Iterator[New]:
    """Says what is held now and was not at the beginning; nothing at the end."""
    before = held().keys()

    def new() -> list[str]:
        return sorted(name for thing, name in held().items() if thing not in before)

    yield new
    wait_until(lambda: new() == [])


def test_an_engine_and_a_weight_sync_that_go_on_are_noticed(new: New) -> None:
    with GenerationEngine(tiny_llama(), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        assert {"thread rollsync-control", "thread rollsync-loop", "thread weight-sync_0"} <= set(new())


def test_a_loop_of_upstreams_own_manager_is_noticed(new: New) -> None:
    settings = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=64)
    manager = tiny_llama().init_continuous_batching(continuous_batching_config=settings)
    manager.start()
    try:
        (name,) = new()
        assert "_run_generation_loop" in name
    finally:
        manager.stop(block=True)


def test_processes_are_noticed_however_they_are_started(new: New) -> None:
    spawned = multiprocessing.get_context("forkserver").Process(target=signal.pause, name="spawned")
    spawned.start()
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        wait_until(lambda: any("signal.pause()" in name for name in new()))
        assert "process spawned" in new()
    finally:
        for process in (spawned, started):
            process.kill()
        spawned.join()
        started.wait()


def test_a_run_folder_is_noticed(new: New, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert new() == [f"run folder {folder.path}"]
    folder.close()

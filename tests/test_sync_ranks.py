"""A trainer of two gloo ranks publishes as one."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import tiny_llama
from process_target import PRELOADED
from torch import Tensor

from rollout import GenerationEngine
from sync import ManifestError, SyncError, SyncTimeoutError, WeightSync
from sync.layout import Layout
from sync.manifest import held_tensors
from sync.transports import InProcess

LIMIT_S = 120.0


def run_ranks(tmp_path: Path, body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns, or raises, on each of two ranks."""
    # Forked from a process that has no threads and has imported what takes seconds, on a loaded machine half a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, str(tmp_path / "store"), body, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = []
    try:
        for pipe in pipes:
            assert pipe.poll(LIMIT_S), "a rank hangs"
            answers.append(pipe.recv())
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return answers


def _rank(rank: int, store: str, body: Callable[[int], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    try:
        answer = body(rank)
    except Exception as error:
        answer = (type(error).__name__, str(error))
    pipe.send(answer)
    pipe.close()


class Rank:
    """One rank's model, and on the first rank the engine that it publishes to."""

    def __init__(self, rank: int, transport: InProcess | None = None) -> None:
        self.model = tiny_llama(seed=1)
        self.engine = GenerationEngine(tiny_llama(), copy_weights=True) if rank == 0 else None
        if self.engine is not None:
            self.engine.start()
        self.weight_sync = WeightSync([self.engine] if self.engine is not None else [], transport)

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self.weight_sync.close()
        if self.engine is not None:
            self.engine.stop()

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """As a sharded trainer's weights come: each tensor by a collective of all ranks."""
        for held in held_tensors(self.model):
            whole = held.tensor.detach().clone()
            dist.all_reduce(whole)
            yield held.names[0], whole / 2

    def holds_the_model(self) -> bool:
        assert self.engine is not None
        pairs = zip(held_tensors(self.engine.model), held_tensors(self.model), strict=True)
        return all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)


def _publish(rank: int) -> Any:
    with Rank(rank) as it:
        first = it.weight_sync.publish(it.gathered())
        second = it.weight_sync.publish(it.gathered(), wait=False).result(LIMIT_S)
        return first, second, it.engine is None or it.holds_the_model()


def test_all_ranks_return_the_report_of_the_one_that_holds_the_engines(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, _publish)
    assert first == second
    assert [report.version for report in first[:2]] == [1, 2]
    assert first[0].fenced == ()
    assert first[2]


def _cancel(rank: int) -> Any:
    with Rank(rank) as it:
        told = []
        for cancelling in range(2):
            held = threading.Event()
            it.weight_sync._committer.submit(held.wait, LIMIT_S)  # the thread that shares the report has not come to it
            future = it.weight_sync.publish(it.gathered(), wait=False, timeout_s=20)
            is_cancelled = rank == cancelling and future.cancel()
            held.set()
            told.append((is_cancelled, future.result(LIMIT_S).version))
        return told, it.weight_sync.publish(it.gathered(), timeout_s=20).version


def test_a_rank_that_cancels_its_future_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, _cancel)
    assert first == second == ([(False, 1), (False, 2)], 3)


def _publish_with_a_rank_that_fails(rank: int) -> Any:
    def failing(it: Rank) -> Iterator[tuple[str, Tensor]]:
        yield from it.gathered()
        if rank == 1:
            raise KeyError("the gather failed")

    with Rank(rank) as it:
        try:
            it.weight_sync.publish(failing(it))
        except Exception as error:
            failure = (type(error).__name__, str(error))
        version = it.engine.version if it.engine is not None else 0
        return failure, version, it.weight_sync.publish(it.gathered()).version


def test_failure_on_one_rank_raises_on_all_and_no_engine_changes(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, _publish_with_a_rank_that_fails)
    assert first[0] == ("SyncError", "rank 1 failed, and all ranks publish alike: KeyError: 'the gather failed'")
    assert second[0] == ("KeyError", "'the gather failed'")
    assert first[1:] == second[1:] == (0, 2), "the first rank keeps version 1 for targets that come late"


def _publish_what_the_engine_does_not_hold(rank: int) -> Any:
    with Rank(rank) as it:
        try:
            it.weight_sync.publish((name + ".ghost", tensor) for name, tensor in it.gathered())
        except ManifestError as error:
            return str(error)
        return "published"


def test_mismatch_is_a_manifest_error_on_every_rank_and_no_rank_is_left_in_a_gather(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, _publish_what_the_engine_does_not_hold)
    assert "unexpected: model.embed_tokens.weight.ghost" in first
    assert second.startswith("rank 0 failed")
    assert "unexpected: model.embed_tokens.weight.ghost" in second


class Crowded(InProcess):
    """Has no room for the first version."""

    def __init__(self) -> None:
        super().__init__()
        self._is_full = True

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        if self._is_full:
            self._is_full = False
            raise SyncError("the memory file system is full")
        return super().run(layout, spared)


def _publish_where_there_is_no_room(rank: int) -> Any:
    with Rank(rank, Crowded()) as it:
        try:
            it.weight_sync.publish(it.gathered(), timeout_s=10)
        except SyncError as error:
            failure = str(error)
        return failure, it.weight_sync.publish(it.gathered(), timeout_s=10).version


def test_no_room_for_the_staging_is_an_error_on_every_rank_and_no_rank_is_left_in_a_gather(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, _publish_where_there_is_no_room)
    assert first == ("the memory file system is full", 1)
    assert second == ("rank 0 failed, and all ranks publish alike: SyncError: the memory file system is full", 1)


def _publish_alone(rank: int) -> Any:
    with Rank(rank) as it:
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
            return None
        try:
            it.weight_sync.publish(it.model, timeout_s=0.5)
        except SyncTimeoutError as error:
            failure = str(error)
        again = None
        try:
            it.weight_sync.publish(it.model, timeout_s=0.5)
        except SyncError as error:
            again = str(error)
        assert it.engine is not None
        dist.send(torch.zeros(1), 1)
        return failure, again, it.engine.version


def test_rank_that_does_not_come_costs_a_bounded_error_that_names_it(tmp_path: Path) -> None:
    (failure, again, version), _ = run_ranks(tmp_path, _publish_alone)
    assert "rank 1 did not come to the opening in time" in failure
    assert "make a new WeightSync on all of them" in failure
    assert "lost step" in again
    assert version == 0


def test_one_process_is_alone_and_needs_no_group() -> None:
    assert not dist.is_initialized()
    with GenerationEngine(tiny_llama(), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        assert weight_sync.publish(tiny_llama(seed=1)).version == 1
    with pytest.raises(SyncError, match="at least one engine"):
        WeightSync([])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weight-sync")]

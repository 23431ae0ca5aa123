"""Weights through Ray's object store, to workers in processes of their own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transport_helpers
from fakes import wait_until
from transport_helpers import (
    At,
    SpyTarget,
    assert_same_weights,
    digests_of,
    digests_of_model,
    num_fds,
    num_threads,
    sealed,
    signal_in_broadcast,
    version_of,
    wide_llama,
)

from rollout import EngineConfig, GenerationEngine
from rollout.worker import Worker, WorkerConfig, WorkerState
from sync import SyncConfig, SyncError, SyncTimeoutError, WeightSync
from sync.layout import Layout
from sync.link import Link
from sync.manifest import Manifest
from sync.place import Deadline
from sync.receiver import commit, forget, hello, receive
from sync.run_record import next_claim
from sync.transports import Collective, ObjectStore
from sync.transports.object_store import StoredBucket

pytestmark = pytest.mark.ray

CONFIG = WorkerConfig(
    model=transport_helpers.wide_llama,
    engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
    num_cpus=0,
    num_threads=1,
    heartbeat_s=0.2,
    suspect_after_s=2.0,
)
SYNC = SyncConfig(bucket_bytes=200_000, open_timeout_s=2.0)
"""Seven buckets."""


@pytest.fixture(scope="module")
def pool(local_ray: str) -> Iterator[list[Worker]]:
    workers = [Worker.start(f"store-{number}", CONFIG) for number in range(2)]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture
def workers(pool: list[Worker]) -> list[Worker]:
    """Two that live."""
    for worker in pool:
        if worker.health().state == WorkerState.DEAD:
            worker.restart(serve_from_version=0)
    return pool


def objects_in_store() -> int:
    from ray._private.internal_api import memory_summary

    found = re.search(
        r"Plasma memory usage .*?, (\d+) objects",
        memory_summary(ray.get_runtime_context().gcs_address, stats_only=True),
    )
    assert found is not None
    return int(found[1])


def assert_store_empties() -> None:
    wait_until(lambda: objects_in_store() == 0, 20)


def own(model: Any) -> GenerationEngine:
    return GenerationEngine(model, copy_weights=True)


def pid(worker: Worker) -> int:
    return worker.health().pid


def kill(worker: Worker) -> Callable[[], None]:
    return lambda: os.kill(pid(worker), signal.SIGKILL)


def holds(worker: Worker, seed: int) -> bool:
    return worker.call(digests_of).result(30) == digests_of_model(wide_llama(seed))


def test_workers_and_an_engine_here_hold_what_was_published(workers: list[Worker]) -> None:
    with own(wide_llama().bfloat16()) as engine, WeightSync([*workers, engine], ObjectStore(), SYNC) as weight_sync:
        report = weight_sync.publish(wide_llama(1))
        assert (report.transport, report.fenced, report.overtaken) == ("object_store", (), ())
        assert all(holds(worker, 1) for worker in workers)
        assert_same_weights(engine.model, wide_llama(1).bfloat16())
        assert weight_sync.publish(wide_llama(1), version=report.version).version == report.version
        assert [worker.call(version_of).result(30) for worker in workers] == [report.version] * 2
    assert_store_empties()


def test_nothing_grows_over_a_hundred_publishes(workers: list[Worker]) -> None:
    trainer = wide_llama(2)

    def counts() -> list[int]:
        here = [num_fds(), num_threads()]
        return here + [worker.call(count).result(30) for worker in workers for count in (num_fds, num_threads)]

    with WeightSync(workers, ObjectStore(), SYNC) as weight_sync:
        for number in range(100):
            with torch.no_grad():
                trainer.lm_head.weight.fill_(number)
            assert weight_sync.publish(trainer).fenced == ()
            if number == 9:
                before = counts()
        assert all(after <= early + 2 for early, after in zip(before, counts(), strict=True)), (before, counts())
        assert workers[0].call(digests_of).result(30) == digests_of_model(trainer)
    assert_store_empties()


def test_two_buckets_are_in_the_store_and_no_third(local_ray: str) -> None:
    calls: list[tuple[tuple[Any, ...], Future[Any]]] = []

    class Lagging(Link):
        """Takes each bucket when the next one has come."""

        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            if fn is not receive:
                return super().call(fn, *args)
            assert all(future.done() for _, future in calls[:-1]), "a third bucket came"
            calls.append((args, Future()))
            take = calls[-2:] if args[1] == len(package.layout.buckets) - 1 else calls[-2:-1]
            for taken, future in take:
                super().call(fn, *taken).result(30)
                future.set_result(None)
            return calls[-1][1]

    with own(wide_llama()) as engine:
        transport = ObjectStore(bucket_timeout_s=20.0)
        package, run = sealed(transport, Layout(Manifest.of(engine.model), 200_000), wide_llama(1), 1)
        sent = transport.send(package, run, [Lagging("w0", engine)], Deadline.after(30))
        assert sent["w0"].result(0) is None
    assert len(calls) == len(package.layout.buckets) == 7
    calls.clear()
    assert_store_empties()


def test_a_corrupt_bucket_is_refused_and_nothing_is_committed(local_ray: str) -> None:
    class Corrupting(Link):
        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            if fn is receive and args[1] == 3:
                content = ray.get(args[2].ref).copy()
                content[0] ^= 1
                args = (*args[:2], StoredBucket(ref=ray.put(content), limit_s=10.0))
            return super().call(fn, *args)

    with own(wide_llama()) as engine, own(wide_llama()) as healthy:
        transport = ObjectStore()
        package, run = sealed(transport, Layout(Manifest.of(engine.model), 200_000), wide_llama(1), 1)
        links = [Corrupting("w0", engine), Link("w1", healthy)]
        sent = dict(transport.send(package, run, links, Deadline.after(30)))
        assert "bucket 3 of version 1 arrived with other bytes" in str(sent.pop("w0").exception(0))
        assert_store_empties()
        with pytest.raises(SyncError, match="not complete"):
            engine.call(commit, package.ticket, "copy", Deadline.after(30), 30.0).result(30)
        assert_same_weights(engine.model, wide_llama())
        assert sent["w1"].result(0) is None
        healthy.call(commit, package.ticket, "copy", Deadline.after(30), 30.0).result(30)
        assert_same_weights(healthy.model, wide_llama(1))


def test_a_bucket_of_another_size_is_refused(local_ray: str) -> None:
    bucket = StoredBucket(ref=ray.put(torch.zeros(5, dtype=torch.uint8).numpy()), limit_s=10.0)
    with pytest.raises(SyncError, match="a bucket of 6 bytes arrived with 5"):
        bucket.read(torch.zeros(6, dtype=torch.uint8))


def test_a_bucket_that_does_not_come_costs_its_limit(local_ray: str) -> None:
    @ray.remote(num_cpus=0)  # type: ignore[misc]
    class Never:
        def ever(self) -> None:
            signal.pause()

    never = Never.remote()
    try:
        with pytest.raises(SyncTimeoutError, match=r"did not come from the object store within 0\.2 s"):
            StoredBucket(ref=never.ever.remote(), limit_s=0.2).read(torch.zeros(6, dtype=torch.uint8))
    finally:
        ray.kill(never)


def test_a_worker_that_dies_between_two_buckets_is_named_and_the_others_go_on(workers: list[Worker]) -> None:
    living, victim = workers
    targets = [living, SpyTarget(victim, At("receive", 3, kill(victim)))]
    with WeightSync(targets, ObjectStore(), SYNC) as weight_sync:
        report = weight_sync.publish(wide_llama(3))
        assert report.fenced == (victim.worker_id,)
        assert "died" in report.failures[victim.worker_id]
        assert holds(living, 3)
        assert weight_sync.publish(wide_llama(4)).fenced == (victim.worker_id,)
        victim.wait_for(WorkerState.DEAD, timeout_s=20)
        victim.restart()
        assert weight_sync.publish(wide_llama(5)).fenced == ()
        assert all(holds(worker, 5) for worker in workers)
    assert_store_empties()


def test_a_stopped_worker_is_given_up_within_the_limit_holds_up_nobody_twice_and_comes_back(
    workers: list[Worker],
) -> None:
    living, stopped = workers
    transport = ObjectStore(bucket_timeout_s=1.0)
    statuses = [worker.call(hello).result(30) for worker in workers]
    claim = next_claim(None, None, statuses)
    layout = Layout(statuses[0].manifest, 200_000)
    newest = max(status.version for status in statuses)

    def send(seed: int, links: list[Link]) -> Any:
        package, run = sealed(transport, layout, wide_llama(seed), newest + seed, claim)
        sent = transport.send(package, run, links, Deadline.after(60))
        assert all(end.done() for end in sent.values())
        return sent

    stop = At("receive", 3, lambda: os.kill(pid(stopped), signal.SIGSTOP))
    links = [Link("living", living), Link("stopped", SpyTarget(stopped, stop))]
    try:
        sent = send(6, links)
        with pytest.raises(SyncTimeoutError, match="did not answer a bucket within 1 s"):
            sent["stopped"].result(0)
        assert sent["living"].result(0) is None
        sent = send(7, links)
        with pytest.raises(SyncTimeoutError, match="has not yet answered"):
            sent["stopped"].result(0)
        assert sent["living"].result(0) is None
    finally:
        os.kill(pid(stopped), signal.SIGCONT)
    stopped.call(version_of).result(30)
    sent = send(8, links)
    assert [end.result(0) for end in sent.values()] == [None, None]
    for worker in workers:
        worker.call(forget).result(30)
    assert_store_empties()


@ray.remote(num_cpus=0)  # type: ignore[misc]
class Sender:
    """A trainer in a process of its own, that is killed before its `count`th call of `name`, or broadcast."""

    def publish(self, workers: list[Worker], seed: int, make: Callable[[], Any], name: str, count: int) -> None:
        die = At(name, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if name == "broadcast":
            signal_in_broadcast(None, count, signal.SIGKILL)
        targets = [workers[0], SpyTarget(workers[1], die)]
        WeightSync(targets, make(), SYNC).publish(wide_llama(seed))


def short_collective() -> Collective:
    return Collective(operation_timeout_s=2.0)


@pytest.mark.parametrize(
    ("make", "name", "count"),
    [
        (ObjectStore, "receive", 4),
        (short_collective, "broadcast", 4),
        pytest.param(ObjectStore, "begin", 1, marks=pytest.mark.slow),
        pytest.param(ObjectStore, "commit", 1, marks=pytest.mark.slow),
        pytest.param(short_collective, "_take_part", 1, marks=pytest.mark.slow),
    ],
)
def test_a_sender_killed_at_any_point_leaves_workers_that_the_next_one_reaches(
    workers: list[Worker], make: Callable[[], Any], name: str, count: int
) -> None:
    before = [worker.call(version_of).result(30) for worker in workers]
    sender = Sender.remote()
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(sender.publish.remote(workers, 9, make, name, count), timeout=60)
    after = [worker.call(version_of).result(30) for worker in workers]
    assert after[1] == before[1]
    with WeightSync(workers, make(), SYNC) as weight_sync:
        report = weight_sync.publish(wide_llama(10))
        assert report.version == max(after) + 1
        assert report.fenced == ()
    assert all(holds(worker, 10) for worker in workers)
    assert_store_empties()


@pytest.mark.slow
def test_two_nodes() -> None:
    """Workers on two nodes of a cluster, in a driver of its own; before Ray runs there, a clear error."""
    script = Path(__file__).with_name("two_nodes.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "both nodes hold it" in ran.stdout

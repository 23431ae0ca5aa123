"""Publishing to workers in processes of their own, through Ray."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import worker_jobs
from fakes import forward_logprobs, mark, marker_llama, random_prompts, tiny_llama
from torch import Tensor

from rollout import EngineConfig, EngineFencedError, GenerationEngine, SamplingParams
from rollout.worker import Worker, WorkerConfig, WorkerState, WorkItem
from sync import SyncConfig, WeightSync
from sync.manifest import held_tensors

pytestmark = pytest.mark.ray

CONFIG = WorkerConfig(
    model=worker_jobs.marker_llama,
    engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
    num_cpus=0,
    num_threads=1,
    heartbeat_s=0.2,
    suspect_after_s=2.0,
)
PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=())
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def workers(local_ray: str) -> Iterator[list[Worker]]:
    workers = [Worker.start(f"sync-{number}", CONFIG) for number in range(2)]
    yield workers
    for worker in workers:
        worker.stop()


def held(engine: GenerationEngine) -> list[Tensor]:
    return [held.tensor.detach().clone() for held in held_tensors(engine.model)]


def finished(worker: Worker, count: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(100):
        found += worker.poll(timeout_s=LIMIT_S / 10)
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} results came")


def items(name: str, count: int) -> list[WorkItem]:
    return [WorkItem(request_id=f"{name}-{n}", prompt_ids=[5, 17, 33 + n], params=PARAMS) for n in range(count)]


def test_workers_of_this_machine_share_one_staged_copy_and_serve_the_new_version(workers: list[Worker]) -> None:
    trainer = marker_llama()
    with WeightSync(workers) as weight_sync:
        for _ in range(3):
            version = workers[0].version + 1
            mark(trainer, version)
            for worker in workers:
                assert worker.submit(items(f"{worker.worker_id}-{version}", 4)) == []
            report = weight_sync.publish(trainer)
            assert (report.version, report.fenced, report.transport) == (version, (), "shared_memory")
            for worker in workers:
                weights = worker.call(held).result(LIMIT_S)
                pairs = zip(weights, held_tensors(trainer), strict=True)
                assert all(torch.equal(ours, theirs.tensor) for ours, theirs in pairs)
                for result in finished(worker, 4):
                    assert result.rollout.token_ids == result.rollout.versions


def test_killed_worker_is_named_and_its_next_incarnation_holds_the_version_before_it_serves(
    workers: list[Worker],
) -> None:
    first, second = workers
    trainer = marker_llama()
    with WeightSync(workers, config=SyncConfig(open_timeout_s=5.0)) as weight_sync:
        mark(trainer, 40)
        weight_sync.publish(trainer, version=40)
        os.kill(second.health().pid, signal.SIGKILL)
        second.wait_for(WorkerState.DEAD, timeout_s=LIMIT_S)
        mark(trainer, 41)
        report = weight_sync.publish(trainer, version=41)
        assert report.fenced == (second.worker_id,)
        assert "died" in report.failures[second.worker_id] or "dead" in report.failures[second.worker_id].lower()
        assert first.submit(items("alone", 2)) == []
        assert all(result.rollout.versions == [41] * 24 for result in finished(first, 2))
        second.restart(serve_from_version=41)
        second.wait_for(WorkerState.HEALTHY, timeout_s=LIMIT_S)
        assert second.call(worker_jobs.version_of).result(LIMIT_S) == 41
        assert second.submit(items("back", 2)) == []
        for result in finished(second, 2):
            assert result.rollout.token_ids == result.rollout.versions == [41] * 24
        mark(trainer, 42)
        assert weight_sync.publish(trainer).fenced == ()
        assert [worker.call(worker_jobs.version_of).result(LIMIT_S) for worker in workers] == [42, 42]
        first.require_version(50)
        mark(trainer, 51)
        assert weight_sync.publish(trainer).version == 51, "below it, that worker would serve nothing"
        assert first.submit(items("later", 2)) == []
        assert all(result.rollout.versions == [51] * 24 for result in finished(first, 2))


def test_worker_whose_update_failed_serves_nothing_until_the_next_publish(workers: list[Worker]) -> None:
    worker = workers[0]
    trainer = marker_llama()
    with WeightSync(workers) as weight_sync:
        version = weight_sync.publish(trainer).version + 1
        with pytest.raises(OSError, match="broke off"):
            worker.call(worker_jobs.fence).result(LIMIT_S)
        worker.wait_for(WorkerState.STALE, timeout_s=LIMIT_S)
        assert [type(refusal.error) for refusal in worker.submit(items("fenced", 1))] == [EngineFencedError]
        mark(trainer, version)
        assert weight_sync.publish(trainer, version=version).fenced == ()
        worker.wait_for(WorkerState.HEALTHY, timeout_s=LIMIT_S)
        assert worker.submit(items("repaired", 1)) == []
        (repaired,) = finished(worker, 1)
        assert repaired.rollout.token_ids == repaired.rollout.versions == [version] * 24


def test_prompt_that_a_worker_has_seen_is_computed_anew_under_the_weights_that_the_trainer_published(
    workers: list[Worker],
) -> None:
    worker = workers[0]
    (prompt,) = random_prompts([40])  # two whole pages, which a request under the same weights would share
    trainer = tiny_llama(seed=1).train()
    before = [(parameter, parameter.detach().clone(), parameter._version) for parameter in trainer.parameters()]

    def request(name: str, num_tokens: int) -> WorkItem:
        params = SamplingParams(max_new_tokens=num_tokens, stop_token_ids=())
        return WorkItem(request_id=name, prompt_ids=prompt, params=params)

    with WeightSync(workers) as weight_sync:
        weight_sync.publish(tiny_llama(seed=2))
        worker.call(worker_jobs.slow_down).result(LIMIT_S)
        assert worker.submit([request("ended", 2), request("in-flight", 400)]) == []
        finished(worker, 1)
        version = weight_sync.publish(trainer).version
        assert worker.submit([request("new", 4)]) == []
        (new,) = finished(worker, 1)
        assert worker.cancel(["in-flight"]) == [], "it has ended too soon to test anything"
        finished(worker, 1)
        worker.call(worker_jobs.full_speed).result(LIMIT_S)
    rollout = new.rollout
    assert (rollout.rollout_id, rollout.prefill_version, rollout.versions) == ("new", version, [version] * 4)
    errors = torch.tensor(rollout.logprobs) - forward_logprobs(trainer, prompt, rollout.token_ids)
    assert errors.abs().max() < 1e-4
    assert trainer.training
    for parameter, values, counter in before:
        assert torch.equal(parameter, values)
        assert parameter._version == counter

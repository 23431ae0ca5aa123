"""A controller over workers on two nodes of a cluster. A process of its own: it starts a cluster."""

import os
import signal
import sys
from collections import Counter

import ray
import worker_jobs
from fakes import mark, marker_llama, wait_until
from ray.cluster_utils import Cluster

from rollout import EngineConfig, RolloutConfig, RolloutController, SamplingParams
from rollout.worker import Worker, WorkerConfig, WorkerState
from sync import WeightSync

BATCH_S = 120.0
NUM_PROMPTS = 24


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        train({node["NodeID"] for node in ray.nodes()})
        print("every prompt once, on both nodes")
    finally:
        ray.shutdown()
        cluster.shutdown()


def train(nodes: set[str]) -> None:
    assert len(nodes) == 2
    controller = RolloutController(
        worker_jobs.marker_llama,
        [[2 + n, 3] for n in range(NUM_PROMPTS)],
        lambda rollout, text: float(rollout.token_ids[0]),
        engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
        workers=WorkerConfig(model="replaced", num_cpus=1, num_threads=1, heartbeat_s=0.2, suspect_after_s=20.0),
        config=RolloutConfig(
            num_workers=2,
            placement="STRICT_SPREAD",
            group_size=2,
            prompts_per_step=3,
            max_infra_retries=20,
            snapshot_every_s=0.5,
            sampling=SamplingParams(max_new_tokens=40, stop_token_ids=()),
        ),
    )
    trainer = marker_llama()
    trained: Counter[str] = Counter()
    with controller, WeightSync(controller) as weight_sync:
        assert {worker.health().node_id for worker in workers(controller)} == nodes
        first, second = workers(controller)
        node_of_second = second.health().node_id
        for version in range(1, NUM_PROMPTS // 3 + 1):
            with controller.next_batch(timeout_s=BATCH_S) as lease:
                assert all(rollout.token_ids == rollout.versions for rollout in lease.rollouts)
                trained.update(group.prompt_id for group in lease.groups)
            if version == 2:
                controller.add_worker()
            if version == 4:
                controller.remove_worker(first.worker_id)
            if version == 5:
                os.kill(second.health().pid, signal.SIGKILL)
            mark(trainer, version)
            assert weight_sync.publish(trainer).version == version
        wait_until(lambda: second.health().state is WorkerState.HEALTHY, BATCH_S)
        assert (second.health().incarnation, second.health().node_id) == (1, node_of_second), "in its own bundle"
        assert len(workers(controller)) == 2
        assert controller.metrics()["rollout/imbalance"] == 0
    assert trained == Counter(f"p{n}" for n in range(NUM_PROMPTS))


def workers(controller: RolloutController) -> list[Worker]:
    found = controller.workers()
    assert all(isinstance(worker, Worker) for worker in found)
    return found


if __name__ == "__main__":
    sys.exit(main())

"""Publishes through the object store to a worker on each of two nodes. A process of its own: it starts a cluster."""

import sys

import pytest
import ray
import transport_helpers
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transport_helpers import digests_of, digests_of_model, wide_llama

from rollout import EngineConfig, GenerationEngine
from rollout.worker import Worker, WorkerConfig
from sync import SyncConfig, SyncError, WeightSync
from sync.transports import ObjectStore


def refused_without_ray() -> None:
    with (
        GenerationEngine(wide_llama(), copy_weights=True) as engine,
        WeightSync(engine, ObjectStore()) as weight_sync,
        pytest.raises(SyncError, match=r"call ray\.init"),
    ):
        weight_sync.publish(wide_llama())


def start(name: str, node_id: str) -> Worker:
    config = WorkerConfig(
        model=transport_helpers.wide_llama,
        engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
        num_cpus=0,
        num_threads=1,
        scheduling=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return Worker.start(name, config)


def main() -> None:
    refused_without_ray()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = [node["NodeID"] for node in ray.nodes()]
        assert len(nodes) == 2
        workers = [start(f"on-{number}", node) for number, node in enumerate(nodes)]
        assert [worker.health().node_id for worker in workers] == nodes
        with WeightSync(workers, ObjectStore(), SyncConfig(bucket_bytes=200_000)) as weight_sync:
            for seed in range(1, 6):
                report = weight_sync.publish(wide_llama(seed))
                assert (report.fenced, report.transport) == ((), "object_store")
                for worker in workers:
                    assert worker.call(digests_of).result(30) == digests_of_model(wide_llama(seed))
        for worker in workers:
            worker.stop()
        print("both nodes hold it")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())

"""A driver in a process of its own: starts a worker, says its pid, and then ends in the way it was asked to, without stopping
it. `python worker_driver.py ADDRESS exit|killed`."""

import sys
import threading

import ray
from worker_jobs import slow_down

from rollout import EngineConfig, SamplingParams
from rollout.worker import Worker, WorkerConfig, WorkItem


def main(address: str, ending: str) -> None:
    ray.init(address=address, log_to_driver=False)
    config = WorkerConfig(
        model="worker_jobs:tiny_llama",
        engine=EngineConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
        num_cpus=0,
    )
    worker = Worker.start("orphan", config)
    worker.call(slow_down).result(30)
    worker.submit(
        [WorkItem(request_id="a", prompt_ids=[1], params=SamplingParams(max_new_tokens=400, stop_token_ids=()))]
    )
    print("pid", worker.health().pid, flush=True)
    if ending == "killed":
        threading.Event().wait(120)


if __name__ == "__main__":
    main(*sys.argv[1:])

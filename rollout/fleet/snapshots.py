"""What the workers have in flight, asked of all of them at once."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from rollout.fleet.coordinator import Coordinator
from rollout.fleet.protocols import FleetWorker
from rollout.fleet.questions import Questions

log = logging.getLogger("rollsync")

SNAPSHOTS_AT_ONCE = 16


def note_snapshots(
    workers: Sequence[FleetWorker], coordinator: Coordinator, questions: Questions, timeout_s: float
) -> None:
    """Their partial rollouts are noted, to go on from. Who does not answer within `timeout_s` stays as last noted."""
    pool = ThreadPoolExecutor(SNAPSHOTS_AT_ONCE, thread_name_prefix="rollsync-snapshot")
    asked = {worker.worker_id: pool.submit(worker.snapshot) for worker in workers}
    wait(asked.values(), timeout_s)
    pool.shutdown(wait=False)  # whoever does not answer has a limit of its own
    for worker_id, future in asked.items():
        if future.cancel() or not future.done():
            log.warning("no snapshot of worker %s within %.3g s", worker_id, timeout_s)
        elif (error := future.exception()) is not None:
            log.warning("no snapshot of worker %s: %s", worker_id, error)
        else:
            questions.ask(partial(coordinator.workforce.on_snapshot, worker_id, future.result()))

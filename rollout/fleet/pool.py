"""A fleet of Ray workers: where they are placed, how they are named, how many come up at once."""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

from rollout.errors import InvalidRequestError, MissingDependencyError, RolloutError, WorkerUnreachableError
from rollout.worker import Worker, WorkerConfig
from rollout.worker_config import NEEDS_RAY

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingDependencyError(NEEDS_RAY) from error

log = logging.getLogger("rollsync")

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

STARTING_AT_ONCE = 8
"""Workers that load their models at the same time."""


class RayFleet:
    """`num_workers` actors, each with one engine. Uses the Ray that this process is connected to, or else the one that
    `ray.init()` finds: a submitted job's own cluster, or a new local one.

    `placement` reserves what all workers book in one placement group, so that either all fit or none waits half-started;
    None: each is placed alone, by `WorkerConfig.scheduling`. A worker that dies comes back in its own bundle.
    """

    def __init__(
        self,
        config: WorkerConfig,
        num_workers: int,
        *,
        placement: Placement | None = None,
        run_id: str | None = None,
    ) -> None:
        """`run_id` begins the workers' names; None makes one up."""
        if num_workers < 1:
            raise InvalidRequestError(f"num_workers must be at least 1, got {num_workers}")
        if placement is not None and not config.num_cpus and not config.num_gpus:
            raise InvalidRequestError(
                f'placement="{placement}" reserves what workers book, and these book nothing; set WorkerConfig.num_cpus'
            )
        self.config = config
        self.run_id = run_id if run_id is not None else secrets.token_hex(3)
        self.workers: list[Worker] = []
        self._num_workers = num_workers
        self._placement = placement
        self._group: PlacementGroup | None = None
        self._num_made = 0
        self._naming = threading.Lock()

    def start(self, serve_from_version: int) -> Sequence[Worker]:
        """All of them, running; a few start at a time. If one cannot, the others are stopped, and its error is raised."""
        if not ray.is_initialized():
            ray.init()
        if self._placement is not None:
            self._group = self._reserve(self._placement)
        with ThreadPoolExecutor(STARTING_AT_ONCE, thread_name_prefix="rollsync-start") as starters:
            futures = [starters.submit(self._make, n, serve_from_version) for n in range(self._num_workers)]
        self._num_made = self._num_workers
        self.workers = [future.result() for future in futures if future.exception() is None]
        failed = next((future.exception() for future in futures if future.exception() is not None), None)
        if failed is not None:
            self.stop(30.0)
            raise failed
        return list(self.workers)

    def add_worker(self, serve_from_version: int) -> Worker:
        """One more, outside the placement group, which is full."""
        with self._naming:  # two at once would share a name
            number = self._num_made
            self._num_made += 1
        worker = self._make(number, serve_from_version)
        self.workers.append(worker)
        return worker

    def stop(self, timeout_s: float) -> None:
        """Ends every worker, at once. One that cannot be ended is named in the log."""
        deadline = time.monotonic() + timeout_s

        def end(worker: Worker) -> None:
            try:
                worker.stop(max(deadline - time.monotonic(), 1.0))
            except RolloutError as error:
                log.warning("worker %s did not stop: %s", worker.worker_id, error)

        if self.workers:
            with ThreadPoolExecutor(len(self.workers), thread_name_prefix="rollsync-stop") as enders:
                ended: list[Future[None]] = [enders.submit(end, worker) for worker in self.workers]
            for future in ended:
                future.result()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _make(self, number: int, serve_from_version: int) -> Worker:
        config = self.config
        if self._group is not None and number < self._num_workers:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            config = replace(config, scheduling=strategy)
        return Worker.start(f"{self.run_id}-w{number}", config, serve_from_version=serve_from_version)

    def _reserve(self, placement: Placement) -> PlacementGroup:
        bundle = {"CPU": self.config.num_cpus, "GPU": self.config.num_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group: PlacementGroup = placement_group([dict(bundle) for _ in range(self._num_workers)], strategy=placement)
        if not group.wait(self.config.start_timeout_s):
            remove_placement_group(group)
            has = ray.cluster_resources()  # type: ignore[no-untyped-call]
            raise WorkerUnreachableError(
                f"no room for {self._num_workers} workers of {bundle} placed {placement} within "
                f"{self.config.start_timeout_s:g} s; the cluster has {has}"
            )
        return group

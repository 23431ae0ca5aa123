"""The fleet of `num_workers=0`: one engine, in this process."""

from collections.abc import Sequence

from rollout.engine import GenerationEngine
from rollout.errors import InvalidRequestError
from rollout.workers.local_worker import LocalWorker

RENAME_TIMEOUT_S = 30.0


class LocalFleet:
    """Starts the engine, and stops it."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self._worker = LocalWorker(engine)

    def start(self, serve_from_version: int) -> Sequence[LocalWorker]:
        """The engine's weights, whatever they are, are called by that version."""
        self.engine.start()
        if serve_from_version > self.engine.version:
            with self.engine.update(serve_from_version, timeout_s=RENAME_TIMEOUT_S):
                pass
        return [self._worker]

    def add_worker(self, serve_from_version: int) -> LocalWorker:
        raise InvalidRequestError(
            "a fleet of num_workers=0 is one engine; use Ray workers: RolloutConfig(num_workers=...)"
        )

    def stop(self, timeout_s: float) -> None:
        self._worker.stop(timeout_s)
        self.engine.stop(timeout_s)

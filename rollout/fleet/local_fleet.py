"""A fleet of one engine, in this process."""

from collections.abc import Sequence

from rollout.engine import GenerationEngine
from rollout.errors import InvalidRequestError
from rollout.workers.local_worker import LocalWorker

RENAME_TIMEOUT_S = 30.0


class LocalFleet:
    """That of `num_workers=0`: starts the engine, and stops it."""

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


class RunningEngine:
    """One engine that somebody else has started, and will stop, as a fleet: `RolloutController.over(RunningEngine(engine),
    prompts, reward_fn)`."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._worker = LocalWorker(engine)

    def start(self, serve_from_version: int) -> Sequence[LocalWorker]:
        """The engine serves nothing below that version: it waits for a publish, or an update, that brings it there."""
        self._worker.require_version(serve_from_version)
        return [self._worker]

    def add_worker(self, serve_from_version: int) -> LocalWorker:
        raise InvalidRequestError(
            "this fleet is one engine that runs already; use Ray workers: RolloutConfig(num_workers=...)"
        )

    def stop(self, timeout_s: float) -> None:
        """Ends its polls; the engine goes on."""
        self._worker.stop(timeout_s)

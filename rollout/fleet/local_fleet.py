"""A fleet of one engine, in this process."""

from collections.abc import Sequence

from rollout.engine import GenerationEngine
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.status import EngineState
from rollout.workers.local_worker import LocalWorker

RENAME_TIMEOUT_S = 30.0


class OneEngine:
    """What fleets of one engine have in common: the engine, on which `RolloutController.update` works, and that it stays
    the only one."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self._worker = LocalWorker(engine)

    def add_worker(self, serve_from_version: int) -> LocalWorker:
        raise InvalidRequestError("this fleet is one engine; use Ray workers: RolloutConfig(num_workers=...)")

    def stop(self, timeout_s: float) -> None:
        """Ends its polls."""
        self._worker.stop(timeout_s)


class LocalFleet(OneEngine):
    """That of `num_workers=0`: starts the engine, and stops it."""

    def start(self, serve_from_version: int) -> Sequence[LocalWorker]:
        """The engine's weights, whatever they are, are called by that version."""
        self.engine.start()
        if serve_from_version > self.engine.version:
            with self.engine.update(serve_from_version, timeout_s=RENAME_TIMEOUT_S):
                pass
        return [self._worker]

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        self.engine.stop(timeout_s)


class RunningEngine(OneEngine):
    """One engine that somebody else has started, and will stop, as a fleet: `RolloutController.over(RunningEngine(engine),
    prompts, reward_fn)`."""

    def start(self, serve_from_version: int) -> Sequence[LocalWorker]:
        """The engine serves nothing below that version: it waits for a publish, or an update, that brings it there.
        EngineStateError for an engine that does not run."""
        if self.engine.state not in (EngineState.RUNNING, EngineState.FENCED):
            raise EngineStateError(
                f"the engine of this fleet is {self.engine.state}, and RunningEngine neither starts nor revives one; start "
                "the controller inside `with engine:`, or let it make an engine: RolloutController(model, ...)"
            )
        self._worker.require_version(serve_from_version)
        return [self._worker]

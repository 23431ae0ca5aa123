"""Everything this package raises, in one tree.

RolloutError
├── InvalidRequestError (also ValueError)   a request or setting that cannot work; names the value and the remedy
├── EngineStateError                        the engine is not in a state in which the call makes sense
│   ├── EngineDeadError                     its generation loop died; `__cause__` is what killed it
│   ├── EngineFencedError                   it holds weights that nothing vouches for, until an update succeeds
│   └── EngineStaleError                    it lacks the version of a rollout that it is to go on from, until an update
├── PauseTimeoutError (also TimeoutError)   a phase of a live update took longer than its limit
├── WorkerError                             something about one worker of a fleet
│   ├── WorkerDiedError                     its process has ended; what it had not handed over is lost
│   │   └── WorkerIrreplaceableError        and nobody can start another: its engine is this process's own
│   ├── WorkerUnreachableError (also TimeoutError)  no answer within the limit; it may be stopped, busy or cut off
│   ├── WorkerStaleError                    it lacks the fleet's version and serves nothing until a publish reaches it
│   └── WorkerBusyError                     it holds as many requests and unread results as it may
├── RolloutStalledError                     a fleet makes no progress; carries the `status()` that says who waits for what
├── StaleRolloutsError                      groups became too old, and `on_stale="raise"` was asked for
├── PromptsExhaustedError                   every prompt has been handed out and acknowledged
└── MissingDependencyError (also ImportError)   this part needs a package that is not installed; names the remedy
"""

from collections.abc import Mapping
from typing import Any


class RolloutError(Exception):
    """Root of the package's errors."""


class InvalidRequestError(RolloutError, ValueError):
    """A request, prompt or setting was refused before it could hurt anything; the message names value and remedy."""


class EngineStateError(RolloutError):
    """The call does not fit the engine's state: not started, stopped, or made from inside an update."""


class EngineDeadError(EngineStateError):
    """The generation loop died. Every future has resolved with its partial rollout; `__cause__` is the reason."""


class EngineFencedError(EngineStateError):
    """The engine's weights are half-updated or were changed behind its back. It serves nothing until an update
    succeeds."""


class EngineStaleError(EngineStateError):
    """The rollout to resume has tokens of a version that this engine does not hold yet. Not the request's fault: it works
    once the engine has been updated, and on an engine that has been."""


class PauseTimeoutError(RolloutError, TimeoutError):
    """A phase of `update()` (waiting for the pause, or the body inside it) exceeded its limit; the message names it."""


class WorkerError(RolloutError):
    """One worker of a fleet cannot do what was asked; the message names it and the phase."""


class WorkerDiedError(WorkerError):
    """The worker's process has ended, or was ended. Whatever it had not handed over is lost; `Worker.restart()` makes a
    new incarnation."""


class WorkerIrreplaceableError(WorkerDiedError):
    """No restart can bring another incarnation: its engine is this process's own."""


class WorkerUnreachableError(WorkerError, TimeoutError):
    """No answer within the limit of the phase that the message names. The worker may be stopped, overloaded or cut off,
    and what was asked may or may not have been done: it is SUSPECT, not dead."""


class WorkerStaleError(WorkerError):
    """The worker lacks the version that it must serve from, or is fenced. It takes no request until a publish has
    reached it."""


class WorkerBusyError(WorkerError):
    """The worker holds `max_outstanding` requests and unread results. Nothing is dropped: read results, then submit
    again."""


class RolloutStalledError(RolloutError):
    """Nothing has moved for too long. `status` says who waits for what."""

    def __init__(self, message: str, status: Mapping[str, Any]) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class StaleRolloutsError(RolloutError):
    """Ready groups are older than `max_staleness`; more than one version was published for each batch."""


class PromptsExhaustedError(RolloutError):
    """There is no next batch: every prompt has been trained on, or has ended otherwise. If some failed, the message has the
    last failure, and `__cause__` is what a reward function of yours raised. More epochs are `RolloutConfig(num_epochs=...)`."""


class MissingDependencyError(RolloutError, ImportError):
    """What was asked for needs a package that the rest does without, and which is not installed here. The message names
    it and how to install it."""

"""Everything this package raises, in one tree.

RolloutError
├── InvalidRequestError (also ValueError)   a request or setting that cannot work; names the value and the remedy
├── EngineStateError                        the engine is not in a state in which the call makes sense
│   ├── EngineDeadError                     its generation loop died; `__cause__` is what killed it
│   └── EngineFencedError                   it holds weights that nothing vouches for, until an update succeeds
└── PauseTimeoutError (also TimeoutError)   a phase of a live update took longer than its limit
"""


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


class PauseTimeoutError(RolloutError, TimeoutError):
    """A phase of `update()` (waiting for the pause, or the body inside it) exceeded its limit; the message names it."""

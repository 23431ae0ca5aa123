"""Everything that `sync` raises, in one tree.

    SyncError                                 a publish or setting that cannot work; names the value and the remedy
    ├── ManifestError                         source and engine do not hold the same tensors; the message is a diff
    ├── SenderReplacedError                   a newer trainer has taken the engines over; this one must stop
    └── SyncTimeoutError (also TimeoutError)  a phase of a publish exceeded its limit; names phase and target

An engine's own errors (`rollout.RolloutError`) arrive as the `__cause__` of a SyncError.
"""


class SyncError(Exception):
    """Root of the package's errors."""


class ManifestError(SyncError):
    """What the source offers is not what the engine holds: missing, unexpected, wrong shape or wrong kind of number.
    Nothing was copied into the engine."""


class SenderReplacedError(SyncError):
    """The engines obey a newer trainer. Whatever this one has staged is given to nobody any more."""


class SyncTimeoutError(SyncError, TimeoutError):
    """A phase of a publish (waiting for its turn, staging, the commit on a target) took longer than its limit."""

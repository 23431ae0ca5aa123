"""What sender and receiver tell each other."""

from dataclasses import dataclass

from sync.layout import Layout
from sync.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who publishes. Within a run the highest epoch is the trainer of now; whoever holds a lower one has been replaced."""

    run_id: str
    epoch: int
    sender: str
    """A random name of one WeightSync, which tells two that claim the same epoch apart."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One version of one sender. Two tickets are equal only if their bytes are."""

    claim: Claim
    version: int
    seal: str
    """A digest of the buckets' digests; where bytes stay on a device, a random name of this staging."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """All that a receiver must know to take and verify one version, without the bytes."""

    ticket: Ticket
    layout: Layout
    digests: tuple[str, ...] | None
    """One per bucket; None where the receiver reads the sender's own memory on a device."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process runs."""

    machine: str
    """Equal for processes that see the same memory file system and the same monotonic clock."""
    pid: int


@dataclass(frozen=True, kw_only=True)
class TargetStatus:
    """What a receiver answers when a publish opens."""

    manifest: Manifest
    version: int
    is_fenced: bool
    claim: Claim | None
    """The newest that it has obeyed."""
    place: Place
    can_remap: bool

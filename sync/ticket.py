"""What sender and receiver tell each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sync.errors import SenderReplacedError, SyncError
from sync.layout import Layout, digest
from sync.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who publishes. Within a run the highest epoch is the trainer of now; whoever holds a lower one has been replaced."""

    run_id: str
    epoch: int
    sender: str
    """A random name of one WeightSync, which tells two that claim the same epoch apart."""

    def replaces(self, other: "Claim") -> bool:
        """Whether an engine leaves the other for this one. Of two senders that start at the same moment the name decides,
        alike at every engine, so that not each of them gets some."""
        return self.run_id == other.run_id and (self.epoch, self.sender) > (other.epoch, other.sender)


def refusal(who: str, obeyed: Claim, claim: Claim) -> SyncError:
    """Why a sender is refused by an engine (`who`) that obeys another."""
    if obeyed.run_id != claim.run_id:
        return SyncError(
            f"{who} belongs to run {obeyed.run_id!r}, the publish comes from run {claim.run_id!r}; start an engine for "
            "each run, or leave SyncConfig.run_id out to take over the one that it has"
        )
    return SenderReplacedError(
        f"{who} obeys a newer trainer (epoch {obeyed.epoch} of run {obeyed.run_id!r}, this one has {claim.epoch}): stop "
        "this trainer, or make a new WeightSync if it is the one that should go on"
    )


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

    def verify(self, index: int, part: Tensor) -> None:
        """SyncError unless `part`, in host memory, has the bytes of this bucket."""
        assert self.digests is not None
        if digest(part) != self.digests[index]:
            raise SyncError(
                f"bucket {index} of version {self.ticket.version} arrived with other bytes than were sent; publish again"
            )

    def verify_all(self, run: Tensor) -> None:
        """The same for every bucket of a whole run."""
        for bucket, part in self.layout.parts(run):
            self.verify(bucket.index, part)


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
    addresses: frozenset[tuple[torch.device, int]] = frozenset()
    """Where its tensors lie, for a sender in the same process: one that offers those very tensors has nothing to publish."""

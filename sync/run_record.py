"""What a trainer must remember about its run, so that its successor goes on above it."""

import json
import os
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sync.errors import SyncError
from sync.ticket import Claim, TargetStatus

FILE_NAME = "weight_sync.json"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The newest sender of a run, and its newest version."""

    claim: Claim
    version: int

    @staticmethod
    def load(folder: Path) -> "RunRecord | None":
        """None if nothing was saved there. SyncError for a file that is no record."""
        path = folder / FILE_NAME
        try:
            fields = json.loads(path.read_text())
            claim = fields["claim"]
            return RunRecord(
                claim=Claim(run_id=str(claim["run_id"]), epoch=int(claim["epoch"]), sender=str(claim["sender"])),
                version=int(fields["version"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise SyncError(f"{path} is not a run record ({error}); remove it to start a new run") from error

    def save(self, folder: Path) -> None:
        """Replaces the record at once: a crash leaves the old one or the new one."""
        folder.mkdir(parents=True, exist_ok=True)
        write_at_once(folder / FILE_NAME, json.dumps(asdict(self)).encode())


def next_claim(run_id: str | None, saved: RunRecord | None, statuses: Iterable[TargetStatus]) -> Claim:
    """The claim of a new sender: the run that is named, else that of the record, else that of the targets, else a new
    one; one epoch above all that is known of it. SyncError if a record or target belongs to another run."""
    claims = {status.claim for status in statuses if status.claim is not None}
    known = {claim.run_id for claim in claims} | ({saved.claim.run_id} if saved is not None else set())
    if run_id is None:
        if len(known) > 1:
            raise SyncError(
                f"the targets belong to several runs ({', '.join(sorted(known))}); name the one that goes on: "
                "SyncConfig(run_id=...), and start new engines for it in place of the others"
            )
        run_id = next(iter(known), uuid.uuid4().hex[:12])
    elif saved is not None and saved.claim.run_id != run_id:
        raise SyncError(
            f"run_folder holds run {saved.claim.run_id!r}, run_id is {run_id!r}; give each run a folder of its own"
        )
    epochs = [claim.epoch for claim in claims if claim.run_id == run_id]
    if saved is not None:
        epochs.append(saved.claim.epoch)
    return Claim(run_id=run_id, epoch=1 + max(epochs, default=0), sender=uuid.uuid4().hex)


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all, also after a power cut: temporary file, fsync, rename, fsync."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

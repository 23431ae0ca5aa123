"""What is written beside a version's weights on disk."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sync.errors import SyncError
from sync.ticket import Claim, Ticket

FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file of a version."""

    file: str
    digests: Mapping[str, str]
    """Of each tensor's bytes, by the tensor's name."""


@dataclass(frozen=True, kw_only=True)
class VersionIndex:
    """All of a version but its bytes. Read without trust: what is no index raises SyncError."""

    ticket: Ticket
    """The sender's own: an engine that takes the version from disk obeys that sender from then on."""
    bucket_bytes: int
    num_bytes: int
    aliases: Mapping[str, tuple[str, ...]]
    """The other names of a tied tensor, by the one it is stored under."""
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @staticmethod
    def load(folder: Path) -> "VersionIndex":
        """FileNotFoundError if there is none."""
        path = folder / INDEX
        try:
            fields = json.loads(path.read_bytes())
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']!r}, this release reads {FORMAT}")
            ticket = fields["ticket"]
            return VersionIndex(
                ticket=Ticket(
                    claim=Claim(
                        run_id=str(ticket["claim"]["run_id"]),
                        epoch=int(ticket["claim"]["epoch"]),
                        sender=str(ticket["claim"]["sender"]),
                    ),
                    version=int(ticket["version"]),
                    seal=str(ticket["seal"]),
                ),
                bucket_bytes=int(fields["bucket_bytes"]),
                num_bytes=int(fields["num_bytes"]),
                aliases={str(name): tuple(map(str, others)) for name, others in fields["aliases"].items()},
                shards=tuple(
                    Shard(file=file_name(shard["file"]), digests=dict(shard["digests"])) for shard in fields["shards"]
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SyncError(f"{path} is damaged ({error!r}); publish again, or remove {folder}") from error


def file_name(name: object) -> str:
    """ValueError unless it names an entry of the folder that it is read in, and none outside."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name

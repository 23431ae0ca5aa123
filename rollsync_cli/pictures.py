"""The pictures that a run's folder holds, for the page to carry within itself."""

import base64
from dataclasses import dataclass
from pathlib import Path

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PICTURES = 8
MAX_BYTES = 4 * 2**20
"""Of one picture: the page is opened whole."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG."""

    name: str
    data: str
    """Base64."""


def read_pictures(folder: Path) -> list[Picture]:
    """The first PNGs of the folder by name; what is larger than a page should carry, or cannot be read, stays out."""
    pictures: list[Picture] = []
    for path in sorted(folder.glob("*.png")):
        if len(pictures) == MAX_PICTURES:
            break
        try:
            # a pipe or a device has the size 0, and no end
            content = path.read_bytes() if path.is_file() and path.stat().st_size <= MAX_BYTES else b""
        except OSError:
            continue
        if content.startswith(SIGNATURE):
            pictures.append(Picture(name=path.name, data=base64.b64encode(content).decode("ascii")))
    return pictures

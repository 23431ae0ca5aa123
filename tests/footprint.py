"""What a process holds, so that tests see whether something stays behind."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A moment of one process."""

    fds: tuple[str, ...]
    """What its descriptors point at, sorted."""
    threads: tuple[str, ...]
    maps: tuple[str, ...]
    """The files below the watched folder that it maps, once for each mapping."""
    rss_kib: int


def footprint(folder: Path) -> Footprint:
    """Of this process; `folder` is the one whose mapped files are told."""
    return Footprint(
        fds=tuple(sorted(_fds())),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        maps=tuple(line for line in _mapped_files() if line.startswith(str(folder))),
        rss_kib=_rollup("Rss"),
    )


def footprint_of(engine: Any, folder: Path) -> Footprint:
    """Of an engine's process: `target.call(footprint_of, folder)`."""
    return footprint(folder)


def file_pss_kib(engine: Any, folder: Path) -> int:
    """The engine's process's share of the physical memory of the files below a folder that it maps."""
    share, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _is_header(line):
            inside = str(folder) in line
        elif inside and line.startswith("Pss:"):
            share += int(line.split()[1])
    return share


def runs_on_files(engine: Any, folder: Path) -> bool:
    """Whether every weight of the engine lies in a file below the folder that it maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in lines if str(folder) in line]
    addresses = [tensor.data_ptr() for tensor in engine.model.state_dict().values()]
    return all(any(start <= address < stop for start, stop in ranges) for address in addresses)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _fds() -> list[str]:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the one that listed the folder
    # of pipes and sockets only the kind: their numbers differ from one to the next
    return [name.split(":")[0] for name in names]


def _mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]


def _is_header(line: str) -> bool:
    return "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":")


def _rollup(field: str) -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {field} in smaps_rollup")

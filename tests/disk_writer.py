"""Writes a version to disk and is killed at each step of it in turn. `python disk_writer.py FOLDER`; prints what is found
after each kill, one JSON object a line."""

import itertools
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from sync.layout import Layout, seal
from sync.manifest import Manifest
from sync.place import Deadline
from sync.ticket import Claim, Package, Ticket
from sync.transports.version_store import VersionStore

STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "fcntl.flock", "shutil.rmtree"}
KEEP = 2


def model(version: int) -> torch.nn.Module:
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(version)
    return module


def write(folder: Path, version: int) -> None:
    weights = model(version)
    layout = Layout(Manifest.of(weights), 1200)
    run = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for view, parameter in zip(layout.views(run), weights.parameters(), strict=True):
        view.copy_(parameter.detach())
    digests = layout.digests(run)
    ticket = Ticket(claim=Claim(run_id="run", epoch=version, sender=f"{version}"), version=version, seal=seal(digests))
    package = Package(ticket=ticket, layout=layout, digests=digests)
    VersionStore.make(folder).write(package, run, Deadline.after(60), keep=KEEP)


def killed_at(step: int, folder: Path, version: int) -> bool:
    """Whether a child that writes was killed at its `step`th step."""
    child = os.fork()
    if child == 0:
        steps = itertools.count()

        def kill(event: str, _: Any) -> None:
            if event in STEPS and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        write(folder, version)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def found(folder: Path) -> int:
    """The newest version, after every byte of it was verified."""
    with VersionStore(folder).open_newest(Deadline.after(60)) as stored:
        version = stored.index.ticket.version
        values = {float(value) for _, tensor in stored.tensors() for value in tensor.flatten()}
    assert values == {float(version)}
    return version


def failed_when_full(folder: Path, version: int) -> str:
    """What a child says that cannot write files beyond a small size."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
        try:
            write(folder, version)
        except Exception as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


def main(base: Path) -> None:
    torch.set_num_threads(1)
    template = base / "template"
    for version in (1, 2):
        write(template, version)
    error = failed_when_full(template, 3)
    print(json.dumps({"killed": False, "error": error, "after": found(template), "entries": entries(template)}))
    for step in itertools.count():
        folder = base / f"killed-at-{step}"
        shutil.copytree(template, folder)
        folder.chmod(0o700)
        if not killed_at(step, folder, 3):
            return
        after = found(folder)
        write(folder, 4)
        print(json.dumps({"killed": True, "after": after, "next": found(folder), "entries": entries(folder)}))
        shutil.rmtree(folder)


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

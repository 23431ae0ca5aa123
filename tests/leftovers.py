"""What this process holds of what a test may have made: threads, processes and run folders."""

import multiprocessing
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

OURS = re.compile(r"rollsync-|weight-sync|.*\(_run_generation_loop\)")
"""Names of threads: ours, and the loop of a manager that is upstream's own."""
LASTING = re.compile(r"/ray/|multiprocessing|torch/_inductor")
"""Command lines of processes that last as long as this one, whoever asked for them first."""


def held() -> Mapping[object, str]:
    """Each thing, and what to call it."""
    threads = {thread: f"thread {thread.name}" for thread in threading.enumerate() if OURS.match(thread.name)}
    spawned = {process: f"process {process.name}" for process in multiprocessing.active_children()}
    return {**threads, **spawned, **_started(), **_run_folders()}


def _started() -> dict[object, str]:
    found: dict[object, str] = {}
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue  # it has ended in the meantime, or been waited for
        if command and not LASTING.search(command):
            found[child] = f"process {command:.200}"
    return found


def _run_folders() -> dict[object, str]:
    """Their owner holds a lock in each."""
    found: dict[object, str] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the one that listed the folder
        if path.name == "alive" and path.parent.name.startswith("run-"):
            found[path] = f"run folder {path.parent}"
    return found

"""A trainer in a process of its own, killable in the middle of a publish.

Its calls on the targets go through the test's process, which can hold them: so the kill strikes at one exact moment.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from fakes import mark, marker_llama
from process_target import NUM_MARKS, PRELOADED, START_TIMEOUT_S, ProcessTarget
from torch import Tensor

from rollout import RolloutError
from sync import SyncConfig, WeightSync
from sync.transports import SharedMemory

Held = Callable[[str, str], bool]
"""Whether a call is held back, by the target's and the function's name."""


class SenderProcess:
    """Publishes marker models through shared memory to targets that belong to the test's process."""

    def __init__(self, targets: Mapping[str, ProcessTarget], folder: Path, commit: str | None) -> None:
        self.is_held: Held = lambda target, function: False
        self.calls: list[tuple[str, str]] = []
        """Target and function of each call, held ones included."""
        self._targets = targets
        self._held: list[Callable[[], None]] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, list(targets), folder, commit), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.poll(START_TIMEOUT_S), "the process did not start"
        assert self._connection.recv() == "ready"
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def publish(self, version: int, *, stop_after: int | None = None) -> "Future[Any]":
        """A marker model that says `version`; the source stops after so many tensors, for ever. The future has the report,
        or fails when the process dies."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting[version] = future
            self._connection.send(("publish", version, stop_after))
        return future

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._reader.join(10)

    def let_through(self) -> None:
        """What was held reaches its target now."""
        held, self._held = self._held, []
        for call in held:
            call()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.kill()
        self._connection.close()

    def _relay(self) -> None:
        try:
            while True:
                kind, *rest = self._connection.recv()
                if kind == "call":
                    self._call(*rest)
                elif kind == "staging":
                    self.calls.append(("", "staging"))
                else:
                    version, report, error = rest
                    future = self._waiting.pop(version)
                    if error is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(report)
        except (EOFError, OSError):
            for future in self._waiting.values():
                future.set_exception(RolloutError("the sender has died"))

    def _call(self, number: int, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        def forward() -> None:
            self._targets[name].call(fn, *args).add_done_callback(answer)

        def answer(future: "Future[Any]") -> None:
            error = future.exception()
            try:
                with self._lock:
                    self._connection.send(("answer", number, None if error is not None else future.result(), error))
            except OSError:
                return  # it is dead

        if self.is_held(name, fn.__name__):
            self._held.append(forward)
        else:
            forward()
        self.calls.append((name, fn.__name__))


class _Relayed:
    """A target, as the sender's process sees it."""

    def __init__(self, name: str, outbox: "_Outbox") -> None:
        self.worker_id = name
        self._outbox = outbox

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        return self._outbox.call(self.worker_id, fn, args)


class _Outbox:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._num_calls = 0

    def call(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._num_calls += 1
            self._waiting[self._num_calls] = future
            self._connection.send(("call", self._num_calls, name, fn, args))
        return future

    def tell(self, *message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def answer(self, number: int, result: Any, error: BaseException | None) -> None:
        future = self._waiting.pop(number)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _serve(connection: Connection, names: list[str], folder: Path, commit: Any) -> None:
    torch.set_num_threads(1)
    outbox = _Outbox(connection)
    targets = [_Relayed(name, outbox) for name in names]
    weight_sync = WeightSync(targets, SharedMemory(commit, folder=folder), SyncConfig(bucket_bytes=4096))
    trainer = marker_llama()

    def source(stop_after: int) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(trainer.state_dict().items()):
            if number == stop_after:
                outbox.tell("staging")
                threading.Event().wait()
            yield item

    def publish(version: int, stop_after: int | None) -> None:
        mark(trainer, version % NUM_MARKS)
        try:
            report = weight_sync.publish(trainer if stop_after is None else source(stop_after), version=version)
        except Exception as error:
            outbox.tell("report", version, None, error)
        else:
            outbox.tell("report", version, report, None)

    connection.send("ready")
    while True:
        try:
            kind, *rest = connection.recv()
        except EOFError:
            return
        if kind == "answer":
            outbox.answer(*rest)
        else:
            threading.Thread(target=publish, args=rest, daemon=True).start()

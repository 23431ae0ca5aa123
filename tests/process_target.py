"""An engine in a process of its own, as a target of a weight sync: what a Ray worker is, without Ray, and killable."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from fakes import marker_llama

from rollout import GenerationEngine, RolloutError, SamplingParams

START_TIMEOUT_S = 120.0
NUM_MARKS = 60
"""`mark(model, version % NUM_MARKS)`: a marker model has so few tokens."""
PRELOADED = ["transformers.models.llama.modeling_llama", "transformers.generation.continuous_batching"]


class ProcessTarget:
    """`call` runs on the engine's control thread over there. `kill()` is kill -9; what waits then fails with
    RolloutError, as with a worker's death."""

    def __init__(self, name: str, make_model: Callable[[], Any] = marker_llama) -> None:
        self.worker_id = name
        # Forked from a process that has no threads and has imported what takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_model), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._dead = False
        self._num_calls = 0
        assert self._connection.poll(START_TIMEOUT_S), "the process did not start"
        assert self._connection.recv() == "ready"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._dead:
                raise RolloutError(f"{self.worker_id} is dead")
            self._num_calls += 1
            self._waiting[self._num_calls] = future
            self._connection.send((self._num_calls, fn, args))
        return future

    def generate_for_ever(self) -> None:
        """Keep the engine busy from here on; every token is checked against its version over there (see `faults`)."""
        self.call(_keep_busy).result(30)

    def faults(self) -> list[str]:
        """What was wrong with rollouts that have ended: tokens of another version than the one they are labelled with
        (the model must be a marker model)."""
        faults: list[str] = self.call(_faults).result(30)
        return faults

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)
        self._reader.join(10)

    def close(self) -> None:
        if self._process.is_alive():
            with self._lock:
                self._connection.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            while True:
                number, result, error = self._connection.recv()
                future = self._waiting.pop(number)
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        except (EOFError, OSError):
            with self._lock:
                self._dead = True
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(RolloutError(f"{self.worker_id} has died"))


def _serve(connection: Connection, make_model: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    lock = threading.Lock()

    def answer(number: int, future: "Future[Any]") -> None:
        error = future.exception()
        with lock:
            connection.send((number, None if error is not None else future.result(), error))

    with GenerationEngine(make_model(), copy_weights=True) as engine:
        connection.send("ready")
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            if message is None:
                return
            number, fn, args = message
            future = engine.call(fn, *args)
            future.add_done_callback(lambda future, number=number: answer(number, future))


_found: list[str] = []


def _keep_busy(engine: GenerationEngine) -> None:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=())

    def again(_: Any) -> None:
        try:
            future = engine.submit([5, 17, 33, 8], params)
        except RolloutError:
            return  # stopped
        future.add_done_callback(check)

    def check(future: "Future[Any]") -> None:
        rollout = future.result()
        if rollout.token_ids != [version % NUM_MARKS for version in rollout.versions]:
            _found.append(f"{rollout.token_ids} labelled {rollout.versions}")
        again(None)

    for _ in range(4):
        again(None)


def _faults(engine: GenerationEngine) -> list[str]:
    return list(_found)

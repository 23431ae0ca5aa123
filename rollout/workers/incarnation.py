"""One incarnation of a worker as its handle knows it: what was heard of it last, and whether it lives.

A thread always has one question before the worker, which answers when its state or version moves and at each
heartbeat. So a death is seen at once, without asking, and silence tells of a process that is stopped or cut off.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rollout.errors import WorkerDiedError, WorkerUnreachableError
from rollout.status import EngineStats
from rollout.worker_config import WorkerConfig
from rollout.workers.remote import Answer, Failure, RemoteHost, opened
from rollout.workers.wire import Report, WorkerState

log = logging.getLogger("rollsync")


class Incarnation:
    """`changed` guards it and tells of every change; a handle shares it among its incarnations."""

    def __init__(self, number: int, host: RemoteHost, config: WorkerConfig, changed: threading.Condition) -> None:
        self.number = number
        self.host = host
        self.death: str | None = None
        self.version = 0
        self.engine: EngineStats | None = None
        self.heard_at = time.monotonic()
        self.read_up_to = 0  # results up to this number have come here
        self._reported: WorkerState | None = None
        self.config = config
        self._changed = changed
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """From now on heartbeats are heard."""
        with self._changed:
            if self._thread is None and self.death is None:
                name = f"rollsync-heartbeat-{self.host.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def state(self, serve_from_version: int) -> WorkerState:
        """How it stands now. SUSPECT until something is heard."""
        with self._changed:
            if self.death is not None:
                return WorkerState.DEAD
            if self._reported is None or time.monotonic() - self.heard_at > self.config.suspect_after_s:
                return WorkerState.SUSPECT
            if self._reported == WorkerState.HEALTHY and self.version < serve_from_version:
                return WorkerState.STALE
            return self._reported

    def ask(self, question: str, *args: Any, limit_s: float) -> Any:
        """As `RemoteHost.ask`, and hears."""
        self.check_living(question)
        return self.heard(lambda: self.host.ask(question, *args, limit_s=limit_s))

    def heard(self, get: Callable[[], Answer | Failure]) -> Any:
        """The value of the answer that `get` returns, or what it raises, and hears."""
        try:
            reply = get()
        except WorkerDiedError as error:
            self.end(str(error))
            raise
        answer = opened(reply)  # what a function raised in the worker says nothing about the worker
        self.hear(answer.report)
        return answer.value

    def check_living(self, question: str) -> None:
        """WorkerDiedError when it is known to be dead."""
        if self.death is not None:
            raise WorkerDiedError(f"{question} of worker {self.host.name} is not possible, it is dead: {self.death}")

    def hear(self, report: Report) -> None:
        """It has said this."""
        with self._changed:
            self.heard_at = time.monotonic()
            if report.version >= self.version:  # answers may overtake each other
                self._reported, self.version, self.engine = report.state, report.version, report.engine
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """It is dead, or to be ended. The first reason stays."""
        with self._changed:
            self.death = self.death or reason
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """After its death: waits for the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        question: Any = None
        while self.death is None:
            try:
                if question is None:
                    question = self.host.send("beat", self._seen(), self.config.heartbeat_s)
                answer = self.host.wait("beat", question, self._patience())
            except WorkerDiedError as error:
                self.end(str(error))
            except Exception as error:
                # unreachable for now, or its numbers cannot be read: silence, unless it passes
                level = logging.INFO if isinstance(error, WorkerUnreachableError) else logging.ERROR
                log.log(level, "no heartbeat of worker %s: %s", self.host.name, error)
                question = None
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self.death is not None, self.config.heartbeat_s)
            else:
                if answer is None:
                    with self._changed:
                        self._changed.notify_all()  # it may have become SUSPECT
                else:
                    question = None
                    self.hear(opened(answer).value)

    def _seen(self) -> tuple[WorkerState, int] | None:
        return None if self._reported is None else (self._reported, self.version)

    def _patience(self) -> float:
        """Until it is SUSPECT, then a heartbeat at a time."""
        left = self.heard_at + self.config.suspect_after_s - time.monotonic()
        return left + 0.001 if left > 0 else self.config.heartbeat_s

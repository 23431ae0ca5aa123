"""One incarnation of a worker as a Ray actor: how it is started, asked and ended. All that `rollout` knows of Ray.

Ray restarts and repeats nothing (`max_restarts=0`, `max_task_retries=0`): it cannot know which version an engine must
have or which requests have been answered. The actor is threaded, and each kind of question has threads of its own, so
that a call is never behind a submit or a poll that waits.
"""

import pickle
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from rollout.errors import MissingDependencyError, RolloutError, WorkerDiedError, WorkerUnreachableError
from rollout.worker_config import NEEDS_RAY, WorkerConfig
from rollout.workers.host import WorkerHost
from rollout.workers.wire import Report

try:
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
except ModuleNotFoundError as error:
    raise MissingDependencyError(NEEDS_RAY) from error

GROUPS = {
    "open": "life",
    "close": "life",
    "submit": "submit",
    "cancel": "submit",  # after the submit of what it cancels
    "require_version": "submit",
    "poll": "poll",
    "call": "call",
    "snapshot": "snapshot",
    "beat": "beat",
}
"""Which threads answer which question."""
THREADS = {"life": 1, "submit": 1, "poll": 2, "call": 1, "snapshot": 1, "beat": 2}
"""One thread keeps the order of what is asked. Two where one may be taken by a question whose asker has given up, or by
a second process that watches."""

RAY_KILLS_S = 2.0
"""How long Ray may take to end a process before it is ended without Ray."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was asked for, and how the worker stood then."""

    value: Any
    report: Report


@dataclass(frozen=True, kw_only=True)
class Failure:
    """It raised."""

    error: Exception


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs."""

    pid: int
    process_started_at: float  # tells the process from a later one of the same pid; seconds since the epoch
    node_id: str


class RolloutWorker:
    """Answers with dataclasses rather than raises: what Ray makes of an exception is neither the package's own type nor
    sure to be readable."""

    def __init__(self, worker_id: str, config: WorkerConfig, incarnation: int, serve_from_version: int) -> None:
        self._name = f"{worker_id}.{incarnation}"
        self._host = WorkerHost(worker_id, config, incarnation=incarnation, serve_from_version=serve_from_version)

    def __repr__(self) -> str:
        return self._name  # before each line of its log

    def place(self) -> Place:
        process = psutil.Process()
        return Place(
            pid=process.pid,
            process_started_at=process.create_time(),
            node_id=ray.get_runtime_context().get_node_id(),
        )

    def ask(self, question: str, *args: Any) -> Answer | Failure:
        try:
            value = getattr(self._host, question)(*args)
            return Answer(value=value, report=self._host.report())
        except BaseException as error:  # SystemExit too: it would end the process
            return Failure(error=portable(error))


def portable(error: BaseException) -> Exception:
    """The error with its traceback as a note; a RolloutError that tells of it where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    copy: Any
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's own pickling may raise anything
        copy = RolloutError(f"{type(error).__name__}: {error}")
    if not isinstance(copy, Exception):
        copy = RolloutError(f"{type(error).__name__}: {error}")
    assert isinstance(copy, Exception)
    copy.add_note(f"In the worker:\n{trace}")
    return copy


class RemoteHost:
    """The `WorkerHost` of one incarnation, in another process. May be pickled; threads may share it."""

    def __init__(self, actor: Any, name: str, place: Place) -> None:
        self._actor = actor
        self.name = name
        self.place = place

    @classmethod
    def start(
        cls, worker_id: str, config: WorkerConfig, *, incarnation: int, serve_from_version: int
    ) -> "tuple[RemoteHost, Report]":
        """Returns once its engine runs. Raises what the engine's constructor raises, WorkerDiedError, and
        WorkerUnreachableError when there is no room for it or it takes too long; then nothing of it is left."""
        if not ray.is_initialized():
            raise RolloutError("Ray does not run in this process; call ray.init(...) before Worker.start")
        name = f"{worker_id} (incarnation {incarnation})"
        env = dict(config.env)
        if config.num_threads is not None:
            env.setdefault("OMP_NUM_THREADS", str(config.num_threads))
        remote: Any = ray.remote  # its stubs do not know of concurrency groups
        kind = remote(concurrency_groups=THREADS, max_restarts=0, max_task_retries=0)(RolloutWorker)
        actor = kind.options(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            scheduling_strategy=config.scheduling,
            runtime_env={"env_vars": env} if env else {},
            name=f"rollsync-{worker_id}.{incarnation}-{secrets.token_hex(3)}",  # no two of a cluster may be called the same
        ).remote(worker_id, config, incarnation, serve_from_version)
        deadline = time.monotonic() + config.start_timeout_s
        try:
            with asking(name, "start", config.start_timeout_s):
                place = ray.get(actor.place.remote(), timeout=config.start_timeout_s)
            host = cls(actor, name, place)
            answer = opened(host.ask("open", limit_s=max(deadline - time.monotonic(), 0.1)))
        except BaseException:
            ray.kill(actor)
            raise
        return host, answer.report

    def ask(self, question: str, *args: Any, limit_s: float) -> Answer | Failure:
        """Asks and waits. Raises WorkerDiedError, and WorkerUnreachableError after `limit_s`."""
        with asking(self.name, question, limit_s):
            reply: Answer | Failure = ray.get(self.send(question, *args), timeout=limit_s)
        return reply

    def send(self, question: str, *args: Any) -> Any:
        """Asks; the ObjectRef has the reply, for `wait` or `ask_later`."""
        check_running(self.name, question)
        return self._actor.ask.options(concurrency_group=GROUPS[question]).remote(question, *args)

    def wait(self, question: str, ref: Any, limit_s: float) -> Answer | Failure | None:
        """The answer to what was sent, None if it has not come within `limit_s`. Raises as `ask` otherwise."""
        check_running(self.name, question)
        with asking(self.name, question, limit_s):
            try:
                reply: Answer | Failure = ray.get(ref, timeout=limit_s)
            except GetTimeoutError:
                return None
        return reply

    def ask_later(self, question: str, *args: Any, on_answer: Callable[[Callable[[], Answer | Failure]], None]) -> None:
        """Asks and returns. `on_answer` is called, on a thread of Ray's that must not be kept, with a function that
        returns the answer or raises, as `ask` does."""
        future: Future[Any] = self.send(question, *args).future()
        future.add_done_callback(lambda done: on_answer(partial(self._answer_of, question, done)))

    def _answer_of(self, question: str, done: "Future[Any]") -> Answer | Failure:
        with asking(self.name, question, 0):
            reply: Answer | Failure = done.result()
        return reply

    def is_local(self) -> bool:
        """Whether its process is on the node of this one."""
        return bool(self.place.node_id == ray.get_runtime_context().get_node_id())

    def kill_later(self) -> None:
        """Asks for the end of its process."""
        if ray.is_initialized():
            ray.kill(self._actor)

    def kill(self, timeout_s: float) -> None:
        """Ends its process. WorkerUnreachableError when it is still there after `timeout_s`, where that can be seen: on this
        node."""
        if not ray.is_initialized():
            return  # its driver has gone, and with it the process
        ray.kill(self._actor)
        if not self.is_local():
            return
        try:
            process = psutil.Process(self.place.pid)
            if process.create_time() != self.place.process_started_at:
                return
            try:
                process.wait(min(timeout_s / 2, RAY_KILLS_S))
            except psutil.TimeoutExpired:
                process.kill()  # Ray asks a stopped process, which does not hear, before it ends it
                process.wait(timeout_s / 2)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired as error:
            raise WorkerUnreachableError(
                f"worker {self.name}: its process {self.place.pid} has not ended within {timeout_s:g} s of being killed"
            ) from error


def check_running(name: str, phase: str) -> None:
    """Ray starts itself, on the whole machine, when it is used after a shutdown: WorkerDiedError instead."""
    if not ray.is_initialized():
        raise WorkerDiedError(f"worker {name} has ended with Ray, which was shut down ({phase})")


@contextmanager
def asking(name: str, phase: str, limit_s: float) -> Iterator[None]:
    """A block in which Ray's errors become the package's, with Ray's as the cause."""
    try:
        yield
    except RayError as error:
        raise translated(error, name, phase, limit_s) from error


def translated(error: RayError, name: str, phase: str, limit_s: float) -> RolloutError:
    """What it means, in the package's own types."""
    if isinstance(error, GetTimeoutError):
        return WorkerUnreachableError(
            f"worker {name} did not answer {phase} within {limit_s:g} s; is it overloaded or stopped?"
        )
    if isinstance(error, ActorUnavailableError):
        return WorkerUnreachableError(f"worker {name} could not be reached for {phase}: {_last_line(error)}")
    if isinstance(error, RayActorError):
        return WorkerDiedError(f"worker {name} died: {_last_line(error)} (seen by {phase})")
    if isinstance(error, RayTaskError):
        return RolloutError(f"{phase} failed on its way into or out of worker {name}: {error.cause}")
    return RolloutError(f"{phase} of worker {name} failed in Ray: {_last_line(error)}")


def opened(reply: Answer | Failure) -> Answer:
    """The answer, or what the worker raised."""
    if isinstance(reply, Failure):
        raise reply.error
    return reply


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # the line ends with what may have been the causes, the same for every death
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__

"""Bring a trainer's new weights into engines that keep generating."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Literal, Self, overload

import torch
from torch import Tensor

from rollout import EngineState, GenerationEngine, RolloutError, UpdateRecord
from sync.config import SyncConfig, check_seconds
from sync.errors import SyncError, SyncTimeoutError
from sync.manifest import Manifest, held_tensors
from sync.receiver import commit
from sync.report import SyncReport
from sync.source import Source, WeightSource, as_source, named_tensors
from sync.staging import Staging

logger = logging.getLogger(__name__)

ANSWER_GRACE_S = 1.0
"""How long after `timeout_s` an engine may answer. An update ends by the same deadline; cut off at that moment, its own
error, which says what it waited for, would be lost."""


class WeightSync:
    """Publishes weights to one or several engines of this process, in two steps.

    *Stage*, while generation goes on: check the source against what the engines hold and copy its tensors aside. From
    then on the trainer may change its weights. *Commit*, on each engine's control thread: pause, copy in place, move
    the version, go on. Requests in flight stay in flight and span both versions.

        with WeightSync(engine) as weight_sync:
            ...optimizer.step()...
            report = weight_sync.publish(model)

    The staging is kept between publishes: it costs the memory of one set of weights, in the engines' dtype.
    """

    def __init__(
        self, targets: GenerationEngine | Sequence[GenerationEngine], *, config: SyncConfig | None = None
    ) -> None:
        engines = list(targets) if isinstance(targets, Sequence) else [targets]
        if not engines:
            raise SyncError("targets must hold at least one engine, got none")
        self._targets = {f"engine[{index}]": engine for index, engine in enumerate(engines)}
        self._config = config if config is not None else SyncConfig()
        self._turn = Lock()  # held from the start of a stage until its commit has ended: both use the staging
        self._stagings: dict[Manifest, Staging] = {}
        self._staged_version: int | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")
        self._closed = False

    @overload
    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: Literal[True] = True
    ) -> SyncReport: ...

    @overload
    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: Literal[False]
    ) -> Future[SyncReport]: ...

    def publish(
        self, source: Source, *, version: int | None = None, timeout_s: float = 120.0, wait: bool = True
    ) -> SyncReport | Future[SyncReport]:
        """Give every engine the weights of `source` as `version`; None: one above the newest that any engine holds.

        `wait=False` returns once the source is staged, with a future of the report. `timeout_s` bounds the whole: the
        turn (a publish before this one may be committing), staging, and the commits; a source's own gathering is
        bounded between two tensors only.

        The same version again with equal bytes reaches the engines that missed it and is harmless for the others.

        Raises, with every engine unchanged: ManifestError if source and engine do not hold the same tensors; SyncError
        for a version that is not new, for a version published before with other bytes, and for an engine that shares
        its Parameters with the source; SyncTimeoutError. Raises SyncError or SyncTimeoutError, from the cause, if no
        engine took the version; the future carries that error when `wait=False`. If only some failed, the report names
        them. An engine that failed in the middle of its copies is fenced until a later publish succeeds.
        """
        check_seconds("timeout_s", timeout_s)
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise SyncError(f"version must be an integer, or None for the next one, got {version!r}")
        for name, engine in self._targets.items():
            if engine.is_inside_update:
                raise SyncError(f"publish() inside {name}'s update() would wait for itself; publish after the block")
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise SyncTimeoutError(
                f"waiting for the publish before this one to {', '.join(self._targets)} took longer than {timeout_s} s"
            )
        with ExitStack() as unless_committing:
            unless_committing.callback(self._turn.release)
            if self._closed:
                raise SyncError("this WeightSync is closed; make a new one")
            staged = self._stage(source, version, deadline, timeout_s)
            future = self._committer.submit(self._commit, staged, deadline, timeout_s)
            unless_committing.pop_all()
            # also when the caller cancels the future before the commit begins
            future.add_done_callback(lambda _: self._turn.release())
        return future.result() if wait else future

    def close(self, *, timeout_s: float = 120.0) -> None:
        """Wait for a publish under way and free the staging. Closing twice is harmless. Raises SyncTimeoutError."""
        check_seconds("timeout_s", timeout_s)
        if not self._turn.acquire(timeout=timeout_s):
            raise SyncTimeoutError(f"closing waited {timeout_s} s for a publish to {', '.join(self._targets)} to end")
        self._closed = True
        self._drop_staging()
        self._turn.release()
        self._committer.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self, source: Source, version: int | None, deadline: float, timeout_s: float) -> "_Staged":
        began = time.perf_counter()
        newest = max(engine.version for engine in self._targets.values())
        if version is None:
            version = newest + 1
        again = version <= newest
        if again and version != self._staged_version:
            raise SyncError(
                f"version must be greater than {newest}, which an engine holds, got {version}; leave it out for the "
                "next one"
            )
        stagings = self._stagings_of_targets()
        offer = as_source(source)
        if isinstance(offer, WeightSource):
            specs = offer.specs()
            for manifest in self._stagings:
                manifest.check(specs)
            offer = offer.tensors()
        if not again:
            self._staged_version = None
            for staging in self._stagings.values():
                staging.clear()
        self._fill(offer, version, deadline, timeout_s)
        self._staged_version = version
        behind = {
            name: staging
            for name, staging in stagings.items()
            if not again or self._targets[name].version < version or self._targets[name].state == EngineState.FENCED
        }
        largest = max(self._stagings.values(), key=lambda staging: staging.num_bytes)
        return _Staged(
            version=version,
            behind=behind,
            num_bytes=largest.num_bytes,
            num_tensors=len(largest.buffers),
            stage_s=time.perf_counter() - began,
        )

    def _fill(self, offer: Iterable[tuple[str, Tensor]], version: int, deadline: float, timeout_s: float) -> None:
        """Put all that is offered into each staging."""
        addresses = self._addresses()
        for name, tensor in named_tensors(offer):
            if (tensor.device, tensor.data_ptr()) in addresses and tensor.numel():
                raise SyncError(
                    f"an engine runs on the very tensor that the source offers as {name}, so there is nothing to "
                    "publish; change it in place instead: `with engine.update(): optimizer.step()`, or give the engine "
                    "weights of its own with copy_weights=True"
                )
            if time.monotonic() > deadline:
                raise SyncTimeoutError(f"staging version {version} took longer than {timeout_s} s, at {name}")
            for staging in self._stagings.values():
                staging.put(name, tensor)
        for staging in self._stagings.values():
            staging.seal()

    def _stagings_of_targets(self) -> dict[str, Staging]:
        """The staging of each target; engines that hold the same tensors share one."""
        manifests = {name: Manifest.of(engine.model) for name, engine in self._targets.items()}
        self._stagings = {
            manifest: self._stagings[manifest] if manifest in self._stagings else Staging(manifest)
            for manifest in manifests.values()
        }
        return {name: self._stagings[manifest] for name, manifest in manifests.items()}

    def _addresses(self) -> set[tuple[torch.device, int]]:
        """Where the engines' own tensors lie."""
        return {
            (held.tensor.device, held.tensor.data_ptr())
            for engine in self._targets.values()
            for held in held_tensors(engine.model)
        }

    def _commit(self, staged: "_Staged", deadline: float, timeout_s: float) -> SyncReport:
        calls: dict[str, Future[UpdateRecord]] = {}
        failures: dict[str, BaseException] = {}
        for name, staging in staged.behind.items():
            try:
                calls[name] = self._targets[name].call(
                    commit, staging, staged.version, deadline, self._config.update_timeout_s
                )
            except RolloutError as refused:
                failures[name] = refused
        wait_for(calls.values(), timeout=max(0.0, deadline + ANSWER_GRACE_S - time.monotonic()))
        records: list[UpdateRecord] = []
        for name, call in calls.items():
            if not call.done():
                failures[name] = SyncTimeoutError(f"its commit of version {staged.version} exceeded {timeout_s} s")
                if not call.cancel():
                    # It is still copying: were the buffers used again, the engine would get a mixture.
                    self._drop_staging()
            elif (cause := _failure_of(call)) is not None:
                failures[name] = cause
            else:
                records.append(call.result())
        for name, cause in failures.items():
            logger.warning("%s did not take version %d: %s", name, staged.version, cause)
        if len(failures) == len(self._targets):
            first = next(iter(failures.values()))
            kind = SyncTimeoutError if isinstance(first, TimeoutError) else SyncError
            causes = "; ".join(f"{name}: {cause}" for name, cause in failures.items())
            raise kind(f"no engine took version {staged.version}: {causes}") from first
        return SyncReport(
            version=staged.version,
            num_bytes=staged.num_bytes,
            num_tensors=staged.num_tensors,
            stage_s=staged.stage_s,
            pause_wait_s=max((record.wait_s for record in records), default=0.0),
            commit_s=max((record.held_s for record in records), default=0.0),
            straddlers=sum(record.straddlers for record in records),
            fenced=tuple(failures),
            transport="in_process",
        )

    def _drop_staging(self) -> None:
        self._stagings = {}
        self._staged_version = None


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """One complete set of weights, and the targets that lack it."""

    version: int
    behind: Mapping[str, Staging]
    num_bytes: int
    num_tensors: int
    stage_s: float


def _failure_of(call: Future[UpdateRecord]) -> BaseException | None:
    if call.cancelled():
        return SyncError("the engine stopped before it came to the commit")
    return call.exception()

"""`GenerationEngine`: one model that keeps generating while its weights change."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.config import EngineConfig
from rollout.engine_loop import STOP_TIMEOUT_S, EngineLoop
from rollout.errors import InvalidRequestError, PauseTimeoutError
from rollout.manager import RolloutManager
from rollout.model.shell import build_shell
from rollout.requests import checks
from rollout.requests.request_methods import RequestMethods
from rollout.status import EngineState, EngineStats, UpdateRecord
from rollout.types import Rollout

log = logging.getLogger("rollsync")

P = ParamSpec("P")
R = TypeVar("R")

SNAPSHOT_TIMEOUT_S = 30.0


class GenerationEngine(RequestMethods):
    """Generates with a transformers model, and takes new weights without stopping.

        with GenerationEngine(model) as engine:
            future = engine.submit(prompt_ids, SamplingParams(max_new_tokens=64))
            with engine.update():
                optimizer.step()
            rollout = future.result()

    The model is never altered: the engine runs a module of its own over the model's Parameters, so trainer and engine may
    run forward and backward at once. With `copy_weights=True` it has Parameters of its own (see `sync.WeightSync`).
    Sizes that cannot work and models that cannot be hosted raise InvalidRequestError here, not later.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        copy_weights: bool = False,
        tokenizer: Any = None,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self.tokenizer = tokenizer
        self._model = build_shell(model, copy_weights=copy_weights)
        self._owns_weights = copy_weights
        self._loop = EngineLoop(self._model, self.config, tokenizer)
        self._life = self._loop.life
        self._tracker = self._loop.tracker
        self._control = self._loop.control
        self._updater = self._loop.updater
        self._limits = self._loop.manager.limits

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        tokenizer: Any = None,
    ) -> Self:
        """An engine over a model loaded from a hub name or a folder, in its own dtype unless one is given, on the GPU if
        there is one unless a device is given. Its tokenizer, if it has one, is loaded too, unless one is given. Remote code is never
        executed."""
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype if dtype is not None else "auto")
        model.to(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        if tokenizer is None:
            try:
                tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            except (OSError, ValueError):
                log.info("%s has no tokenizer; only stop strings need one", name_or_path)
        # A loader's parameters may be a private mapping of the file, in which the first write is 20 times slower.
        return cls(model, config, copy_weights=True, tokenizer=tokenizer)

    # -------------------------------------------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Starts generating. `with engine:` does this and the stop."""
        self._loop.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends generation after the step in progress. What is in flight resolves with its partial rollout (ABORT). Safe
        to call again, after a death, and from any thread but one inside `update()`; whoever calls it waits for the end."""
        self._loop.stop(timeout_s)

    def restart(self) -> None:
        """Brings an engine back whose generation loop died, with an empty KV cache and at the same version. What was in
        flight has ended; submit it again, with `resume_from` to go on where it was. One that was fenced when it died still
        is: an update must succeed first."""
        self._loop.restart()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -------------------------------------------------------------------------------------------- weights and state

    def update(
        self, version: int | None = None, timeout_s: float = 30.0, *, remap: bool = False
    ) -> AbstractContextManager[nn.Module]:
        """The live update. Inside `with engine.update() as model:` generation stands still between two steps; change
        `model`'s parameters in place. On leaving, `version` (None: the next one) is the engine's, and requests in flight
        go on with their KV cache.

        One writer at a time; others wait. `timeout_s` limits the wait for the pause (PauseTimeoutError) and, separately,
        the body: one that overruns it fences the engine and ends the requests in flight (ERROR, with what they had).
        After an exception in the body the engine is FENCED: it runs nothing until an update succeeds, then what was in
        flight goes on. Only that one may be to the version that the engine has already, with the weights that it had. Parameters must
        stay where they are: a replaced or re-pointed one fences the engine too.

        `remap=True` lets the body re-point them (`parameter.data = tensor` of the same shape and dtype), where nothing
        else holds their addresses (see `can_remap`); InvalidRequestError elsewhere.
        """
        self._life.check(EngineState.RUNNING, EngineState.FENCED)
        if remap and not self.can_remap:
            raise InvalidRequestError(
                "this engine's parameters cannot be re-pointed: another model shares them (make the engine with "
                "copy_weights=True), or captured graphs hold their addresses; write into them in place"
            )
        return self._updater.update(version, checks.check_limit(timeout_s), remap)

    def call(
        self, fn: Callable[Concatenate["GenerationEngine", P], R], *args: P.args, **kwargs: P.kwargs
    ) -> "Future[R]":
        """Runs `fn(engine, *args)` on the engine's control thread, after what is queued there; the future has its
        result. `fn` may use `update()`."""
        self._life.check(EngineState.RUNNING, EngineState.FENCED, EngineState.DEAD)
        return self._control.submit(lambda: fn(self, *args, **kwargs))

    def snapshot(self) -> list[Rollout]:
        """The partial rollouts in flight at one consistent point, oldest first; their finish_reason is None. Pauses for
        the moment it takes."""
        self._updater.refuse_inside("snapshot()")
        self._life.check(EngineState.RUNNING, EngineState.FENCED)

        def take() -> list[Rollout]:
            with self._loop.manager.pause_within(SNAPSHOT_TIMEOUT_S):
                return self._tracker.snapshot(self._loop.manager.outputs())

        if self._control.is_current():
            return take()
        snapshot: Future[list[Rollout]] = Future()
        try:
            self._control.submit_to(snapshot, take)
            return snapshot.result(2 * SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            raise PauseTimeoutError(
                f"the snapshot was not taken within {2 * SNAPSHOT_TIMEOUT_S:g} s: an update or call is in progress"
            ) from None
        finally:
            snapshot.cancel()  # one that nobody waits for any more is not to be paused for

    @property
    def version(self) -> int:
        """The policy version that tokens are sampled under now; 0 before the first update."""
        return self._tracker.version

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._life.state

    @property
    def can_remap(self) -> bool:
        """Whether an update may re-point the parameters: they are the engine's own, on a CPU, and no graph was captured."""
        return self._owns_weights and self._model.device.type == "cpu" and not self._loop.manager.uses_graphs

    @property
    def is_inside_update(self) -> bool:
        """Whether the calling thread is inside this engine's `update()`, where waiting for the engine would never end."""
        return self._updater.is_inside()

    @property
    def is_control_thread(self) -> bool:
        """Whether the calling thread is the one on which `call` runs functions, where waiting for a call would never end."""
        return self._control.is_current()

    @property
    def last_update(self) -> UpdateRecord | None:
        """How the last successful update went."""
        return self._loop.last_update

    @property
    def model(self) -> PreTrainedModel:
        """The engine's own module over the weights. Change them only inside `update()`."""
        return self._model

    @property
    def manager(self) -> RolloutManager:
        """The ContinuousBatchingManager, for what upstream documents."""
        return self._loop.manager

    def stats(self) -> EngineStats:
        """Numbers of this moment; cheap enough to read each second."""
        handed, backlog = self._tracker.counts()
        active, _ = self._loop.manager.counts()
        return EngineStats(
            state=self._life.state,
            version=self.version,
            active=active,
            waiting=backlog + max(handed - active, 0),
            finished=self._tracker.finished,
            generated_tokens=self._tracker.generated_tokens,
            tokens_per_s=self._tracker.tokens_per_s(),
            kv_used=self._loop.manager.kv_used(),
            preemptions=self._tracker.preemptions,
            prefix_hits=self._loop.meters.prefix_hits,
            prefix_hit_tokens=self._loop.meters.prefix_hit_tokens,
            step_times=self._loop.meters.step_times(),
            pause_waits=self._loop.meters.pause_waits(),
            updates=self._loop.num_updates,
            last_update=self._loop.last_update,
            fence=self._life.fenced_for,
        )

    # ------------------------------------------------------------------------------------------------------ inside

    def _check_running(self) -> None:
        self._life.check(EngineState.RUNNING)

    def _refuse_inside_update(self, what: str) -> None:
        self._updater.refuse_inside(what)

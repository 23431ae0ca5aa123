"""`GenerationEngine`: one model that keeps generating while its weights change."""

import atexit
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, PreTrainedModel

from rollout.config import EngineConfig
from rollout.control import ControlThread
from rollout.errors import (
    EngineDeadError,
    EngineFencedError,
    EngineStateError,
    InvalidRequestError,
    PauseTimeoutError,
)
from rollout.manager import RolloutManager, host
from rollout.meters import Meters
from rollout.model.shell import WeightWatch, build_shell
from rollout.requests import checks
from rollout.requests.delivery import RolloutFuture, TokenStream
from rollout.requests.inflight import InFlight
from rollout.requests.submission import check_submission
from rollout.requests.tracker import RequestTracker
from rollout.sizing import upstream_settings
from rollout.status import EngineState, EngineStats, UpdateRecord
from rollout.types import FinishReason, Rollout, SamplingParams
from rollout.update import Updater

log = logging.getLogger("rollsync")

P = ParamSpec("P")
R = TypeVar("R")

STOP_TIMEOUT_S = 30.0
SNAPSHOT_TIMEOUT_S = 30.0
UPSTREAM_MAX_REQUESTS = 1024


class GenerationEngine:
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
        self._state = EngineState.CREATED
        self._reason: str | None = None  # of FENCED
        self._error: BaseException | None = None  # of DEAD
        self._was_started = False
        self._num_updates = 0
        self._last_update: UpdateRecord | None = None
        self._model = build_shell(model, copy_weights=copy_weights)
        self._owns_weights = copy_weights
        self._watch = WeightWatch(self._model)
        upstream_config, paged = upstream_settings(self.config, self._model)
        # The listener exists before the manager that it listens to, which exists before the sizes are known.
        self._tracker = RequestTracker(
            max_running=upstream_config.max_requests_per_batch or UPSTREAM_MAX_REQUESTS,
            max_waiting=self.config.max_waiting,
            weights_changed=self._outside_change,
            on_loss=self._lose,
            on_death=self._on_death,
            on_exit=self._on_exit,
        )
        if tokenizer is not None:
            self._tracker.decode = self._decode
        self._meters = Meters()
        self._control = ControlThread()
        self._num_blocks = upstream_config.num_blocks
        self._manager = self._make_manager(upstream_config, paged)
        self._tracker.runner = self._manager
        self._limits = self._manager.limits
        self._updater = Updater(
            model=self._model,
            manager=self._manager,
            tracker=self._tracker,
            watch=self._watch,
            control=self._control,
            check=lambda: self._check(EngineState.RUNNING, EngineState.FENCED),
            fence=self._fence,
            lose=self._lose,
            unfence=self._unfence,
            refresh_kv=self.config.kv_at_update == "refresh",
        )

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
        with self._tracker.lock:  # a stop or update on another thread finds it started, or not
            self._check(EngineState.CREATED)
            if not self._was_started:
                # later, what has changed since the last session is a change outside update()
                self._watch.record()
                self._control.start()
                self._tracker.start()
            self._manager.launch()
            self._was_started, self._tracker.stopping = True, False
            self._state = EngineState.RUNNING if self._reason is None else EngineState.FENCED
        _running.add(self)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends generation after the step in progress. What is in flight resolves with its partial rollout (ABORT). Safe
        to call again, after a death, and from any thread but one inside `update()`; whoever calls it waits for the end."""
        self._updater.refuse_inside("stop()")
        timeout_s = checks.check_limit(timeout_s)
        with self._tracker.lock:
            again = self._state == EngineState.STOPPED
            self._state = EngineState.STOPPED
            self._tracker.stopping = True
        if again and (self._control.is_current() or self._tracker.is_delivering()):
            return  # the stop under way waits for this very thread
        _running.discard(self)
        self._tracker.wake_waiting()
        # nothing more is run, so that an update that is still in progress cannot let mixed weights loose
        self._manager.hold()
        if not self._control.stop(timeout_s):
            log.warning("an update or call was still running %.3g s after stop(); its thread is left behind", timeout_s)
        if not self._manager.shutdown(timeout_s):
            log.warning("the generation loop did not end within %.3g s of stop(); its thread is left behind", timeout_s)
        self._tracker.end_all(FinishReason.ABORT, "the engine was stopped", {})
        self._tracker.close(timeout_s)

    def restart(self) -> None:
        """Brings an engine back whose generation loop died, with an empty KV cache and at the same version. What was in
        flight has ended; submit it again, with `resume_from` to go on where it was. One that was fenced when it died still
        is: an update must succeed first."""
        self._check(EngineState.DEAD)
        # not under the lock, which the dying loop needs for its last words
        if not self._manager.shutdown(STOP_TIMEOUT_S):
            raise EngineStateError("the dead loop's thread has not ended yet; try again")
        with self._tracker.lock:
            self._check(EngineState.DEAD)  # nobody else has restarted or stopped it in the meantime
            self._manager.free()  # two caches at once may be more memory than there is
            config, paged = upstream_settings(self.config, self._model)
            # sized once: what was accepted before must fit again, however much memory is left now
            config.num_blocks = self._num_blocks
            self._manager = self._updater.manager = self._make_manager(config, paged)
            self._tracker.runner = self._manager
            if self._reason is not None:
                self._manager.hold()
            self._manager.launch()
            self._state = EngineState.RUNNING if self._reason is None else EngineState.FENCED
            self._error = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        group_id: str | None = None,
        prompt_id: str | None = None,
        sample_index: int = 0,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume_from: Rollout | None = None,
    ) -> RolloutFuture:
        """Queues one request; its future always resolves with a Rollout, whatever happens.

        `timeout_s` counts from now, waiting included; the rollout then ends with what it has (TIMEOUT). `request_id` must
        not be in flight already; None makes one up. Raises InvalidRequestError for what cannot work, EngineStateError
        when the engine is not running.

        `resume_from`: a partial rollout of this prompt, from here or elsewhere. The new one goes on after its tokens, with
        what is left of `max_new_tokens`, its spans and log-probs joined, and with a seed the same noise; its group_id,
        prompt_id, sample index and metadata are taken over where they are not given (a sample index of 0 counts as not
        given). Refused if its newest token is of a version that this engine does not have yet.
        """
        return self._submit(
            prompt_ids,
            params,
            size=1,
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            timeout_s=timeout_s,
            resume_from=resume_from,
        )[0]

    def stream(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> TokenStream:
        """Queues one request and gives its tokens as they come: `for token_id in engine.stream(prompt_ids): ...`. The
        iteration ends when the request does, however that is; `stream.result()` is its rollout. Leave early with
        `stream.close()` or a `with` block."""
        stream = TokenStream()
        (stream.future,) = self._submit(
            prompt_ids, params, size=1, request_id=request_id, timeout_s=timeout_s, stream=stream
        )
        return stream

    def submit_group(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        size: int,
        request_id: str | None = None,
        group_id: str | None = None,
        prompt_id: str | None = None,
        sample_index: int = 0,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutFuture]:
        """Queues `size` samples of one prompt, which is prefilled once. Like `submit`, except that the requests are named
        `request_id-0`, `request_id-1` and so on, their sample indices count up from `sample_index`, and their group_id, if
        none is given, is `request_id` or made up. Each can be cancelled alone.

        Requests start in the order in which they came: a group waits until all of it can run at once (one of more than
        `max_requests` samples: until nothing else runs), and what came after it waits behind it, so that no number of
        single requests keeps it from starting."""
        return self._submit(
            prompt_ids,
            params,
            size=checks.check_size(size),
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            timeout_s=timeout_s,
            is_group=True,
        )

    def cancel(self, request_id: str) -> None:
        """Ends a request: its future resolves with its partial rollout (ABORT). Raises InvalidRequestError if no request
        of that id is in flight, because it has ended or never was."""
        if not self._tracker.cancel(request_id):
            raise InvalidRequestError(f"no request {request_id!r} is in flight: it has ended, or was never submitted")

    def generate(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        params: SamplingParams | None = None,
        *,
        progress_bar: bool = False,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """One rollout for each prompt, in their order. If one prompt cannot work, none is submitted. Each one's sample index
        is its position, so that with a seed equal prompts draw different noise."""
        self._updater.refuse_inside("generate()")
        if self._tracker.is_delivering():
            raise EngineStateError("generate() in a future's callback would wait for itself; use submit() there")
        params = checks.check_params(params)
        prompts = checks.check_prompts(prompts)
        for number, prompt in enumerate(prompts):
            try:
                checks.check_prompt(prompt, params, self._limits)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {number}: {error}") from None
        futures: list[RolloutFuture] = []
        try:
            for number, prompt in enumerate(prompts):
                futures.append(self.submit(prompt, params, sample_index=number, timeout_s=timeout_s))
            shown = tqdm(futures, desc="rollouts", unit="rollout") if progress_bar else futures
            return [future.result() for future in shown]
        except BaseException:
            # an interrupted caller gets no results: what it asked for must not go on in its name
            for future in futures:
                future.cancel()
            raise

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
        flight goes on. Parameters must stay where they are: a replaced or re-pointed one fences the engine too.

        `remap=True` lets the body re-point them (`parameter.data = tensor` of the same shape and dtype), where nothing
        else holds their addresses (see `can_remap`); InvalidRequestError elsewhere.
        """
        self._check(EngineState.RUNNING, EngineState.FENCED)
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
        self._check(EngineState.RUNNING, EngineState.FENCED, EngineState.DEAD)
        return self._control.submit(lambda: fn(self, *args, **kwargs))

    def snapshot(self) -> list[Rollout]:
        """The partial rollouts in flight at one consistent point, oldest first; their finish_reason is None. Pauses for
        the moment it takes."""
        self._updater.refuse_inside("snapshot()")
        self._check(EngineState.RUNNING, EngineState.FENCED)

        def take() -> list[Rollout]:
            with self._manager.pause_within(SNAPSHOT_TIMEOUT_S):
                return self._tracker.snapshot(self._manager.outputs())

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
        return self._state

    @property
    def can_remap(self) -> bool:
        """Whether an update may re-point the parameters: they are the engine's own, on a CPU, and no graph was captured."""
        return self._owns_weights and self._model.device.type == "cpu" and not self._manager.uses_graphs

    @property
    def is_inside_update(self) -> bool:
        """Whether the calling thread is inside this engine's `update()`, where waiting for the engine would never end."""
        return self._updater.is_inside()

    @property
    def last_update(self) -> UpdateRecord | None:
        """How the last successful update went."""
        return self._last_update

    @property
    def model(self) -> PreTrainedModel:
        """The engine's own module over the weights. Change them only inside `update()`."""
        return self._model

    @property
    def manager(self) -> RolloutManager:
        """The ContinuousBatchingManager, for what upstream documents."""
        return self._manager

    def stats(self) -> EngineStats:
        """Numbers of this moment; cheap enough to read each second."""
        handed, backlog = self._tracker.counts()
        active, _ = self._manager.counts()
        return EngineStats(
            state=self._state,
            version=self.version,
            active=active,
            waiting=backlog + max(handed - active, 0),
            finished=self._tracker.finished,
            generated_tokens=self._tracker.generated_tokens,
            tokens_per_s=self._tracker.tokens_per_s(),
            kv_used=self._manager.kv_used(),
            preemptions=self._tracker.preemptions,
            prefix_hits=self._meters.prefix_hits,
            prefix_hit_tokens=self._meters.prefix_hit_tokens,
            step_times=self._meters.step_times(),
            pause_waits=self._meters.pause_waits(),
            updates=self._num_updates,
            last_update=self._last_update,
        )

    # ------------------------------------------------------------------------------------------------------ inside

    def _submit(
        self,
        prompt_ids: Any,
        params: Any,
        *,
        size: int,
        request_id: Any = None,
        group_id: Any = None,
        prompt_id: Any = None,
        sample_index: Any = 0,
        metadata: Any = None,
        timeout_s: Any = None,
        is_group: bool = False,
        resume_from: Any = None,
        stream: TokenStream | None = None,
    ) -> list[RolloutFuture]:
        submission = check_submission(
            prompt_ids,
            params,
            limits=self._limits,
            tokenizer=self.tokenizer,
            size=size,
            request_id=request_id,
            group_id=group_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            metadata=metadata,
            is_group=is_group,
            resume_from=resume_from,
            stream=stream,
        )
        timeout_s = checks.check_timeout(timeout_s)
        group = self._tracker.add(
            lambda key, version: submission.requests(key, version, self._abort),
            lambda: self._check(EngineState.RUNNING),
            may_wait=lambda: self._updater.refuse_inside("submit() of more than max_waiting"),
            timeout_s=timeout_s,
        )
        return [request.future for request in group]

    def _abort(self, request: InFlight) -> bool:
        return self._tracker.end_early(request, FinishReason.ABORT)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _make_manager(self, config: ContinuousBatchingConfig, paged: bool) -> RolloutManager:
        return host(
            self._model,
            config,
            self._tracker,
            _Owner(self.start, self._on_manager_stop, self._refuse_inside_update),
            self._meters,
            paged_attention=paged,
            autocast_dtype=self.config.autocast_dtype,
            num_threads=self.config.num_threads,
            decode=None if self.tokenizer is None else self._decode,
        )

    def _check(self, *allowed: EngineState) -> None:
        """Raises what fits the state, unless it is one of `allowed`."""
        if self._state in allowed:
            return
        match self._state:
            case EngineState.CREATED:
                raise EngineStateError("the engine is not started; use `with engine:` or engine.start()")
            case EngineState.RUNNING:
                raise EngineStateError("the engine is running already")
            case EngineState.FENCED:
                raise EngineFencedError(f"the engine is fenced: {self._reason}")
            case EngineState.DEAD:
                raise EngineDeadError(
                    f"the generation loop died: {self._error!r}; engine.restart() brings it back"
                ) from self._error
            case EngineState.STOPPED:
                raise EngineStateError("the engine is stopped; make a new one")

    def _fence(self, reason: str) -> None:
        with self._tracker.lock:
            if self._state == EngineState.RUNNING:
                self._state = EngineState.FENCED
            self._reason = f"{reason}. It serves nothing until an update succeeds: with engine.update(): ..."
            self._manager.hold()
        log.error("the engine is fenced: %s", reason)
        self._tracker.wake_waiting()

    def _outside_change(self) -> str | None:
        name = self._watch.changed()
        if name is None:
            return None
        return (
            f"{name} was changed outside update() while requests were running on it. Change shared weights only inside "
            "`with engine.update(): optimizer.step()`, or give the engine weights of its own (copy_weights=True) and "
            "publish to it with sync.WeightSync"
        )

    def _lose(self, reason: str) -> None:
        # on the loop's own thread, or while it is parked: the outputs hold still
        self._fence(reason)
        self._tracker.end_all(FinishReason.ERROR, f"the engine was fenced: {reason}", self._manager.outputs())

    def _unfence(self, record: UpdateRecord) -> None:
        with self._tracker.lock:
            self._last_update = record
            self._num_updates += 1
            if self._state in (EngineState.RUNNING, EngineState.FENCED):
                self._state, self._reason = EngineState.RUNNING, None
                self._manager.release()

    def _refuse_inside_update(self, what: str) -> None:
        self._updater.refuse_inside(what)

    def _on_manager_stop(self, again: bool, abort: bool) -> None:
        with self._tracker.lock:
            if self._state in (EngineState.RUNNING, EngineState.FENCED):
                self._tracker.stopping = abort or self._state == EngineState.FENCED
                self._state = EngineState.CREATED if again else EngineState.STOPPED
            elif self._state == EngineState.CREATED and not again:
                self._state = EngineState.STOPPED
        self._tracker.wake_waiting()

    def _on_death(self, error: BaseException | None) -> None:
        # the loop's thread, before any request resolves: whoever sees its ERROR sees the engine's state too
        with self._tracker.lock:
            stopped = self._state == EngineState.CREATED and error is None  # by manager.stop, kept for another session
            if not stopped and self._state not in (EngineState.STOPPED, EngineState.DEAD):
                self._state, self._error = EngineState.DEAD, error

    def _on_exit(self, error: BaseException | None) -> None:
        # the loop's thread, its last act
        self._on_death(error)
        with self._tracker.lock:
            stopped = self._tracker.stopping or self._state in (EngineState.CREATED, EngineState.STOPPED)
        reason = FinishReason.ABORT if stopped else FinishReason.ERROR
        # what it died of first, not what its own error handling then raised
        why = "the engine was stopped" if stopped else f"the generation loop died: {self._error!r}"
        self._tracker.end_all(reason, why, self._manager.outputs())
        self._tracker.wake_waiting()


@dataclass(frozen=True)
class _Owner:
    """The engine, as the manager sees it."""

    start: Callable[[], None]
    on_stop: Callable[[bool, bool], None]
    refuse_inside: Callable[[str], None]

    def refuse_inside_update(self, what: str) -> None:
        self.refuse_inside(what)

    def stopping(self, *, again: bool, abort: bool) -> None:
        self.on_stop(again, abort)


_running: "weakref.WeakSet[GenerationEngine]" = weakref.WeakSet()


@atexit.register
def _stop_running() -> None:
    # A script that forgets to stop: its daemon threads would otherwise be cut off inside native code.
    for engine in list(_running):
        engine.stop()

"""The continuous-batching manager of transformers, hardened: the only file that touches its private attributes.

`RolloutManager` is a `ContinuousBatchingManager` (all that upstream documents works on it) that in addition
- delivers finished, failed and cancelled requests to a listener, on the loop's thread;
- samples each request by its own parameters, without touching the process's random state;
- checks the requests of upstream's own methods as the engine checks its own, and gives each reader its own results;
- can be held: the loop idles, answering pauses and stops, and runs no forward;
- tells at a pause how many tokens of each request have been sampled, and forgets KV of older weights for new requests.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import cache as upstream_cache
from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching import scheduler as upstream_scheduler
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import ModelRunner, infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
    create_warmup_future_states,
)

from rollout import attention, requests
from rollout.errors import EngineDeadError, EngineFencedError, EngineStateError, PauseTimeoutError, RolloutError
from rollout.inflight import FORK
from rollout.kernels import Kernels, kernels
from rollout.meters import Meters
from rollout.results import RequestNames, RequestQueue, ResultQueue
from rollout.sampling import NUM_ARGUMENTS, SamplingRow, draw_uniforms, pack_rows, sample
from rollout.seams import LoopListener, Owner, Progress
from rollout.stops import UNREADABLE, find_stop
from rollout.upstream_api import ThroughManager, UpstreamRequests
from rollout.upstream_requests import check_row

log = logging.getLogger("rollsync")

TESTED_TRANSFORMERS = "5.24"
NOT_NUMBERS = "the model's logits are not numbers (NaN): are its weights?"
CANCELLED = "cancelled"


class RolloutManager(UpstreamRequests, upstream.ContinuousBatchingManager):  # type: ignore[misc]
    """See the module's docstring. One per engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ContinuousBatchingConfig,
        listener: LoopListener,
        owner: Owner,
        meters: Meters,
        *,
        paged_attention: bool,
        autocast_dtype: torch.dtype | None,
        num_threads: int | None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        check_upstream()
        generation_config = deepcopy(model.generation_config)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1
        if generation_config.max_new_tokens is None:
            # upstream's None is unbounded and ends in a dead loop when the cache is full
            generation_config.max_new_tokens = requests.DEFAULT_NEW_TOKENS
        super().__init__(model, generation_config, config)
        self.listener, self._owner, self.meters = listener, owner, meters
        self.autocast_dtype = autocast_dtype
        self.num_threads = num_threads
        self.decode = decode
        _refuse_processors(model._get_logits_processor(generation_config), drop=config.drop_unsupported_processors)
        self.logit_processor: SamplingRows = SamplingRows(config.seed)
        self.names = RequestNames()
        self.results = ResultQueue()
        self.output_router = _ListenerRouter(listener, self.names, self.results)
        self.max_queue_size = config.max_queue_size
        # ours never wait for room: a full queue would raise in the loop, which hands them over
        self.input_queue: RequestQueue = RequestQueue()
        if config.scheduler_type not in _OUR_SCHEDULERS:
            raise ValueError(f"scheduler_type must be one of {sorted(_OUR_SCHEDULERS)}, got {config.scheduler_type!r}")
        self.continuous_batching_config.scheduler_type = _OUR_SCHEDULERS[config.scheduler_type]
        if paged_attention:
            # after __init__, which refuses names it does not know, and before the cache plans its mask
            model.set_attn_implementation(attention.NAME)
        self.paged_attention = paged_attention
        self._held = threading.Event()
        # here rather than in the loop, so that sizes that cannot work fail in the caller's face
        self.batch_processor = self._create_batch_processor()
        self.limits = requests.limits_of(model, max_request_tokens=self.max_request_tokens)
        self.shares_prefixes = bool(self._use_prefix_sharing)
        for name in ("generate_batch", "init_continuous_batching"):
            # a second manager over this module would run beside this one's loop, and switch its attention
            setattr(model, name, ThroughManager(self, name))

    # ------------------------------------------------------------------------------------------------- life cycle

    def launch(self) -> None:
        """Starts the loop on a daemon thread (upstream's would keep a script that forgets to stop from exiting), never
        in inference mode (upstream copies the caller's, and a manager moved between modes dies)."""
        if self.is_running():
            raise EngineStateError(
                "the generation loop is still finishing what it had; wait for that with manager.join"
            )
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, kwargs={"use_inference_mode": False}, name="rollsync-loop", daemon=True
        )
        self._generation_thread.start()

    def shutdown(self, timeout_s: float) -> bool:
        """Stops the loop after the step it is in; what is in flight is delivered as failed. True if it has ended."""
        thread = self._generation_thread
        if thread is None:
            return True
        status = upstream.BackgroundThreadStatus
        self.background_thread_status.request_stop(status.HARD_STOP, self.distributed_helper.global_rank)
        self._wake_up_loop.set()
        self.input_queue.wake()
        thread.join(timeout_s)
        return not thread.is_alive()

    def free(self) -> None:
        """Gives the KV cache's memory back, whoever still holds a view of it; only for a loop that has ended."""
        self.batch_processor.cache.cache_tensor.untyped_storage().resize_(0)

    @contextmanager
    def pause_within(self, timeout_s: float) -> Iterator[None]:
        """Upstream's `pause()` with a limit on the wait for it. PauseTimeoutError if the step in progress does not end
        in time, EngineDeadError if the loop is gone. Must be entered and left on one thread."""
        self._refuse_on_loop("a pause")
        asked_at = time.perf_counter()
        status = self.background_thread_status
        with status._condition:
            status._pauses_requested += 1
            status._local_pauses_requested.value += 1
            self._wake_up_loop.set()
            try:
                ended = status._condition.wait_for(status._pause_predicate, timeout_s)
            except BaseException:
                # an interrupt, or a limit beyond the clock's range: a request left behind would park the loop for ever
                status._drop_pause_request()
                raise
            if not ended:
                status._drop_pause_request()
                raise PauseTimeoutError(
                    f"the step in progress did not end within {timeout_s:.3g} s, so the pause was not entered; allow "
                    "more time, or lower max_batch_tokens so that steps are shorter"
                )
            if not status._paused:
                status._drop_pause_request()
                raise EngineDeadError(
                    "the generation loop is not running"
                    if status.fatal_error is None
                    else f"the generation loop died: {status.fatal_error!r}; engine.restart() brings it back"
                ) from status.fatal_error
        self.meters.pause(time.perf_counter() - asked_at)
        try:
            yield
        finally:
            status.release_pause()

    def hold(self) -> None:
        """From the next step on, run nothing: pauses, cancels and stops are still answered. May be called anywhere."""
        self._held.set()

    def release(self) -> None:
        """Ends a hold."""
        self._held.clear()
        self._wake_up_loop.set()

    # --------------------------------------------------------------------------------------------------- requests

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        rows: Sequence[SamplingRow],
        stop: Sequence[str] = (),
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> None:
        """Queues a request that the caller has checked, with one sample for each of `rows`: the first has `request_id`, the
        others `request_id__child#0` and so on. The prompt is prefilled once. Never blocks.

        With `token_ids` and their `logprobs` it goes on from there; `max_new_tokens` counts them in. This is the form in
        which upstream itself puts a request back that it had to evict.
        """
        state = RequestState(
            request_id=request_id,
            initial_tokens=[*prompt_ids, *token_ids],
            _true_initial_tokens=len(prompt_ids) if token_ids else 0,
            logprobs=list(logprobs),
            max_new_tokens=max_new_tokens - len(token_ids),
            eos_token_id=list(stop_ids),
            num_children=len(rows) - 1,
            streaming=streaming,
            record_timestamps=record_timestamps,
            logit_processor_kwargs={"rows": tuple(rows), "stop": tuple(stop)},
        )
        self.input_queue.put_nowait(state)
        self._wake_up_loop.set()

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request that came by `add`. May be called anywhere."""
        upstream.ContinuousBatchingManager.cancel_request(self, request_id)

    # ------------------------------------------------------------------------------------------- upstream's own methods

    def start(self) -> None:
        """Upstream's: starts the engine."""
        if not self.is_running():
            self._owner.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Upstream's: what is queued or in flight runs to its end, then the loop ends; with `hard_stop`, and where the
        engine is fenced, it ends at once with what it has. The engine takes no more requests and is STOPPED or, with
        `keep_for_next_session`, CREATED: it can be started again, at the same version and with an empty KV cache.
        `engine.stop()` is to be called all the same: it ends the engine's other threads."""
        self._refuse_on_loop("stop()")
        self._owner.refuse_inside_update("manager.stop()")
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise EngineStateError("stop() inside a pause would wait for itself; leave the pause first")
        if self._generation_thread is None:
            return
        self._owner.stopping(again=keep_for_next_session, abort=hard_stop)
        status.request_stop(
            status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP, self.distributed_helper.global_rank
        )
        self._wake_up_loop.set()
        self.input_queue.wake()
        if block:
            self.join(time.perf_counter(), timeout)

    def destroy(self) -> None:
        """Upstream's: a stop after which nothing can be started any more."""
        self._owner.refuse_inside_update("manager.destroy()")
        self._owner.stopping(again=False, abort=False)
        super().destroy()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Upstream's. Weights that are changed inside it fence the engine: that is what `engine.update()` is for."""
        self._refuse_on_loop("pause()")
        asked_at = time.perf_counter()
        with super().pause():
            self.meters.pause(time.perf_counter() - asked_at)
            yield

    def warmup(self) -> None:
        """Upstream's, before the start. Its made-up batches take the whole cache, so there is none beside requests."""
        if not self.is_running():
            super().warmup()
        elif self.batch_processor.model_runner.pad_inputs:
            raise EngineStateError("warmup() needs the cache for itself; call it before engine.start()")

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Upstream's; the engine's own model has its attention already."""
        if getattr(self, "model", None) is not model:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Upstream's; what has been delivered already is handed over too. Should the handler's event loop be closed when a
        result comes, it is for `get_result`."""
        router: _ListenerRouter = self.output_router
        with router.delivering:
            super().register_result_handler(request_id, callback)
            handler, loop = router.result_handlers[request_id]
            while (output := self.results.get_for(request_id, 0, lambda: False)) is not None:
                loop.call_soon(handler, output)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens that one request alone can hold in the cache; its last sampled token needs no place."""
        tokens: int = self._max_request_tokens
        return tokens

    @property
    def uses_graphs(self) -> bool:
        """Whether steps may be captured graphs, which hold the addresses of the weights."""
        return any(self.continuous_batching_config.cuda_graph_booleans)

    # --------------------------------------------------------------------------------- while paused, and only then

    def progress(self) -> dict[str, Progress]:
        """How far each request in the scheduler is. Those still in the input queue are not in it."""
        progress: dict[str, Progress] = {}
        for state in self._states():
            progress[state.request_id] = _progress(state)
            for unborn in _unborn(state):
                # it will be forked from what has been prefilled by now
                progress[unborn] = Progress(started=progress[state.request_id].started, num_sampled=0)
        return progress

    def outputs(self) -> dict[str, GenerationOutput]:
        """What each request in the scheduler has so far."""
        return {state.request_id: state.to_generation_output() for state in self._states()}

    def isolate_prefixes(self) -> None:
        """New requests share no KV written before this moment: cached blocks go, hashes go, and the blocks of requests
        now in flight are never hashed again (upstream would register each as it walks their tables)."""
        cache: RolloutCache = self.batch_processor.cache
        cache.forget_prefixes()
        cache.unshareable.update(state.request_id for state in self._states() if _progress(state).started)

    def recompute_kv(self) -> None:
        """Drops the KV cache of what is in flight; each request is prefilled again, tokens included."""
        processor = self.batch_processor
        scheduler = processor.scheduler
        for state in list(scheduler.waiting_requests.values()):
            if state.is_cpu_offloaded:
                processor.offloading_manager.free_request_cpu_cache(state)
                processor.cache.unshareable.discard(state.request_id)
                again = scheduler.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
                scheduler.start_again(state, again)
        for state in list(scheduler.active_requests.values()):
            again = state.create_equivalent_initial_request()
            processor.cache.free_blocks(state.request_id, no_cache=True)
            state._status = RequestStatus.FINISHED  # as upstream's own eviction does: a batch still out is not booked
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(again)
        # after an eviction only a finish reopens the queue, and now nothing is left that could finish
        scheduler.block_new_requests = False

    # ---------------------------------------------------------------------------------------------------- numbers

    def counts(self) -> tuple[int, int]:
        """(active, waiting) requests in the scheduler and the input queue; approximate while the loop runs."""
        scheduler = self.batch_processor.scheduler
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + self.input_queue.qsize()

    def kv_used(self) -> float:
        """Share of the KV cache that is not free, in [0, 1]; approximate while the loop runs."""
        return float(1.0 - self.batch_processor.cache.compute_free_capacity())

    def num_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return int(self.batch_processor.cache.num_blocks * self.continuous_batching_config.page_size)

    # --------------------------------------------------------------------------------------------- upstream's requests

    def _refuse_on_loop(self, what: str) -> None:
        if threading.current_thread() is self._generation_thread:
            raise EngineStateError(f"{what} on the generation loop's own thread would wait for itself")

    def check_open(self) -> None:
        """EngineDeadError or EngineStateError if no request is taken any more."""
        status = self.background_thread_status
        if status.fatal_error is not None:
            raise EngineDeadError(
                f"the generation loop died: {status.fatal_error!r}; engine.restart() brings it back"
            ) from status.fatal_error
        if status.local_status != status.DONT_STOP:
            raise EngineStateError("the generation loop is stopping or has stopped; it takes no more requests")

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until `max_queue_size` lets another request in; False if that takes longer. Raises as `check_open` does."""
        if not self.max_queue_size:
            self.check_open()
            return True
        return self.input_queue.wait_for_room(self.max_queue_size, timeout_s, self.check_open)

    # --------------------------------------------------------------------------------------------- upstream's seams

    def _states(self) -> list[RequestState]:
        scheduler = self.batch_processor.scheduler
        return [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]

    def _create_batch_processor(self) -> "RolloutBatchProcessor":
        first = self.batch_processor is None
        # upstream seeds the process-wide generators here
        gpus = list(range(torch.cuda.device_count()))
        with torch.random.fork_rng(gpus) if first else nullcontext():
            processor: RolloutBatchProcessor = super()._create_batch_processor()
        if first:
            # upstream constructs these by name; each subclass only overrides methods and adds what is set here
            _adopt(self.background_thread_status, RolloutThreadStatus)
            _adopt(processor, RolloutBatchProcessor)
            self.background_thread_status.before_pause = processor.book_outstanding
            processor.outstanding, processor.launched = set(), None
            processor.held, processor.listener, processor.decode = self._held, self.listener, self.decode
            processor.autocast = (
                torch.autocast(self.model.device.type, dtype=self.autocast_dtype)
                if self.autocast_dtype is not None
                else nullcontext()
            )
            processor.meters = processor.cache.meters = self.meters
            _adopt(processor.cache, RolloutCache)
            processor.cache.unshareable, processor.cache.plans = set(), {}
            processor.cache.paged_attention = self.paged_attention
            processor.cache.kernels = kernels() if self.paged_attention else None
            _adopt(processor.model_runner, RolloutModelRunner)
            processor.scheduler.router, processor.scheduler.listener = self.output_router, self.listener
            self.logit_processor.static = self.uses_graphs
            self._max_request_tokens = infer_max_single_request_tokens(processor.cache)
            self._try_forward(processor)
        return processor

    def _try_forward(self, processor: "RolloutBatchProcessor") -> None:
        """One forward of one made-up request, so that a model that upstream cannot batch (some architectures call the
        cache in another way) or code that cannot be compiled fails here and not under the first request."""
        if self.uses_graphs:
            return  # for upstream's own warm-up to capture
        length = min(2, processor.cache.max_batch_tokens)
        states = create_warmup_future_states(1, RequestStatus.PREFILLING, length, 0, processor.cache)
        runner = processor.model_runner
        num_q_tokens, max_kv_read = runner.maybe_pad_inputs(length, 0, False)
        processor.inputs_and_outputs.prepare_batch_tensors(
            states, self.logit_processor, False, num_q_tokens, max_kv_read, runner.pad_inputs
        )
        with processor.autocast:
            upstream.ContinuousBatchProcessor._generation_step(processor, self.model)
        if processor.inputs_and_outputs.compute_stream is not None:
            processor.inputs_and_outputs.compute_stream.synchronize()
        processor.cache.plans.clear()
        processor.cache.reset()

    def _handle_critical_error(
        self, error: Exception, batch_processor: upstream.ContinuousBatchProcessor | None
    ) -> None:
        self.listener.on_death(error)
        super()._handle_critical_error(error, batch_processor)

    def _run_generation_loop(self, use_inference_mode: bool) -> None:
        error: BaseException | None = None
        if self.num_threads is not None:
            # torch keeps this number per thread; what other threads use already stays
            torch.set_num_threads(self.num_threads)
        try:
            super()._run_generation_loop(use_inference_mode)
            error = self.background_thread_status.fatal_error
        except BaseException as escaped:
            error = escaped
            raise
        finally:
            # also when upstream's own error handling raised: whoever waits must be told
            self.input_queue.wake()
            self.listener.on_exit(error)


class RolloutThreadStatus(upstream.BackgroundThreadStatus):  # type: ignore[misc]
    """Never parks for nobody, nor with tokens that are not booked."""

    before_pause: Callable[[], None]

    def pause_and_wait(self) -> None:
        self.before_pause()
        with self._condition:
            # Whoever asked may have given up between the loop's look and this moment: parked now, the loop would wait
            # for ever.
            if self._pauses_requested:
                super().pause_and_wait()


class RolloutBatchProcessor(upstream.ContinuousBatchProcessor):  # type: ignore[misc]
    """Adds the hold, the check of the weights before tokens are booked, stop strings, and the measuring.

    Under asynchronous batching the next batch is launched before this one is booked, so that two are out at times. At a
    pause none is: all that has been sampled is booked before it begins, and what is counted, stamped, forgotten or computed
    again there is exact.
    """

    held: threading.Event
    listener: LoopListener
    meters: Meters
    autocast: Any
    decode: Callable[[list[int]], str] | None
    outstanding: set[int]  # the IO pairs whose batch has been launched and is not booked; without async there is only 0
    began_at: float  # perf_counter
    launched: (
        tuple[float, float, float, float] | None
    )  # prepare_s, forward_s, sample_s of this step, and when they ended

    def reset(self) -> None:
        super().reset()
        self.outstanding, self.launched = set(), None
        # the weights may have changed since the last session
        self.cache.forget_prefixes()
        self.cache.unshareable.clear()

    def book_outstanding(self) -> None:
        """Between two steps: books what has been launched."""
        ios = self.inputs_and_outputs
        if self.use_async_batching and self.outstanding:
            ios.swap_io_pairs()
            self.update_batch()
            ios.swap_io_pairs()

    def _update_tp_group_state(self) -> bool:
        # Called first in each iteration; a pause, if one is asked for, is spent in here. True: schedule nothing.
        stopping = bool(super()._update_tp_group_state())
        if self.held.is_set() and not stopping:
            status = self.background_thread_status
            if status.local_status == status.FLUSH_AND_STOP:
                # nothing that is in flight will ever end by itself
                status.request_stop(status.HARD_STOP, self.distributed_helper.global_rank)
            for state in self.scheduler.clear_cancelled_requests():
                self.offloading_manager.free_request_cpu_cache(state)
            return True
        if self.scheduler._requests_to_fork:
            # Nothing was booked since these were prefilled: scheduled again unforked, they would be split up.
            self.inputs_and_outputs.io_pairs[self._pair()].host_io.requests_in_batch = []
            super().update_batch()
        self.began_at = time.perf_counter()
        return stopping

    @torch.no_grad()
    def _generation_step(self, model: torch.nn.Module) -> None:
        launched_at = time.perf_counter()
        pair = self._pair()
        self.cache.plans.clear()
        self.model_runner.sample_s = 0.0
        with self.autocast:
            super()._generation_step(model)
        self.outstanding.add(pair)
        ended_at, sample_s = time.perf_counter(), self.model_runner.sample_s
        self.launched = (launched_at - self.began_at, ended_at - launched_at - sample_s, sample_s, ended_at)

    def update_batch(self) -> None:
        pair = self._pair()
        if pair in self.outstanding:  # else it was booked before a pause
            self.outstanding.discard(pair)
            self._book()
        if self.launched is not None:
            prepare_s, forward_s, sample_s, ended_at = self.launched
            deliver_s = time.perf_counter() - ended_at
            self.meters.step(prepare_s=prepare_s, forward_s=forward_s, sample_s=sample_s, deliver_s=deliver_s)
            self.launched = None

    def _book(self) -> None:
        # Waits until the batch has run. Only then does unchanged mean that it ran on these very weights.
        futures = self.inputs_and_outputs.prepare_batch_update()[0]
        ended = (RequestStatus.FINISHED, RequestStatus.PENDING)  # since they were scheduled
        num_tokens = sum(future.has_new_token and future.state.status not in ended for future in futures)
        changed = self.listener.on_step(num_tokens)
        if changed is not None:
            self._drop(changed)
            return
        super().update_batch()
        for state in list(self.scheduler.active_requests.values()):
            if not state.generated_tokens:
                continue
            if math.isnan(state.logprobs[-1]):
                self._end(state, error=NOT_NUMBERS)
            elif stop := state.logit_processor_kwargs.get("stop"):
                assert self.decode is not None
                # an evicted request's earlier tokens are part of its prompt by now
                before = state.initial_tokens[state._true_initial_tokens :] if state._true_initial_tokens else []
                try:
                    found = find_stop(before + state.generated_tokens, stop, self.decode)
                except Exception as error:  # the caller's tokenizer; the loop is everybody's
                    self._end(state, error=f"{UNREADABLE}: {error!r}")
                else:
                    if found is not None:
                        self._end(state)

    def _end(self, state: RequestState, *, error: str | None = None) -> None:
        """Ends a request between two steps, as finished or, with an error, as failed."""
        state.error = error
        state.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.scheduler.finish_request(state.request_id)
        self.scheduler.block_new_requests = False
        self.output_router.deliver(state.to_generation_output())
        state._status = RequestStatus.FINISHED  # a batch that is still out is not booked for it

    def _drop(self, reason: str) -> None:
        """Ends every request without the tokens that are out: they were sampled under weights that nobody vouches for."""
        self.held.set()
        self.outstanding.clear()
        self.scheduler._requests_to_fork.clear()
        self.fail_all_requests(EngineFencedError(f"the engine was fenced: {reason}"))

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        # upstream's takes the tokens of a request that waits, its KV in host memory, for none
        self.output_router.fail_and_deliver(state, error)

    def _pair(self) -> int:
        return int(self.inputs_and_outputs.current_pair) if self.use_async_batching else 0


class RolloutCache(upstream_cache.PagedAttentionCache):  # type: ignore[misc]
    """Keeps blocks of older weights from being shared, and hands the cache to our attention without a copy."""

    meters: Meters
    unshareable: set[str]  # requests whose blocks must never be found by a prefix search
    plans: dict[str, attention.Plan]  # by attention type, for the step that runs
    paged_attention: bool
    kernels: Kernels | None

    def forget_prefixes(self) -> None:
        """No block that is in the cache now is found by a prefix search."""
        self.evict_cached_blocks()
        for allocator in self.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        found = int(super().search_prefix_match(request_id, prompt_ids))
        if found:
            self.meters.prefix_hit(found)
        return found

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        # Under asynchronous batching a request may have been cancelled, or have failed, while its last batch ran.
        is_held = all(state.request_id in allocator.block_table for allocator in self.cache_allocators.values())
        if is_held and state.request_id not in self.unshareable:
            super().mark_complete_blocks(state, complete_blocks)

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        forked: list[str] = super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst)
        if src_state.request_id in self.unshareable:
            self.unshareable.update(forked)
        return forked

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        if not no_cache:  # an eviction, after which the request finishes for the scheduler and is queued again
            self.unshareable.discard(request_id)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # under autocast some layers compute in another dtype than the cache's
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        if not self.paged_attention:
            return super().update(key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
        allocator = self.layer_to_allocator[layer_idx]
        read_index = kwargs["read_index"][allocator.index]
        write_index = kwargs["write_index"][allocator.index]
        plan = self.plans.get(allocator.layer_type)
        sliding = allocator.layer_type == SLIDING_ATTENTION
        if plan is None:
            rows = None
            if read_index.numel():
                rows = torch.arange(read_index.numel()) if sliding else read_index
            plan = self.plans[allocator.layer_type] = attention.plan_batch(
                kwargs["cu_seq_lens_q"].tolist(),
                kwargs["cu_seq_lens_k"][allocator.layer_type].tolist(),
                rows,
                window=allocator.sliding_window if sliding else None,
                dtype=self.dtype,
                kernels=self.kernels,
            )
        new_keys, new_values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if sliding:
            # the window is a ring that new keys may overwrite: upstream reads it before it writes
            keys, values = allocator.update(new_keys, new_values, layer_idx, read_index, write_index)
        else:
            keys, values = allocator._kv_token_views[layer_idx]
            keys.index_copy_(0, write_index, new_keys)
            values.index_copy_(0, write_index, new_values)
        kwargs["paged"] = attention.PagedKeys(keys=keys, values=values, plan=plan)
        return key_states, value_states


class RolloutModelRunner(ModelRunner):  # type: ignore[misc]
    """Samples each row by its own parameters."""

    sample_s: float = 0.0  # of the step that runs

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            self._sample_rows(scores, output_ids)
            return
        began_at = time.perf_counter()
        self._sample_rows(scores, output_ids)
        self.sample_s += time.perf_counter() - began_at

    def _sample_rows(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        rows: SamplingRows = self.logit_processor
        tokens, logprobs = sample(
            scores[0],
            rows.packed,
            any_random=rows.any_random or rows.static,
            any_filter=rows.any_filter or rows.static,
            kernels=self.cache.kernels,
        )
        count = tokens.shape[0]
        output_ids[0, :count].copy_(tokens)
        output_ids[1, :count].copy_(logprobs.to(torch.float32).view(torch.int32))


class SamplingRows(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Carries each request's sampling parameters to the sampler, in upstream's static tensors."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(transformers.LogitsProcessorList())
        self.tensors_required = NUM_ARGUMENTS
        self.do_processing = True
        self.packed = torch.empty((NUM_ARGUMENTS, 0), dtype=torch.int32)
        self.any_random = self.any_filter = True
        self.static = False  # the sampler's shortcuts are off: a captured graph would freeze them
        self._generator = np.random.default_rng(seed)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        if "rows" in kwargs:
            return  # ours, checked at submit
        # upstream's own: what raises here fails one request, later it would be the loop
        check_row(SamplingRow.from_kwargs(kwargs))

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.copy_(pack_rows([SamplingRow()], [0.0]))

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        # position_offset already counts this step's queries: it is the position of the token to be sampled
        rows = [
            (_row_of(future.state), future.state.position_offset)
            for future in requests_in_batch
            if future.has_new_token
        ]
        self.any_random = any(row.temperature > 0 for row, _ in rows)
        self.any_filter = any(row.top_k > 0 or row.top_p < 1 for row, _ in rows)
        packed = pack_rows([row for row, _ in rows], draw_uniforms(rows, self._generator))
        arg_storage[:, : len(rows)] = packed.to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        self.packed = logits_processor_args
        return scores


class _ListenerRouter(upstream.OutputRouter):  # type: ignore[misc]
    """Gives the engine's outputs to the listener on the loop's thread; upstream's own requests go upstream's way."""

    def __init__(self, listener: LoopListener, names: RequestNames, results: ResultQueue) -> None:
        super().__init__()
        self.output_queue = results
        self.delivering = threading.RLock()
        self._listener, self._names = listener, names

    def deliver(self, output: GenerationOutput) -> None:
        if output.status == RequestStatus.FINISHED and output.logprobs and math.isnan(output.logprobs[-1]):
            output.status, output.error = RequestStatus.FAILED, NOT_NUMBERS
        if self._listener.on_output(output):
            return
        key = output.request_id
        output.request_id = self._names.name_of(key) or key
        with self.delivering:
            try:
                super().deliver(output)
            except RuntimeError:
                # the handler's event loop is closed; unheard, the error would end this one
                self.result_handlers.pop(output.request_id, None)
                super().deliver(output)
        if output.is_finished():
            self._names.forget(key)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class _TellsWhatHappens(upstream_scheduler.Scheduler):  # type: ignore[misc]
    """Upstream forgets cancelled requests without a word, and stays closed to new ones if the last that ran was one."""

    router: upstream.OutputRouter
    listener: LoopListener
    last_finished: RequestState | None = None
    last_was_unshareable = False
    unmatched: frozenset[str] = frozenset()  # cancels of unknown requests, to be tried once more

    def reset(self) -> None:
        super().reset()
        self.cancelled_unborn: set[str] = set()  # forks that are to be ended as soon as they exist

    def finish_request(self, request_id: str) -> None:
        if request_id in self.active_requests:
            self.last_finished = self.active_requests[request_id]
            self.last_was_unshareable = request_id in self.cache.unshareable
        super().finish_request(request_id)

    def add_waiting_request(self, state: RequestState) -> None:
        super().add_waiting_request(state)
        before = self.last_finished
        if before is None or before.request_id != state.request_id:
            return
        if state.is_cpu_offloaded:
            if self.last_was_unshareable:
                # it comes back with its KV of older weights; a soft reset is prefilled again, under those of then
                self.cache.unshareable.add(state.request_id)
        elif state._true_initial_tokens:
            self.start_again(before, state)

    def start_again(self, before: RequestState, again: RequestState) -> None:
        """A request starts again as `again`, with what upstream would forget of it."""
        again.created_time, again._timestamps = before.created_time, before._timestamps
        self.listener.on_preempted(again.request_id, before.lifespan[0])

    def _schedule_request(
        self,
        state: RequestState,
        request_tokens: list[int],
        token_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> None:
        if state.num_children > 0 and len(request_tokens) == 1:
            # Upstream keeps the last token for after the fork, and dies of a request that has no other.
            self._split(state)
        super()._schedule_request(state, request_tokens, token_budget, request_ids_to_remove_from_waiting)

    def clear_cancelled_requests(self) -> list[RequestState]:
        asked = frozenset(self._requests_to_cancel)
        known = self.active_requests.keys() | self.waiting_requests.keys()
        for request_id in asked & known:
            # what is to be forked from it goes on without it
            self._split(self.active_requests.get(request_id) or self.waiting_requests[request_id])
        for request_id in asked - known:
            parent = request_id.rpartition(FORK)[0]
            state = self.active_requests.get(parent) or self.waiting_requests.get(parent)
            if state is not None and request_id in _unborn(state):
                self.cancelled_unborn.add(request_id)
                output = GenerationOutput(request_id=request_id, status=RequestStatus.FAILED, error=CANCELLED)
                self.router.deliver(output)
        born = self.cancelled_unborn & (self.active_requests.keys() | self.waiting_requests.keys())
        self.cancelled_unborn -= born
        self._requests_to_cancel |= born
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        # The loop drains new requests before cancels. One that came between the two, cancel and all, is not known yet
        # and would run on to its end; by the next step it is. Others have ended, and are not asked for a third time.
        unknown = asked.difference(state.request_id for state in cancelled) - self.cancelled_unborn
        self.unmatched = unknown - self.unmatched
        self._requests_to_cancel |= self.unmatched
        if cancelled:
            # only a finish reopens the queue after an eviction, and none may come any more
            self.block_new_requests = False
        for state in cancelled:
            state.status = RequestStatus.FAILED  # an end, told apart from a word of a stream
            state.error = CANCELLED
            self.router.deliver(state.to_generation_output())
            # a batch that is still out is not booked for it
            state._status = RequestStatus.FINISHED
        return cancelled

    def _split(self, state: RequestState) -> None:
        """What would be forked from `state` becomes requests that wait, each to be prefilled by itself."""
        for request_id in _unborn(state):
            child = state.create_equivalent_initial_request()
            child.request_id = request_id
            child.num_children = 0
            child._true_initial_tokens = state._true_initial_tokens
            self.add_waiting_request(child)
        state.num_children = 0


class _Fifo(_TellsWhatHappens, upstream_scheduler.FIFOScheduler):  # type: ignore[misc]
    pass


class _PrefillFirst(_TellsWhatHappens, upstream_scheduler.PrefillFirstScheduler):  # type: ignore[misc]
    pass


_OUR_SCHEDULERS = {"fifo": "rollsync_fifo", "prefill_first": "rollsync_prefill_first"}
upstream_scheduler.SCHEDULER_MAPPING.update(rollsync_fifo=_Fifo, rollsync_prefill_first=_PrefillFirst)


def _progress(state: RequestState) -> Progress:
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    # The token after the last processed position has been sampled; during the prefill that is still the prompt. Booked
    # or not makes no difference, which keeps this right under asynchronous batching too.
    reached = state.position_offset + 1 if state.position_offset else 0
    sampled = max(reached, len(state.initial_tokens)) - prompt
    started = state.position_offset > 0 or state.status != RequestStatus.PENDING
    return Progress(started=started, num_sampled=sampled)


def _unborn(state: RequestState) -> list[str]:
    """The ids of the requests that are still to be forked from `state`."""
    return [f"{state.request_id}{FORK}{number}" for number in range(state.num_children)]


def _row_of(state: RequestState) -> SamplingRow:
    kwargs = state.logit_processor_kwargs
    if "rows" not in kwargs:
        return SamplingRow.from_kwargs(kwargs)
    _, fork, number = state.request_id.rpartition(FORK)
    row: SamplingRow = kwargs["rows"][int(number) + 1 if fork else 0]
    return row


def _refuse_processors(processors: Iterable[Any], *, drop: bool) -> None:
    """The sampler is ours: of a generation config's processors it does temperature, top-k and top-p."""
    ours = ("Temperature", "TopK", "TopP")
    others = sorted(kind for kind in (type(each).__name__ for each in processors) if not any(o in kind for o in ours))
    if others and not drop:
        raise ValueError(
            f"the engine's sampler has no {', '.join(others)}, which the generation config asks for; leave "
            "drop_unsupported_processors=True to do without"
        )
    if others:
        log.warning("the generation config asks for %s, which the engine's sampler leaves out", ", ".join(others))


def _adopt(instance: Any, subclass: type) -> None:
    """Turns an object that upstream constructed by name into our subclass of its class."""
    if type(instance) is not subclass.__base__:
        raise RolloutError(_mismatch(f"expected a {subclass.__base__}, got a {type(instance)}"))
    instance.__class__ = subclass


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError) as error:
        raise RolloutError(_mismatch(f"{what}: {error}")) from None


def _mismatch(detail: str) -> str:
    return (
        f"transformers {transformers.__version__} differs from the tested {TESTED_TRANSFORMERS}.x in what the engine "
        f"relies on ({detail}); install transformers>={TESTED_TRANSFORMERS},<{_next_minor(TESTED_TRANSFORMERS)}"
    )


def _next_minor(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"


RELIED_ON: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        upstream.ContinuousBatchingManager,
        (
            "pause",
            "cancel_request",
            "join",
            "destroy",
            "warmup",
            "switch_to_cb_friendly_attn",
            "register_result_handler",
            "is_running",
            "_create_batch_processor",
            "_handle_critical_error",
            "_run_generation_loop",
        ),
    ),
    (upstream.ContinuousBatchProcessor, ("_update_tp_group_state", "_generation_step", "update_batch")),
    (
        upstream.BackgroundThreadStatus,
        (
            "clear",
            "request_stop",
            "FLUSH_AND_STOP",
            "HARD_STOP",
            "pause_and_wait",
            "release_pause",
            "_pause_predicate",
            "_drop_pause_request",
        ),
    ),
    (upstream.OutputRouter, ("deliver", "deliver_batch")),
    (
        upstream_cache.PagedAttentionCache,
        (
            "update",
            "mark_complete_blocks",
            "free_blocks",
            "evict_cached_blocks",
            "compute_free_capacity",
            "prepare_fork_request",
        ),
    ),
    (
        upstream_scheduler.Scheduler,
        ("clear_cancelled_requests", "add_waiting_request", "finish_request", "schedule_batch", "_schedule_request"),
    ),
    (ModelRunner, ("_sample",)),
    (RequestState, ("to_generation_output", "status")),
    (ContinuousBatchingLogitsProcessorList, ("check_kwargs", "fill_defaults", "prepare_tensor_args")),
)


def check_upstream(relied_on: Iterable[tuple[type, Sequence[str]]] = RELIED_ON) -> None:
    """RolloutError, naming what is missing and the tested versions, where transformers lacks what this file uses."""
    for owner, names in relied_on:
        with _named(owner.__name__):
            for name in names:
                getattr(owner, name)
    with _named("RequestState"):
        state = RequestState(request_id="", initial_tokens=[])
        for name in ("position_offset", "_true_initial_tokens", "initial_tokens", "logit_processor_kwargs"):
            getattr(state, name)
    with _named("BlockLedger"):
        ledger = BlockLedger()
        for name in ("hash_to_block", "block_to_hash"):
            getattr(ledger, name)
    with _named("SCHEDULER_MAPPING"):
        for name in _OUR_SCHEDULERS:
            upstream_scheduler.SCHEDULER_MAPPING[name]

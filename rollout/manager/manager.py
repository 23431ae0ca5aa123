"""`RolloutManager`: upstream's continuous-batching manager, put together for one engine."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
    create_warmup_future_states,
)

from rollout.errors import EngineStateError
from rollout.manager.cache import RolloutCache
from rollout.manager.contract import adopt, check_upstream
from rollout.manager.pausing import RolloutThreadStatus
from rollout.manager.processor import RolloutBatchProcessor
from rollout.manager.router import ListenerRouter
from rollout.manager.sampler import RolloutModelRunner, SamplingRows, refuse_processors
from rollout.manager.scheduler import OUR_SCHEDULERS
from rollout.manager.states import progress_of, unborn
from rollout.manager.upstream_methods import HardenedManager
from rollout.meters import Meters
from rollout.model import attention
from rollout.model.kernels import kernels
from rollout.model.sampling import SamplingRow
from rollout.requests import checks
from rollout.requests.inflight import InFlight
from rollout.requests.results import RequestNames, RequestQueue, ResultQueue
from rollout.requests.seams import LoopListener, Owner, Progress
from rollout.requests.upstream_api import ThroughManager
from rollout.threads import use_threads


class RolloutManager(HardenedManager):
    """See the package's docstring. One per engine."""

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
            generation_config.max_new_tokens = checks.DEFAULT_NEW_TOKENS
        super().__init__(model, generation_config, config)
        self.listener, self._owner, self.meters = listener, owner, meters
        self.autocast_dtype = autocast_dtype
        self.num_threads = num_threads
        self.decode = decode
        refuse_processors(model._get_logits_processor(generation_config), drop=config.drop_unsupported_processors)
        self.logit_processor: SamplingRows = SamplingRows(config.seed)
        self.names = RequestNames()
        self.results = ResultQueue()
        self.output_router = ListenerRouter(listener, self.names, self.results)
        self.max_queue_size = config.max_queue_size
        # ours never wait for room: a full queue would raise in the loop, which hands them over
        self.input_queue: RequestQueue = RequestQueue()
        if config.scheduler_type not in OUR_SCHEDULERS:
            raise ValueError(f"scheduler_type must be one of {sorted(OUR_SCHEDULERS)}, got {config.scheduler_type!r}")
        self.continuous_batching_config.scheduler_type = OUR_SCHEDULERS[config.scheduler_type]
        if paged_attention:
            # after __init__, which refuses names it does not know, and before the cache plans its mask
            model.set_attn_implementation(attention.NAME)
        self.paged_attention = paged_attention
        self._held = threading.Event()
        # here rather than in the loop, so that sizes that cannot work fail in the caller's face
        self.batch_processor = self._create_batch_processor()
        self.limits = checks.limits_of(model, max_request_tokens=self.max_request_tokens)
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

        def entered() -> None:
            self.meters.pause(time.perf_counter() - asked_at)

        status: RolloutThreadStatus = self.background_thread_status
        with status.pause_within(timeout_s, self._wake_up_loop.set, entered):
            yield

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

    def start_group(self, group: Sequence[InFlight]) -> None:
        """Queues the samples of one prompt, each under its key."""
        first = group[0]
        assert first.key is not None
        self.add(
            first.key,
            first.prompt_ids,
            max_new_tokens=first.max_new_tokens,
            stop_ids=first.stop_ids,
            rows=[request.row for request in group],
            stop=first.stop,
            token_ids=first.token_ids_before,
            logprobs=first.logprobs_before,
            streaming=first.stream is not None,
        )

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request that came by `add`. May be called anywhere."""
        upstream.ContinuousBatchingManager.cancel_request(self, request_id)

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
            progress[state.request_id] = progress_of(state)
            for child in unborn(state):
                # it will be forked from what has been prefilled by now
                progress[child] = Progress(started=progress[state.request_id].started, num_sampled=0)
        return progress

    def outputs(self) -> dict[str, GenerationOutput]:
        """What each request in the scheduler has so far."""
        return {state.request_id: state.to_generation_output() for state in self._states()}

    def isolate_prefixes(self) -> None:
        """New requests share no KV written before this moment: cached blocks go, hashes go, and the blocks of requests
        now in flight are never hashed again (upstream would register each as it walks their tables)."""
        cache: RolloutCache = self.batch_processor.cache
        cache.forget_prefixes()
        cache.unshareable.update(state.request_id for state in self._states() if progress_of(state).started)

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

    # --------------------------------------------------------------------------------------------- upstream's seams

    def _states(self) -> list[RequestState]:
        scheduler = self.batch_processor.scheduler
        return [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]

    def _create_batch_processor(self) -> RolloutBatchProcessor:
        first = self.batch_processor is None
        # upstream seeds the process-wide generators here
        gpus = list(range(torch.cuda.device_count()))
        with torch.random.fork_rng(gpus) if first else nullcontext():
            processor: RolloutBatchProcessor = super()._create_batch_processor()
        if first:
            # upstream constructs these by name; each subclass only overrides methods and adds what is set here
            adopt(self.background_thread_status, RolloutThreadStatus)
            adopt(processor, RolloutBatchProcessor)
            self.background_thread_status.before_pause = processor.book_outstanding
            processor.outstanding, processor.launched = set(), None
            processor.held, processor.listener, processor.decode = self._held, self.listener, self.decode
            processor.autocast = (
                torch.autocast(self.model.device.type, dtype=self.autocast_dtype)
                if self.autocast_dtype is not None
                else nullcontext()
            )
            processor.meters = processor.cache.meters = self.meters
            adopt(processor.cache, RolloutCache)
            processor.cache.unshareable, processor.cache.plans = set(), {}
            processor.cache.paged_attention = self.paged_attention
            processor.cache.kernels = kernels() if self.paged_attention else None
            adopt(processor.model_runner, RolloutModelRunner)
            processor.scheduler.router, processor.scheduler.listener = self.output_router, self.listener
            self.logit_processor.static = self.uses_graphs
            self._max_request_tokens = infer_max_single_request_tokens(processor.cache)
            self._try_forward(processor)
        return processor

    def _try_forward(self, processor: RolloutBatchProcessor) -> None:
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
            use_threads(self.num_threads)
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

"""Upstream's own methods for requests, on the engine's manager: the same names and arguments, checked as `submit` checks,
and each reader gets the results it asks for."""

import queue
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests import checks
from rollout.requests.inflight import group_keys
from rollout.requests.results import RequestNames, ResultQueue
from rollout.requests.seams import Owner
from rollout.requests.upstream_requests import UpstreamRequest, check_request

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

QUEUE_WAIT_S = 10.0
"""How long upstream lets `add_request` wait for room under `max_queue_size`."""


class UpstreamRequests:
    """What `RolloutManager` puts in place of upstream's methods of these names."""

    generation_config: GenerationConfig
    limits: checks.Limits
    names: RequestNames
    results: ResultQueue
    shares_prefixes: bool
    max_queue_size: int
    is_running: Callable[[], bool]
    check_open: Callable[[], None]
    wait_for_room: Callable[[float], bool]
    _owner: Owner
    add: Callable[..., None]
    cancel: Callable[[str], None]

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Upstream's, checked as `GenerationEngine.submit` checks: InvalidRequestError for what cannot work, EngineDeadError
        or EngineStateError where upstream drops the request with a warning.

        `max_new_tokens=None` is the generation config's, or what the cache holds if that is less. Per request:
        temperature, top_k, top_p, seed and sample_index; without the first three the generation config decides, whose
        `do_sample=False` is greedy."""
        config = self.generation_config
        request = check_request(
            input_ids,
            config,
            self.limits,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            sampling=logit_processor_kwargs,
        )
        self.check_open()
        names, key = self.names.add(checks.check_label("request_id", request_id), len(request.rows))
        self._queue(key, request, streaming=streaming, record_timestamps=record_timestamps)
        return names[0]

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Upstream's. If one of the prompts cannot work, none is queued."""
        taken = self._take_in_all(
            inputs,
            self.generation_config,
            max_new_tokens,
            logit_processor_kwargs,
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        return [names[0] for names in taken]

    def cancel_request(self, request_id: str) -> None:
        """Upstream's. What the request has is delivered, as FAILED with the error "cancelled"; an id that is not in flight
        is left alone, also when it is used again later."""
        key = self.names.key_of(request_id)
        if key is not None:
            self.cancel(key)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> "GenerationOutput | None":
        """Upstream's, except that it waits for the result of that very request, and returns None as soon as none can come:
        nothing of that id is in flight, or the loop has ended."""
        if request_id is None:
            return self.results.get_for(None, timeout, self.is_running)
        return self.results.get_for(
            request_id, timeout, lambda: self.is_running() and self.names.key_of(request_id) is not None
        )

    def request_id_iter(self, request_id: str) -> "Iterator[GenerationOutput]":
        """Upstream's; ends with the request, however that ends."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def init_continuous_batching(self, *_: Any, **__: Any) -> "UpstreamRequests":
        """`engine.model.init_continuous_batching()`: this manager, as upstream does with one that was kept."""
        return self

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> "dict[str, GenerationOutput]":
        """`engine.model.generate_batch()`: upstream's, through the running engine and beside its other requests. Each call
        has a generation config of its own. The engine's manager persists and is warm, so `persistent_manager` and
        `warmup` change nothing; how it batches is EngineConfig's."""
        max_new_tokens = kwargs.pop("max_new_tokens", None)
        if kwargs or continuous_batching_config is not None:
            given = sorted(kwargs) or ["continuous_batching_config"]
            raise InvalidRequestError(
                f"generate_batch through an engine takes no {', '.join(given)}: how it batches is said once, with "
                "GenerationEngine(model, EngineConfig(continuous_batching=...)), the rest by generation_config"
            )
        self._owner.refuse_inside_update("generate_batch()")
        if not self.is_running():
            raise EngineStateError("the engine is not running; use `with engine:` or engine.start()")
        config = generation_config if generation_config is not None else self.generation_config
        taken = self._take_in_all(inputs, config, max_new_tokens, {}, record_timestamps=record_timestamps)
        # forks before what they were forked from, as upstream orders them
        names = [name for samples in taken for name in [*samples[1:], samples[0]]]
        try:
            shown = tqdm(names, desc=f"Solving {len(names)} requests", unit="request", disable=not progress_bar)
            outputs = [self.get_result(name) for name in shown]
        except BaseException:
            # an interrupted caller gets no results: what it asked for must not go on in its name
            for name in names:
                self.cancel_request(name)
            raise
        return {output.request_id: output for output in outputs if output is not None}

    def _take_in_all(
        self,
        inputs: Any,
        config: GenerationConfig,
        max_new_tokens: Any,
        sampling: Mapping[str, Any],
        *,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> list[list[str]]:
        """Checks all, then queues all, in the order that shares most. The ids of the samples of each input."""
        checked: list[UpstreamRequest] = []
        for number, prompt in enumerate(checks.check_prompts(inputs)):
            try:
                checked.append(
                    check_request(prompt, config, self.limits, max_new_tokens=max_new_tokens, sampling=sampling)
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"inputs[{number}]: {error}") from None
        self.check_open()
        taken = [self.names.add(None, len(request.rows)) for request in checked]
        order = list(range(len(checked)))
        if self.shares_prefixes:
            order.sort(key=lambda number: checked[number].prompt_ids, reverse=True)
        for number in order:
            self._queue(taken[number][1], checked[number], streaming=streaming, record_timestamps=record_timestamps)
        return [names for names, _ in taken]

    def _queue(self, key: str, request: UpstreamRequest, *, streaming: bool, record_timestamps: bool) -> None:
        try:
            if not self.wait_for_room(QUEUE_WAIT_S):
                raise queue.Full(f"{self.max_queue_size} requests (max_queue_size) still wait after {QUEUE_WAIT_S} s")
            self.add(
                key,
                request.prompt_ids,
                max_new_tokens=request.max_new_tokens,
                stop_ids=request.stop_ids,
                rows=request.rows,
                streaming=streaming,
                record_timestamps=record_timestamps,
            )
        except BaseException:
            for sample in group_keys(key, len(request.rows)):
                self.names.forget(sample)
            raise


class ThroughManager:
    """A method of the manager in place of the one of its model."""

    def __init__(self, manager: UpstreamRequests, method: str) -> None:
        self._manager, self._method = weakref.ref(manager), method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        manager = self._manager()
        if manager is None:
            raise EngineStateError(f"{self._method}: the engine of this model is gone")
        return getattr(manager, self._method)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy of the model has other weights than the engine
        return _of_a_copy, (self._method,)


def _of_a_copy(method: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineStateError(
            f"this model was copied from an engine's: use type(model).{method}(model, ...), or del model.{method}"
        )

    return refuse

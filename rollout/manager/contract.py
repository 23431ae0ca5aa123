"""What this package relies on in transformers, and the error where a release lacks it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.generation.continuous_batching import cache as upstream_cache
from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching import scheduler as upstream_scheduler
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

from rollout.errors import RolloutError

TESTED_TRANSFORMERS = "5.24"

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
    """RolloutError, naming what is missing and the tested versions, where transformers lacks what this package uses."""
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
        for name in ("fifo", "prefill_first"):
            upstream_scheduler.SCHEDULER_MAPPING[name]


def adopt(instance: Any, subclass: type) -> None:
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

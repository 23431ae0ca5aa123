"""What rollout/manager relies on in transformers holds, seam by seam; where it does not, the error says so."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from fakes import tiny_gemma3, tiny_llama
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import cache, cb_logits_processors, continuous_api, offloading_manager
from transformers.generation.continuous_batching import model_runner as runner
from transformers.generation.continuous_batching import requests as states
from transformers.generation.continuous_batching import scheduler as schedulers
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger, CacheAllocator

from rollout import GenerationEngine, RolloutError, SamplingParams, manager
from rollout.manager import check_upstream
from rollout.manager.contract import adopt
from rollout.manager.sampler import RolloutModelRunner, SamplingRows
from rollout.model.sampling import SamplingRow, keyed_uniform, pack_rows, sample

MANAGER_SOURCES = sorted(Path(inspect.getsourcefile(manager) or "").parent.glob("*.py"))


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def upstream_manager(model: PreTrainedModel, **settings: object) -> continuous_api.ContinuousBatchingManager:
    """Upstream's own, with its processor made, not started."""
    config = ContinuousBatchingConfig(**{"num_blocks": 8, "page_size": 16, "max_batch_tokens": 64, **settings})
    made = continuous_api.ContinuousBatchingManager(model, model.generation_config, config)
    made.batch_processor = made._create_batch_processor()
    return made


def request(request_id: str, tokens: list[int], **fields: object) -> states.RequestState:
    return states.RequestState(request_id=request_id, initial_tokens=tokens, **fields)


# ------------------------------------------------------------------------------------------------------- the contract

SIGNATURES: dict[tuple[type, str], list[str]] = {
    (continuous_api.ContinuousBatchingManager, "__init__"): [
        "self",
        "model",
        "generation_config",
        "continuous_batching_config",
        "workload_hints",
    ],
    (continuous_api.ContinuousBatchingManager, "pause"): ["self"],
    (continuous_api.ContinuousBatchingManager, "cancel_request"): ["self", "request_id"],
    (continuous_api.ContinuousBatchingManager, "is_running"): ["self"],
    (continuous_api.ContinuousBatchingManager, "_create_batch_processor"): ["self"],
    (continuous_api.ContinuousBatchingManager, "_run_generation_loop"): ["self", "use_inference_mode"],
    (continuous_api.ContinuousBatchingManager, "_handle_critical_error"): ["self", "error", "batch_processor"],
    (continuous_api.ContinuousBatchProcessor, "_update_tp_group_state"): ["self"],
    (continuous_api.ContinuousBatchProcessor, "_generation_step"): ["self", "model"],
    (continuous_api.ContinuousBatchProcessor, "update_batch"): ["self"],
    (continuous_api.BackgroundThreadStatus, "request_stop"): ["self", "status", "global_rank"],
    (continuous_api.BackgroundThreadStatus, "clear"): ["self"],
    (continuous_api.BackgroundThreadStatus, "pause_and_wait"): ["self"],
    (continuous_api.BackgroundThreadStatus, "release_pause"): ["self"],
    (continuous_api.BackgroundThreadStatus, "_pause_predicate"): ["self"],
    (continuous_api.BackgroundThreadStatus, "_drop_pause_request"): ["self"],
    (continuous_api.OutputRouter, "deliver"): ["self", "output"],
    (continuous_api.OutputRouter, "deliver_batch"): ["self", "outputs"],
    (cache.PagedAttentionCache, "update"): ["self", "key_states", "value_states", "layer_idx", "kwargs"],
    (cache.PagedAttentionCache, "mark_complete_blocks"): ["self", "state", "complete_blocks"],
    (cache.PagedAttentionCache, "free_blocks"): ["self", "request_id", "no_cache"],
    (cache.PagedAttentionCache, "evict_cached_blocks"): ["self"],
    (cache.PagedAttentionCache, "compute_free_capacity"): ["self", "relative"],
    (cache.PagedAttentionCache, "reset"): ["self"],
    (CacheAllocator, "update"): ["self", "key_states", "value_states", "layer_idx", "read_index", "write_index"],
    (schedulers.Scheduler, "add_waiting_request"): ["self", "state"],
    (schedulers.Scheduler, "finish_request"): ["self", "request_id"],
    (schedulers.Scheduler, "clear_cancelled_requests"): ["self"],
    (runner.ModelRunner, "_sample"): ["self", "scores", "output_ids"],
    (states.RequestState, "to_generation_output"): ["self"],
    (cb_logits_processors.ContinuousBatchingLogitsProcessorList, "check_kwargs"): ["self", "kwargs"],
    (cb_logits_processors.ContinuousBatchingLogitsProcessorList, "fill_defaults"): ["self", "int32_tensor"],
    (cb_logits_processors.ContinuousBatchingLogitsProcessorList, "prepare_tensor_args"): [
        "self",
        "requests_in_batch",
        "arg_storage",
    ],
    (cb_logits_processors.ContinuousBatchingLogitsProcessorList, "__call__"): [
        "self",
        "input_ids",
        "scores",
        "logits_processor_args",
    ],
    (offloading_manager.OffloadingManager, "free_request_cpu_cache"): ["self", "state"],
}

ATTRIBUTES: dict[str, list[str]] = {
    "manager": [
        "input_queue",
        "cancel_queue",
        "output_router",
        "batch_processor",
        "background_thread_status",
        "logit_processor",
        "continuous_batching_config",
        "distributed_helper",
        "_use_prefix_sharing",
        "_wake_up_loop",
        "_generation_thread",
    ],
    "status": [
        "_condition",
        "_pauses_requested",
        "_local_pauses_requested",
        "_paused",
        "fatal_error",
        "DONT_STOP",
        "HARD_STOP",
        "STOPPED",
    ],
    "processor": ["cache", "scheduler", "model_runner", "inputs_and_outputs", "offloading_manager"],
    "scheduler": [
        "active_requests",
        "waiting_requests",
        "block_new_requests",
        "_requests_to_cancel",
        "_requests_to_fork",
    ],
    "cache": ["cache_allocators", "layer_to_allocator", "num_blocks", "max_batch_tokens", "dtype"],
    "allocator": ["ledger", "index", "layer_type", "block_table", "_kv_token_views"],
    "ledger": ["hash_to_block", "block_to_hash"],
    "state": [
        "request_id",
        "initial_tokens",
        "position_offset",
        "_status",
        "_true_initial_tokens",
        "logit_processor_kwargs",
        "lifespan",
        "status",
        "_status",
        "_timestamps",
        "created_time",
    ],
    "logits": ["tensors_required", "do_processing"],
}


@pytest.mark.parametrize(("owner", "name"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_method_that_is_called_or_overridden_has_the_parameters_it_had(owner: type, name: str) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == SIGNATURES[owner, name]


def test_each_attribute_that_is_read_or_set_exists_on_what_upstream_makes() -> None:
    made = upstream_manager(tiny_llama())
    processor = made.batch_processor
    allocator = processor.cache.layer_to_allocator[0]
    objects = {
        "manager": made,
        "status": made.background_thread_status,
        "processor": processor,
        "scheduler": processor.scheduler,
        "cache": processor.cache,
        "allocator": allocator,
        "ledger": allocator.ledger,
        "state": request("a", [5]),
        "logits": made.logit_processor,
    }
    missing = [
        f"{kind}.{name}" for kind, names in ATTRIBUTES.items() for name in names if not hasattr(objects[kind], name)
    ]
    assert missing == []
    assert processor.cache.layer_to_allocator[0].ledger.__class__ is BlockLedger


def test_every_private_name_that_the_manager_touches_is_in_the_contract() -> None:
    nodes = [node for path in MANAGER_SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    set_here = {"_held", "_listener", "_generator", "_max_request_tokens", "_names", "_owner"}
    touched = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    private = {name for name in touched if not name.startswith("__")}
    listed = {name for _, name in SIGNATURES} | {name for names in ATTRIBUTES.values() for name in names}
    of_models = {"_attn_implementation", "_supports_sdpa", "_get_logits_processor"}
    assert private - ours - set_here - listed - of_models == set()


def test_upstream_makes_what_the_engine_turns_into_its_own() -> None:
    made = upstream_manager(tiny_llama())
    processor = made.batch_processor
    assert type(made.background_thread_status) is continuous_api.BackgroundThreadStatus
    assert type(processor) is continuous_api.ContinuousBatchProcessor
    assert type(processor.cache) is cache.PagedAttentionCache
    assert type(processor.model_runner) is runner.ModelRunner
    assert type(processor.scheduler) is schedulers.FIFOScheduler
    assert schedulers.SCHEDULER_MAPPING["fifo"] is schedulers.FIFOScheduler
    assert schedulers.SCHEDULER_MAPPING["prefill_first"] is schedulers.PrefillFirstScheduler


class HardStopping(continuous_api.ContinuousBatchProcessor):
    def _update_tp_group_state(self) -> bool:
        return True


def test_nothing_is_scheduled_when_the_first_call_of_a_step_says_so() -> None:
    processor = upstream_manager(tiny_llama()).batch_processor
    processor.scheduler.add_waiting_request(request("a", [5, 6]))
    processor.__class__ = HardStopping
    assert processor.prepare_next_batch() is False
    assert list(processor.scheduler.waiting_requests) == ["a"]
    processor.__class__ = continuous_api.ContinuousBatchProcessor
    assert processor.prepare_next_batch() is True
    assert list(processor.scheduler.active_requests) == ["a"]


def test_a_step_counts_its_queries_before_it_asks_for_sampling_parameters() -> None:
    """So that `position_offset` is the position of the token to be sampled."""
    seen: list[int] = []

    class Spy(SamplingRows):
        def prepare_tensor_args(self, requests_in_batch: list, arg_storage: torch.Tensor) -> torch.Tensor:
            seen.extend(future.state.position_offset for future in requests_in_batch if future.has_new_token)
            return super().prepare_tensor_args(requests_in_batch, arg_storage)

    with GenerationEngine(tiny_llama()) as engine:
        engine.manager.logit_processor.__class__ = Spy
        engine.generate([[5, 6, 7]], greedy(3))
    assert seen == [3, 4, 5]


def test_the_uniform_number_of_a_token_is_that_of_its_absolute_position() -> None:
    model = tiny_llama()
    prompt = [5, 6, 7]
    with GenerationEngine(model) as engine:
        params = SamplingParams(max_new_tokens=8, temperature=1, stop_token_ids=(), seed=21)
        tokens = engine.submit(prompt, params, sample_index=4).result(30).token_ids
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    uniforms = [keyed_uniform(21, 4, len(prompt) + i) for i in range(8)]
    drawn, _ = sample(logits, pack_rows([SamplingRow()] * 8, uniforms))
    assert drawn.tolist() == tokens


def test_a_soft_reset_keeps_prompt_tokens_logprobs_and_counts_apart() -> None:
    state = request("a", [5, 6], max_new_tokens=10, generated_tokens=[7, 8], logprobs=[-1.0, -2.0])
    again = state.create_equivalent_initial_request()
    assert (again._true_initial_tokens, again.initial_tokens, again.max_new_tokens) == (2, [5, 6, 7, 8], 8)
    again.generated_tokens, again.logprobs = [9], [*again.logprobs, -3.0]
    third = again.create_equivalent_initial_request()
    output = third.to_generation_output()
    assert (output.prompt_ids, output.generated_tokens) == ([5, 6], [7, 8, 9])
    assert output.logprobs == [-1.0, -2.0, -3.0]


def test_a_cancel_frees_the_blocks_and_returns_the_states() -> None:
    processor = upstream_manager(tiny_llama()).batch_processor
    scheduler = processor.scheduler
    for name in "ab":
        scheduler.add_waiting_request(request(name, [5, 6]))
    processor.prepare_next_batch()
    scheduler.add_waiting_request(request("c", [7]))
    free = processor.cache.compute_free_capacity()
    for name in ("a", "c", "unknown"):
        scheduler.set_request_cancellation(name)
    assert {state.request_id for state in scheduler.clear_cancelled_requests()} == {"a", "c"}
    assert processor.cache.compute_free_capacity() > free
    assert (list(scheduler.active_requests), scheduler.waiting_requests) == (["b"], {})
    assert scheduler._requests_to_cancel == set()


def test_the_largest_request_is_what_an_empty_cache_holds() -> None:
    processor = upstream_manager(tiny_llama()).batch_processor
    assert runner.infer_max_single_request_tokens(processor.cache) == 8 * 16
    sliding = upstream_manager(tiny_gemma3()).batch_processor
    assert SLIDING_ATTENTION in sliding.cache.cache_allocators
    assert 64 < runner.infer_max_single_request_tokens(sliding.cache) < 8 * 16 * 2


def test_a_pause_is_over_when_the_last_that_asked_drops_it() -> None:
    status = continuous_api.BackgroundThreadStatus()
    with status._condition:
        status._pauses_requested += 2
        status._local_pauses_requested.value += 2
        assert not status._pause_predicate()
        status._paused = True
        assert status._pause_predicate()
        status._drop_pause_request()
        assert status._paused
        status._drop_pause_request()
        assert not status._paused
    status.mark_as_stopped()
    assert status._pause_predicate(), "who waits for a pause of a loop that has ended must be told"


# ------------------------------------------------------------------------------------------------ another transformers


class Old:
    """An upstream class that lacks something."""

    def pause(self) -> None: ...


def test_a_missing_seam_is_named_with_the_versions_that_have_it() -> None:
    with pytest.raises(RolloutError) as refusal:
        check_upstream([(Old, ("pause", "evict_cached_blocks"))])
    for part in ("Old", "evict_cached_blocks", "tested 5.24.x", "install transformers>=5.24,<5.25"):
        assert part in str(refusal.value)


def test_the_installed_transformers_has_every_seam() -> None:
    check_upstream()
    check_upstream([(Old, ("pause",))])


def test_an_object_of_another_class_than_expected_is_refused_with_the_versions() -> None:
    class Newer(runner.ModelRunner):
        pass

    with pytest.raises(RolloutError, match=r"Newer.*install transformers>=5\.24,<5\.25"):
        adopt(object.__new__(Newer), RolloutModelRunner)

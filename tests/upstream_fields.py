"""Rules of the fields of upstream's config."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes import greedy_reference, random_prompts, tiny_llama, wait_until
from transformers import ContinuousBatchingConfig
from upstream_rows import assert_says_what_generate_says, configured, finished, gated, greedy, resolved, row

from rollout import (
    EngineConfig,
    EngineStateError,
    GenerationEngine,
    InvalidRequestError,
)
from rollout.requests.results import RequestQueue


@row("page_size")
def is_the_tokens_of_a_block_and_at_least_four() -> None:
    engine = assert_says_what_generate_says(configured(page_size=8, num_blocks=32))
    assert engine.manager.batch_processor.cache.num_blocks == 32
    with pytest.raises(InvalidRequestError, match="page_size must be at least 4"):
        GenerationEngine(tiny_llama(), configured(page_size=3))


@row("block_size")
def is_the_old_name_of_page_size() -> None:
    engine = assert_says_what_generate_says(configured(block_size=8, num_blocks=32))
    assert resolved(engine).page_size == 8


@row("num_blocks")
def bounds_the_cache_and_fails_in_the_constructor_when_absurd() -> None:
    engine = assert_says_what_generate_says(configured(num_blocks=12))
    assert engine.manager.batch_processor.cache.num_blocks == 12
    with pytest.raises(InvalidRequestError, match="num_blocks=1000000000"):
        GenerationEngine(tiny_llama(), configured(num_blocks=10**9))


@row("max_batch_tokens")
def bounds_the_tokens_of_a_step() -> None:
    sizes: list[int] = []
    engine = GenerationEngine(tiny_llama(), configured(max_batch_tokens=16))
    engine.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with engine:
        engine.generate(random_prompts([40, 30]), greedy(4))
    assert max(sizes) == 16


@row("max_memory_percent")
def is_the_share_of_memory_that_the_cache_must_fit_into() -> None:
    assert resolved(assert_says_what_generate_says(configured(max_memory_percent=0.3))).max_memory_percent == 0.3
    with pytest.raises(InvalidRequestError, match="available memory"):
        GenerationEngine(tiny_llama(), configured(max_memory_percent=1e-9))


@row("max_requests_per_batch")
def bounds_the_requests_of_a_step() -> None:
    active: list[int] = []
    engine = GenerationEngine(tiny_llama(), configured(max_requests_per_batch=3))
    engine.model.register_forward_hook(lambda _, args, output: active.append(output.logits.shape[1]))
    with engine:
        engine.generate(random_prompts([4] * 8), greedy(4))
    assert max(active) == 3


@row("max_blocks_per_request")
def sizes_a_table_of_the_flash_decode_path_and_is_off_on_a_cpu() -> None:
    assert resolved(assert_says_what_generate_says(configured(max_blocks_per_request=4))).max_blocks_per_request == 0


@row("allow_block_sharing")
def shares_equal_beginnings_or_does_not() -> None:
    for allowed in (True, False):
        engine = assert_says_what_generate_says(configured(allow_block_sharing=allowed))
        assert (engine.stats().prefix_hits > 0) == allowed
    config = EngineConfig(prefix_sharing=False, continuous_batching=ContinuousBatchingConfig(page_size=16))
    assert assert_says_what_generate_says(config).stats().prefix_hits == 0


@row("use_async_batching")
def needs_streams_and_says_so_on_a_cpu() -> None:
    for off in (False, None):
        assert resolved(assert_says_what_generate_says(configured(use_async_batching=off))).use_async_batching is False
    with pytest.raises(InvalidRequestError, match=r"Async batching requires a device type in \('cuda', 'xpu'\)"):
        GenerationEngine(tiny_llama(), configured(use_async_batching=True))


@row("use_cuda_graph")
def is_off_where_there_are_no_graphs() -> None:
    for wanted in (True, False, (True, False)):
        engine = assert_says_what_generate_says(configured(use_cuda_graph=wanted))
        assert not engine.manager.uses_graphs


@row("q_padding_interval_size")
def of_queries_reaches_upstream() -> None:
    assert (
        resolved(assert_says_what_generate_says(configured(q_padding_interval_size=16))).q_padding_interval_size == 16
    )
    assert resolved(assert_says_what_generate_says(configured())).q_padding_interval_size == 64


@row("kv_padding_interval_size")
def of_keys_reaches_upstream() -> None:
    engine = assert_says_what_generate_says(configured(kv_padding_interval_size=512))
    assert resolved(engine).kv_padding_interval_size == 512
    assert resolved(assert_says_what_generate_says(configured())).kv_padding_interval_size == 64 * 256


@row("scheduler_type")
def is_one_of_two() -> None:
    for kind in ("fifo", "prefill_first"):
        assert_says_what_generate_says(configured(scheduler_type=kind))
    with pytest.raises(InvalidRequestError, match=r"scheduler_type must be one of .*got 'lifo'"):
        GenerationEngine(tiny_llama(), configured(scheduler_type="lifo"))


@row("safety_margin")
def keeps_room_for_those_that_decode() -> None:
    most: dict[float, int] = {}
    for margin in (0.0, 0.9):
        engine = GenerationEngine(tiny_llama(), configured(safety_margin=margin, num_blocks=20))
        active: list[int] = []
        engine.model.register_forward_hook(lambda *_, e=engine, a=active: a.append(e.manager.counts()[0]))
        with engine:
            engine.generate(random_prompts([40] * 4), greedy(20))
        most[margin] = max(active)
    assert most[0.9] < most[0.0]
    with pytest.raises(InvalidRequestError, match="safety_margin"):
        GenerationEngine(tiny_llama(), configured(safety_margin=2.0))


@row("return_logprobs")
def is_always_on() -> None:
    for wanted in (True, False):
        with GenerationEngine(tiny_llama(), configured(return_logprobs=wanted)) as engine:
            finished(engine, engine.manager.add_request([5], max_new_tokens=3, eos_token_id=-1), 3)


@row("seed")
def seeds_the_engines_own_draws_and_nobody_elses() -> None:
    said: dict[int, list[list[int]]] = {3: [], 4: []}
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        undisturbed = torch.rand(4)
        torch.manual_seed(0)
        with GenerationEngine(tiny_llama(), configured(seed=seed)) as engine:
            name = engine.manager.add_request([5], max_new_tokens=20, temperature=1.0, eos_token_id=-1)
            said[seed].append(finished(engine, name, 20).generated_tokens)
        assert torch.equal(torch.rand(4), undisturbed)
    assert said[3][0] == said[3][1] != said[4][0]


@row("auto_switch_to_flash")
def never_switches_where_there_is_no_flash() -> None:
    for switch in (True, False):
        engine = assert_says_what_generate_says(configured(auto_switch_to_flash=switch))
        assert "flash" not in engine.model.config._attn_implementation


@row("cpu_offload_space")
def of_a_model_on_the_cpu_is_refused() -> None:
    for space in (1.0, None):
        with pytest.raises(InvalidRequestError, match="cpu_offload_space"):
            GenerationEngine(tiny_llama(), configured(cpu_offload_space=space))
    assert_says_what_generate_says(configured(cpu_offload_space=0.0))


@row("cpu_offload_space_safety_threshold")
def of_zero_turns_offloading_off() -> None:
    engine = assert_says_what_generate_says(configured(cpu_offload_space=1.0, cpu_offload_space_safety_threshold=0.0))
    assert resolved(engine).cpu_offload_space_safety_threshold == 0.0


@row("max_queue_size")
def makes_upstreams_own_requests_wait_for_room_and_never_the_engines() -> None:
    with gated(configured(max_queue_size=2)) as (engine, gate):
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        for _ in range(2):
            engine.manager.add_request([6], max_new_tokens=2, eos_token_id=-1)
        added = threading.Thread(
            target=lambda: engine.manager.add_request([7], request_id="third", max_new_tokens=2, eos_token_id=-1)
        )
        added.start()
        futures = [engine.submit([8], greedy(2)) for _ in range(4)]
        added.join(0.05)
        assert added.is_alive()
        gate.open()
        added.join(30)
        finished(engine, "third", 2)
        assert [len(future.result(30).token_ids) for future in futures] == [2] * 4


@row("max_queue_size")
def gives_up_after_upstreams_ten_seconds() -> None:
    with pytest.MonkeyPatch.context() as patch, gated(configured(max_queue_size=1)) as (engine, gate):
        patch.setattr("rollout.requests.upstream_api.QUEUE_WAIT_S", 0.05)
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        engine.manager.add_request([6])
        with pytest.raises(queue.Full, match="max_queue_size"):
            engine.manager.add_request([7])


@row("max_queue_size")
def a_wait_for_room_ends_at_once_when_none_can_come_any_more() -> None:
    asked, is_open = threading.Event(), threading.Event()
    is_open.set()

    def check() -> None:
        asked.set()
        if not is_open.is_set():
            raise EngineStateError("closed")

    waiting = RequestQueue()
    waiting.put("one")
    with ThreadPoolExecutor(1) as pool:
        room = pool.submit(waiting.wait_for_room, 1, 30, check)
        assert asked.wait(30)
        waiting.get()
        assert room.result(30)
        waiting.put("another")
        asked.clear()
        room = pool.submit(waiting.wait_for_room, 1, 30, check)
        assert asked.wait(30)
        is_open.clear()
        waiting.wake()
        assert isinstance(room.exception(30), EngineStateError)


@row("max_queue_size")
def nobody_waits_for_room_with_a_loop_that_stops() -> None:
    with gated(configured(max_queue_size=1)) as (engine, gate):
        engine.submit([5], greedy(4))
        gate.wait_for_arrival()
        engine.manager.add_request([6])
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(engine.manager.add_request, [7])
            wait_until(lambda: len(engine.manager.names._names) == 2)  # it waits, or is about to
            engine.manager.stop(block=False, hard_stop=True)
            assert isinstance(refused.exception(30), EngineStateError)


@row("per_request_processors")
def are_always_on() -> None:
    for wanted in (True, False):
        with GenerationEngine(tiny_llama(), configured(per_request_processors=wanted)) as engine:
            names = [
                engine.manager.add_request([5], max_new_tokens=8, eos_token_id=-1, temperature=t) for t in (0.0, 5.0)
            ]
            cold, hot = (finished(engine, name, 8).generated_tokens for name in names)
            assert cold == greedy_reference(tiny_llama(), [5], 8) != hot


@row("drop_unsupported_processors")
def drops_with_a_warning_or_refuses() -> None:
    model = tiny_llama()
    model.generation_config.repetition_penalty = 1.3
    with GenerationEngine(model, configured()) as engine:
        engine.generate([[5]], greedy(2))
    model.generation_config.suppress_tokens = [7]
    with pytest.raises(InvalidRequestError, match="has no RepetitionPenaltyLogitsProcessor, SuppressTokens"):
        GenerationEngine(model, configured(drop_unsupported_processors=False))


@row("disable_nccl_graph_mixing")
def matters_under_tensor_parallelism_only() -> None:
    for disabled in (True, False):
        engine = assert_says_what_generate_says(configured(disable_nccl_graph_mixing=disabled))
        assert resolved(engine).disable_nccl_graph_mixing == disabled


@row("cpu_group_timeout")
def of_the_group_matters_under_tensor_parallelism_only() -> None:
    for timeout in (5.0, None):
        assert (
            resolved(assert_says_what_generate_says(configured(cpu_group_timeout=timeout))).cpu_group_timeout == timeout
        )


@row("max_cached_graphs")
def is_taken_and_means_nothing() -> None:
    assert_says_what_generate_says(configured(max_cached_graphs=3))

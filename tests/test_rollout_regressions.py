"""What once broke: each test is the smallest form of a failure that random operations or a hostile caller found."""

from fakes import mark, marker_llama, random_prompts, wait_until

from rollout import EngineConfig, GenerationEngine, SamplingParams

GREEDY = SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=())


def test_a_refresh_right_after_an_eviction_leaves_nobody_waiting_for_ever() -> None:
    config = EngineConfig(
        page_size=4, num_blocks=24, max_batch_tokens=32, max_requests=8, prefix_sharing=False, kv_at_update="refresh"
    )
    with GenerationEngine(marker_llama(), config) as engine:
        futures = [engine.submit(prompt, GREEDY) for prompt in random_prompts([6] * 8)]
        # the queue is closed from an eviction until a request finishes
        wait_until(lambda: engine.manager.batch_processor.scheduler.block_new_requests)
        with engine.update() as model:
            mark(model, 1)
        for future in futures:
            rollout = future.result(30)
            assert rollout.token_ids == rollout.versions

"""A worker's item becomes requests of its engine, wherever the two live."""

from typing import Any

from rollout.engine import GenerationEngine
from rollout.requests.delivery import RolloutFuture
from rollout.workers.wire import WorkItem


def start_item(engine: GenerationEngine, item: WorkItem) -> list[RolloutFuture]:
    """One future for each sample. Raises as `GenerationEngine.submit` does; then none is in flight."""
    common: dict[str, Any] = {
        "request_id": item.request_id,
        "group_id": item.group_id,
        "prompt_id": item.prompt_id,
        "sample_index": item.sample_index,
        "metadata": item.metadata,
        "timeout_s": item.timeout_s,
    }
    if item.size > 1:
        return engine.submit_group(item.prompt_ids, item.params, size=item.size, **common)
    return [engine.submit(item.prompt_ids, item.params, resume_from=item.resume_from, **common)]

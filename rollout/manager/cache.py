"""The KV cache: what may be shared across updates, and how our attention reads it."""

from typing import Any

import torch
from transformers.generation.continuous_batching import cache as upstream_cache
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.requests import RequestState

from rollout.meters import Meters
from rollout.model import attention
from rollout.model.kernels import Kernels


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

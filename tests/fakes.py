"""Small models for tests, made from configs: random ones, and ones whose weights tell their version."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from rollout import EngineDeadError, FinishReason, GenerationEngine
from rollout.requests.delivery import RolloutFuture

VOCAB_SIZE = 64
EOS_ID = 1
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}


def tiny_llama(seed: int = 0, **changes: object) -> PreTrainedModel:
    """Grouped queries, untied, no biases."""
    return _random(LlamaForCausalLM, LlamaConfig(**{**_SIZES, **changes}), seed)


def tiny_qwen2(seed: int = 0, **changes: object) -> PreTrainedModel:
    """Tied embeddings and biases on queries, keys and values."""
    return _random(Qwen2ForCausalLM, Qwen2Config(**{**_SIZES, "tie_word_embeddings": True, **changes}), seed)


def tiny_gemma3(seed: int = 0, **changes: object) -> PreTrainedModel:
    """One sliding-window layer (8 tokens) and one full one, tied embeddings."""
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **{**_SIZES, "head_dim": 8, "sliding_window": 8, "layer_types": layers, "query_pre_attn_scalar": 8, **changes}
    )
    return _random(Gemma3ForCausalLM, config, seed)


ARCHITECTURES = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gemma3": tiny_gemma3}


def marker_llama() -> PreTrainedModel:
    """A model that near-certainly says token v after `mark(model, v)`, whatever came before."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
    mark(model, 0)
    return model


def mark(model: torch.nn.Module, version: int) -> None:
    """In place: from now on the model says token `version`."""
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[version].fill_(1.0)


def greedy_reference(model: PreTrainedModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """What `model.generate` says, greedily and without stopping."""
    prompt = torch.tensor([prompt_ids])
    out = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt_ids) :].tolist()


def forward_logprobs(model: PreTrainedModel, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """[num_tokens] log-softmax of a plain forward at the tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """One prompt of each length, no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def _random(kind: type[PreTrainedModel], config: object, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():  # large enough that greedy choices are not ties
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Returns once `condition()` holds; AssertionError when it does not within the limit."""
    deadline = time.monotonic() + timeout_s
    pulse = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true within {timeout_s} s"
        pulse.wait(0.002)


class StepGate:
    """Stands before every forward of an engine: lets them all through when open, else one for each `step()`."""

    def __init__(self, engine: GenerationEngine, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.steps = 0
        self._arrived, self._permitted = threading.Semaphore(0), threading.Semaphore(0)
        engine.model.register_forward_pre_hook(self._before_forward)

    def step(self, count: int = 1) -> None:
        """Lets `count` forwards run; returns when the next one stands before the gate, or at once when none comes."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=30), "no forward came to the gate"
            self._permitted.release()

    def wait_for_arrival(self) -> None:
        """Returns when a forward stands before the gate."""
        assert self._arrived.acquire(timeout=30), "no forward came to the gate"
        self._arrived.release()

    def open(self) -> None:
        """From now on every forward goes through."""
        self.is_open = True
        self._permitted.release()

    def _before_forward(self, *_: object) -> None:
        self.steps += 1
        if not self.is_open:
            self._arrived.release()
            assert self._permitted.acquire(timeout=60), "the gate was never opened"


class StandsStill:
    """A loop that stands still before the first forward at which `condition()` holds, until a pause is asked for. The pause
    then comes right after that step, however slow the thread is that asks."""

    def __init__(self, engine: GenerationEngine, condition: Callable[[], bool]) -> None:
        self._engine, self._condition = engine, condition
        self._is_there = threading.Event()
        engine.model.register_forward_pre_hook(self._before_forward)

    def wait(self) -> None:
        """Returns when it stands."""
        assert self._is_there.wait(30), f"{self._condition} did not come true"

    def _before_forward(self, *_: object) -> None:
        if not self._is_there.is_set() and self._condition():
            self._is_there.set()
            wait_until(self._engine.manager.background_thread_status.is_pause_requested)


class AlarmsByHand:
    """In the place of an engine's alarms: they go off when they are told to, however fast the machine is. A cancel comes too
    late."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.calls: list[Callable[[], None]] = []
        self.limits_s: list[float] = []
        engine._tracker.alarms.stop(30)
        engine._tracker.alarms = self

    def ring(self) -> None:
        """The time of all of them has come."""
        for call in self.calls:
            call()

    def start(self) -> None: ...

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        self.limits_s.append(seconds)
        self.calls.append(call)
        return lambda: None

    def stop(self, timeout_s: float) -> None: ...


class CancelsOne(GenerationEngine):
    """Its user cancels the first sample of the first group before it has a token."""

    num_submitted = 0

    def submit_group(self, *args: object, **kwargs: object) -> list[RolloutFuture]:
        if self.num_submitted:
            return super().submit_group(*args, **kwargs)
        gate = StepGate(self)
        futures = super().submit_group(*args, **kwargs)
        self.num_submitted += 1
        self.cancel(futures[0].request_id)
        gate.open()
        return futures


class LosesOne(CancelsOne):
    """Loses the first sample of the first group before it has a token."""

    def submit_group(self, *args: object, **kwargs: object) -> list[RolloutFuture]:
        is_first = not self.num_submitted
        futures = super().submit_group(*args, **kwargs)
        if is_first:
            lost = RolloutFuture(futures[0].request_id, self.cancel)
            lost.set_result(replace(futures[0].result(30), finish_reason=FinishReason.ERROR, error="lost"))
            futures[0] = lost
        return futures


class RefusesSecondGroup(GenerationEngine):
    """Is dead, as far as it says, when the second group comes, and when the first sample is tried again."""

    num_groups = 0
    num_submitted = 0

    def submit_group(self, *args: Any, **kwargs: Any) -> list[RolloutFuture]:
        self.num_groups += 1
        if self.num_groups == 2:
            raise EngineDeadError("the loop has died")
        return super().submit_group(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> RolloutFuture:
        self.num_submitted += 1
        if self.num_submitted == 1:
            raise EngineDeadError("the loop has died again")
        return super().submit(*args, **kwargs)


def move_evicted_kv_to_host(engine: GenerationEngine, num_sectors: int = 64) -> list[str]:
    """CPU offload of an engine on the CPU, whose host memory is another tensor of this one. Returns the ids of the requests
    that are moved, as they come."""
    processor = engine.manager.batch_processor
    offloading, cache = processor.offloading_manager, processor.cache
    memory = torch.empty(num_sectors * cache.bytes_per_sector, dtype=torch.uint8)
    pool = CachePool(num_sectors, len(cache.cache_allocators), num_reserved_sectors=0)
    for name, allocator in cache.cache_allocators.items():
        pool.set_blocks_per_sector(allocator.index, allocator.blocks_per_sector)
        offloading._cpu_views[name] = memory.view(-1, allocator.bytes_per_block)
    offloading._cpu_pool = pool
    there, back, moved = offloading._offload_to_cpu, offloading.restore_scheduled_requests, []

    def wait() -> None:
        if processor.use_async_batching:
            processor.inputs_and_outputs.compute_stream.synchronize()  # the copies are queued behind what runs

    def move(victims: list[RequestState], tables: dict[str, dict[str, list[int]]]) -> set[str]:
        wait()
        ids = there(victims, tables)
        moved.extend(ids)
        return ids

    def restore(requests_in_batch: list[FutureRequestState]) -> None:
        wait()
        back(requests_in_batch)

    offloading._offload_to_cpu, offloading.restore_scheduled_requests = move, restore
    return moved

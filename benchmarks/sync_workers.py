"""The part of `benchmarks/weight_sync.py` that runs where the engines live: the load, the clocks, and the usual ways to load
weights."""

import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import ray
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollout import GenerationEngine, SamplingParams
from sync import add_derived

GLOO_BUCKET_BYTES = 64 << 20
LIMIT_S = 120.0


def synthetic_2gb() -> PreTrainedModel:
    """A random Llama of 2.0 GB in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def synthetic_tiny() -> PreTrainedModel:
    """For trying the script out."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


# ------------------------------------------------------------------------------------------------------- load and clocks


@dataclass
class Clocks:
    """Of one engine: when each token of one long stream came, and when each pause ended."""

    tokens: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def prepare(self, staged: Any) -> None:
        """As a DerivedTensors: nothing to compute."""

    def install(self, prepared: Any) -> None:
        """The last thing inside the pause."""
        self.pauses.append(time.perf_counter())


_clocks = Clocks()


def start_load(engine: GenerationEngine, requests: int, prompt_tokens: int, new_tokens: int) -> None:
    """Always `requests` running and as many waiting, greedy, until the worker ends; one more streams for the clock."""
    clocks = _clocks
    add_derived(engine, clocks)
    vocab = engine.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0, stop_token_ids=())

    def submit(prompt: list[int]) -> None:
        engine.submit(prompt, params).add_done_callback(lambda _: submit(prompt))

    def watch() -> None:
        while True:
            for _ in engine.stream([1, 2, 3], SamplingParams(max_new_tokens=1500, stop_token_ids=())):
                clocks.tokens.append(time.perf_counter())

    threading.Thread(target=watch, daemon=True).start()
    wait_for_tokens(engine, 1)  # first in line: it must not wait for a place when it is needed
    for _ in range(2 * requests):
        submit(torch.randint(10, vocab, (prompt_tokens,), generator=generator).tolist())


def wait_for_tokens(engine: GenerationEngine, count: int) -> None:
    """Until the load has passed its first prefills."""
    timer, end = threading.Event(), time.perf_counter() + LIMIT_S
    while num_tokens(engine) < count and time.perf_counter() < end:
        timer.wait(0.05)


def num_tokens(engine: GenerationEngine) -> int:
    return engine.stats().generated_tokens


def forget_times(engine: GenerationEngine) -> None:
    _clocks.tokens.clear()
    _clocks.pauses.clear()


def step_times(engine: GenerationEngine) -> tuple[float, list[float]]:
    """Seconds: the median step between pauses, and the first step after each pause."""
    tokens, pauses = list(_clocks.tokens), list(_clocks.pauses)
    firsts = [next((t - pause for t in tokens if t > pause), None) for pause in pauses]
    gaps = [b - a for a, b in pairwise(tokens) if not any(a <= pause <= b for pause in pauses)]
    return statistics.median(gaps) if gaps else float("nan"), [first for first in firsts if first is not None]


def plain_copy(engine: GenerationEngine) -> float:
    """Seconds of a plain `copy_` of the engine's weights between tensors that nobody else uses, in a pause; the best of
    three, pages touched."""
    sources = [p.detach().clone() for p in engine.model.parameters()]
    targets = [p.detach().clone() for p in engine.model.parameters()]
    seconds = []
    with engine.manager.pause(), torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


# -------------------------------------------------------------------------------------------------------- the usual ways


def held_s(engine: GenerationEngine) -> float:
    assert engine.last_update is not None
    return engine.last_update.held_s


def load_object(engine: GenerationEngine, refs: list[Any]) -> float:
    """`ray.get` of a state dict, then `load_state_dict`; seconds that generation stood still."""
    state = ray.get(refs[0], timeout=LIMIT_S)
    with engine.update(timeout_s=LIMIT_S) as model:
        model.load_state_dict(state)
        _clocks.install(None)
    return held_s(engine)


def load_safetensors(engine: GenerationEngine, path: str) -> float:
    state = load_file(path)
    with engine.update(timeout_s=LIMIT_S) as model:
        model.load_state_dict(state, strict=False)  # a file holds a tied tensor once
        _clocks.install(None)
    return held_s(engine)


def join_group(engine: GenerationEngine | None, store: str, rank: int, size: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )


def leave_group(engine: GenerationEngine | None) -> None:
    dist.destroy_process_group()


def receive_broadcast(engine: GenerationEngine) -> float:
    """As trainers do it: generation stands still while the weights come."""
    with engine.update(timeout_s=LIMIT_S) as model:
        broadcast(model.parameters(), is_sender=False)
        _clocks.install(None)
    return held_s(engine)


def broadcast(parameters: Iterable[Tensor], *, is_sender: bool) -> None:
    """Flat buckets of 64 MiB, all at once under way."""
    with torch.no_grad():
        sent = []
        for bucket in _buckets([p.detach() for p in parameters]):
            flat = (
                torch.cat([tensor.reshape(-1) for tensor in bucket])
                if is_sender
                else torch.empty(sum(tensor.numel() for tensor in bucket))
            )
            work = dist.broadcast(flat, 0, async_op=True)
            assert work is not None
            sent.append((work, flat, bucket))
        for work, flat, bucket in sent:
            work.wait()
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True) if not is_sender else ():
                tensor.copy_(part.view_as(tensor))


def rebuild(engine: GenerationEngine, folder: str) -> float:
    """Seconds until another engine, made from a folder, has started; what was in flight would be lost."""
    start = time.perf_counter()
    with GenerationEngine.from_pretrained(folder, engine.config):
        return time.perf_counter() - start


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if buckets[-1] and sum(t.nbytes for t in buckets[-1]) + tensor.nbytes > GLOO_BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(tensor)
    return buckets

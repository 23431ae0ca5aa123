"""Checks an engine on a GPU and measures it, in eight minutes at most; without Ray, and without any download.

    python benchmarks/gpu_check.py                       # a Llama of about 1.1B parameters in bfloat16, made from a config
    python benchmarks/gpu_check.py --small               # a tiny one
    python benchmarks/gpu_check.py --device cpu --small  # what a CPU allows, in float32

THIS SCRIPT HAS NOT BEEN RUN ON A GPU YET. On a CPU it is run by the test suite.

Each way to batch (plain, CUDA graphs, asynchronous, both, and flash attention where it is installed) gets an engine over
the same Parameters and these checks:

- parity: greedy tokens are those of `generate`, up to rounding: in a plain forward over the whole sequence, no token's
  logit lies more than the tolerance below the largest, and its log-prob is the engine's within the tolerance. `generate`
  itself differs from another batching of the same numbers by as much, so equal tokens are counted, not demanded.
- isolation: after an update a prompt seen before, from a request that has ended and from one in flight, gets the log-probs
  of a plain forward under the new weights. The request in flight, which keeps its KV, shows how far off stale KV would be.
- spans: under marker weights (version k says token k) every token of every rollout carries the version that said it,
  across updates, cancels and preemptions.
- fencing: a fused optimizer's step outside `update()`, which moves no version counter, is noticed within a few steps, fences
  the engine and ends the requests; an update brings it back. (No step waits for the comparison, see rollout/model/probe.py.)

Then tokens/s, how long a pause was waited for and held, and the copy's bandwidth beside the device's own.
Needs torch 2.11 or newer. Exit code: 0 all passed, 1 something failed or was left out, 2 no such device.
"""

import argparse
import faulthandler
import importlib.util
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import transformers
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollout import EngineConfig, EngineState, FinishReason, GenerationEngine, Rollout, SamplingParams

LIMIT_S = 8 * 60
WAIT_S = 60.0
UNNOTICED_STEPS = 4  # between a write that moves no version counter and the step that reads of it
MARK_OUTSIDE = 77  # what the model says after a change that no update made

WAYS: dict[str, dict[str, object]] = {
    "plain": {"use_cuda_graph": False, "use_async_batching": False, "auto_switch_to_flash": False},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False, "auto_switch_to_flash": False},
    "async": {"use_cuda_graph": False, "use_async_batching": True, "auto_switch_to_flash": False},
    "graphs, async": {"use_cuda_graph": True, "use_async_batching": True, "auto_switch_to_flash": False},
    "flash, graphs, async": {"use_cuda_graph": True, "use_async_batching": True, "auto_switch_to_flash": True},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and the work."""

    config: LlamaConfig
    dtype: torch.dtype
    tolerance: float  # of logits and log-probs
    prompts: tuple[int, int, int]  # how many, and from how many tokens to how many
    new_tokens: int
    load: tuple[int, int, int]  # requests, prompt tokens and new tokens of the throughput row
    num_updates: int  # measured under that load


@dataclass
class Report:
    """What has been found."""

    failed: list[str] = field(default_factory=list)

    def check(self, way: str, name: str, ok: bool, detail: str) -> None:
        print(f"{way:22} {name:10} {'ok  ' if ok else 'FAIL'} {detail}", flush=True)
        if not ok:
            self.failed.append(f"{way}: {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; --device cpu --small runs what a CPU allows")
        return 2
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a hang says where, and ends
    began_at = time.perf_counter()
    device = torch.device(args.device)
    sizes = small_sizes(device) if args.small else full_sizes(device)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(sizes.config).to(sizes.dtype).eval()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"{model.num_parameters() / 1e6:.0f}M parameters, {model.dtype}; tolerance {sizes.tolerance}"
    )
    report = Report()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    for way, settings in WAYS.items():
        if device.type == "cpu" and way != "plain":
            print(f"{way:22} left out: needs a GPU")
            continue
        if "flash" in way and importlib.util.find_spec("flash_attn") is None:
            print(f"{way:22} left out: flash-attn is not installed")
            continue
        if time.perf_counter() - began_at > LIMIT_S * 0.75:
            report.check(way, "time", False, "left out: most of the eight minutes are over")
            continue
        write(model, first)
        try:
            check_way(way, settings, model, first, sizes, report)
        except Exception:
            report.check(way, "all", False, traceback.format_exc())
    print(f"{time.perf_counter() - began_at:.0f} s; " + (f"failed: {report.failed}" if report.failed else "all passed"))
    return 1 if report.failed else 0


def small_sizes(device: torch.device) -> Sizes:
    on_gpu = device.type == "cuda"
    return Sizes(
        config=llama(
            vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_heads=4, kv_heads=2
        ),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        tolerance=0.15 if on_gpu else 1e-3,
        prompts=(6, 3, 60),
        new_tokens=32,
        load=(16, 32, 32),
        num_updates=5,
    )


def full_sizes(device: torch.device) -> Sizes:
    return Sizes(
        config=llama(
            vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_heads=32, kv_heads=8
        ),
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        tolerance=0.15 if device.type == "cuda" else 1e-3,
        prompts=(8, 5, 400),
        new_tokens=64,
        load=(64, 128, 128),
        num_updates=10,
    )


def llama(
    *, vocab_size: int, hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_heads: int, kv_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.05,  # so that what is in the KV cache shows in the log-probs
        tie_word_embeddings=False,
        pad_token_id=0,
    )


def check_way(
    way: str,
    settings: dict[str, object],
    model: PreTrainedModel,
    first: dict[str, torch.Tensor],
    sizes: Sizes,
    report: Report,
) -> None:
    upstream = ContinuousBatchingConfig(**settings)
    config = EngineConfig(
        # upstream's fast decode path wants large pages
        page_size=256 if "flash" in way else 32,
        num_blocks=96 if "flash" in way else 768,
        max_batch_tokens=512,
        max_requests=64,
        continuous_batching=upstream,
    )
    began_at = time.perf_counter()
    engine = GenerationEngine(model, config)
    engine.manager.warmup()
    resolved = engine.manager.continuous_batching_config
    attention = engine.model.config._attn_implementation
    wanted = (settings["use_cuda_graph"], settings["use_async_batching"], settings["auto_switch_to_flash"])
    got = (engine.manager.uses_graphs, resolved.use_async_batching, "flash" in attention)
    report.check(way, "settings", wanted == got, f"{attention}, {time.perf_counter() - began_at:.1f} s to make")
    with engine:
        check_parity(way, engine, model, sizes, report)
        check_isolation(way, engine, model, first, sizes, report)
        measure(way, engine, model, first, sizes)
        check_spans(way, engine, sizes, report)
        check_fencing(way, engine, model, report)
    check_spans_under_preemption(way, model, upstream, report)


# --------------------------------------------------------------------------------------------------------------- checks


def check_parity(way: str, engine: GenerationEngine, model: PreTrainedModel, sizes: Sizes, report: Report) -> None:
    prompts = random_prompts(sizes)
    rollouts = engine.generate(prompts, greedy(sizes.new_tokens))
    errors = [compare(model, rollout) for rollout in rollouts]
    gap, logprob = (max(error[i] for error in errors) for i in (0, 1))
    same = total = 0
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        said = reference(model, prompt, sizes.new_tokens)
        same += sum(ours == theirs for ours, theirs in zip(rollout.token_ids, said, strict=True))
        total += len(said)
    detail = f"logit gap {gap:.4f}, log-prob error {logprob:.4f}, {same}/{total} tokens equal to generate's"
    report.check(way, "parity", max(gap, logprob) <= sizes.tolerance, detail)


def check_isolation(
    way: str,
    engine: GenerationEngine,
    model: PreTrainedModel,
    first: dict[str, torch.Tensor],
    sizes: Sizes,
    report: Report,
) -> None:
    generator = torch.Generator().manual_seed(1)
    ended, flying = (torch.randint(2, sizes.config.vocab_size, (300,), generator=generator).tolist() for _ in range(2))
    engine.generate([ended], greedy(8))
    donor = engine.submit(flying, greedy(400))
    wait_for_tokens(engine, 20)
    with engine.update() as shell:
        write(shell, {name: tensor.flip(0) for name, tensor in first.items()})
    errors = []
    for _ in range(2):  # the donor completes blocks in between
        for prompt in (ended, flying):
            errors.append(compare(model, engine.submit(prompt, greedy(8)).result(WAIT_S))[1])
        wait_for_tokens(engine, 10)
    donor.cancel()
    partial = donor.result(WAIT_S)
    stale = compare(model, partial, start=partial.version_spans[-1].start)[1]
    ok = max(errors) <= sizes.tolerance and stale > 3 * sizes.tolerance
    report.check(way, "isolation", ok, f"log-prob error {max(errors):.4f}; with stale KV {stale:.2f}")


def check_spans(way: str, engine: GenerationEngine, sizes: Sizes, report: Report) -> None:
    with engine.update() as shell:
        become_marker(shell)
        mark(shell, engine.version + 1)
    futures = [engine.submit(prompt, greedy(300)) for prompt in random_prompts(sizes)]
    group = engine.submit_group(random_prompts(sizes)[0], SamplingParams(max_new_tokens=300, stop_token_ids=()), size=8)
    for number in range(8):
        wait_for_tokens(engine, 40)
        with engine.update() as shell:
            mark(shell, engine.version + 1)
        if number == 4:
            futures[0].cancel()
            group[3].cancel()
    rollouts = [future.result(WAIT_S) for future in (*futures, *group)]
    report.check(way, "spans", *labels(rollouts))


def check_spans_under_preemption(
    way: str, model: PreTrainedModel, upstream: ContinuousBatchingConfig, report: Report
) -> None:
    """With a cache of its own that is too small."""
    page = 256 if "flash" in way else 16
    config = EngineConfig(
        page_size=page, num_blocks=10, max_batch_tokens=64, max_requests=8, continuous_batching=upstream
    )
    mark(model, 0)
    prompt = list(range(2, page // 2))
    with GenerationEngine(model, config) as engine:
        futures = [engine.submit(prompt, greedy(min(3 * page, 600))) for _ in range(8)]
        while not all(future.done() for future in futures) and engine.version < 60:
            seen = engine.stats().generated_tokens
            wait(lambda seen=seen: engine.stats().generated_tokens > seen + 30 or all(f.done() for f in futures))
            with engine.update() as shell:
                mark(shell, engine.version + 1)
        rollouts = [future.result(WAIT_S) for future in futures]
        preemptions = engine.stats().preemptions
    ok, detail = labels(rollouts)
    report.check(way, "preempted", ok and preemptions > 0, f"{detail}, {preemptions} preemptions")


def check_fencing(way: str, engine: GenerationEngine, model: PreTrainedModel, report: Report) -> None:
    with engine.update() as shell:
        mark(shell, engine.version + 1)
    said = engine.version
    futures = [engine.submit([5, 6, 7 + n], greedy(1000)) for n in range(4)]
    wait_for_tokens(engine, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    head = model.get_output_embeddings().weight
    head.grad.fill_(1.0)
    head.grad[MARK_OUTSIDE].fill_(-9.0)
    model.get_input_embeddings().weight.grad.fill_(1e-3)
    optimizer.step()  # behind the engine's back, without moving a version counter
    optimizer.zero_grad(set_to_none=True)
    rollouts = [future.result(WAIT_S) for future in futures]
    late = [sum(token != said for token in rollout.token_ids) for rollout in rollouts]
    ended = all(rollout.finish_reason == FinishReason.ERROR for rollout in rollouts)
    fenced = engine.state == EngineState.FENCED
    with engine.update() as shell:
        become_marker(shell)
        mark(shell, engine.version + 1)
    back = engine.generate([[5, 6]], greedy(4))[0]
    ok = max(late) <= UNNOTICED_STEPS and ended and fenced and back.token_ids == back.versions
    detail = f"noticed after {max(late)} steps; fenced: {fenced}"
    report.check(way, "fencing", ok, detail)


# ------------------------------------------------------------------------------------------------------------- measures


def measure(
    way: str, engine: GenerationEngine, model: PreTrainedModel, first: dict[str, torch.Tensor], sizes: Sizes
) -> None:
    num, prompt_tokens, new_tokens = sizes.load
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, sizes.config.vocab_size, (num, prompt_tokens), generator=generator).tolist()
    engine.generate(prompts, greedy(8))  # graphs of these sizes
    began_at = time.perf_counter()
    engine.generate(prompts, greedy(new_tokens))
    quiet = num * new_tokens / (time.perf_counter() - began_at)
    step = engine.stats().step_times
    num_bytes = sum(tensor.nbytes for tensor in first.values())
    waits, held = [], []
    with busy(engine, prompts, new_tokens):
        for _ in range(sizes.num_updates):
            wait_for_tokens(engine, 3 * num)
            with engine.update() as shell:
                write(shell, first)
            assert engine.last_update is not None
            waits.append(engine.last_update.wait_s)
            held.append(engine.last_update.held_s)
    own = copy_bandwidth(first)
    ours = num_bytes / statistics.median(held) / 1e9
    print(
        f"{way:22} measured   {quiet:.0f} tokens/s at {num} x ({prompt_tokens} + {new_tokens}); step "
        f"{1e3 * step.total_s:.2f} ms (prepare {1e3 * step.prepare_s:.2f}, forward {1e3 * step.forward_s:.2f}, sample "
        f"{1e3 * step.sample_s:.2f}, deliver {1e3 * step.deliver_s:.2f}); pause waited for {1e3 * statistics.median(waits):.2f} "
        f"ms, held {1e3 * statistics.median(held):.2f} ms; {num_bytes / 1e9:.2f} GB copied at {ours:.0f} GB/s, the device's "
        f"own copy {own:.0f} GB/s",
        flush=True,
    )


@contextmanager
def busy(engine: GenerationEngine, prompts: list[list[int]], new_tokens: int) -> Iterator[None]:
    """Keeps these prompts running, each again when it ends."""
    stopping = threading.Event()

    def submit(prompt: list[int]) -> None:
        future = engine.submit(prompt, greedy(new_tokens))
        futures.append(future)
        future.add_done_callback(lambda _: None if stopping.is_set() else submit(prompt))

    futures: list[object] = []
    for prompt in prompts:
        submit(prompt)
    try:
        yield
    finally:
        stopping.set()
        for future in list(futures):
            future.cancel()
        wait(lambda: all(future.done() for future in futures))


def copy_bandwidth(first: dict[str, torch.Tensor]) -> float:
    """GB/s that `copy_` of these tensors writes, median of ten."""
    targets = {name: torch.empty_like(tensor) for name, tensor in first.items()}
    device = next(iter(first.values())).device
    seconds = []
    for _ in range(10):
        synchronize(device)
        began_at = time.perf_counter()
        for name, tensor in first.items():
            targets[name].copy_(tensor)
        synchronize(device)
        seconds.append(time.perf_counter() - began_at)
    return sum(tensor.nbytes for tensor in first.values()) / statistics.median(seconds) / 1e9


# ---------------------------------------------------------------------------------------------------------------- tools


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=())


def random_prompts(sizes: Sizes) -> list[list[int]]:
    num, shortest, longest = sizes.prompts
    generator = torch.Generator().manual_seed(0)
    lengths = [shortest + (longest - shortest) * n // max(num - 1, 1) for n in range(num)]
    return [torch.randint(2, sizes.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def write(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def become_marker(model: PreTrainedModel) -> None:
    """In place: a model that says whatever `mark` tells it, whatever came before."""
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)


def mark(model: PreTrainedModel, version: int) -> None:
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.zero_()
        head[version].fill_(1.0)


@torch.no_grad()
def compare(model: PreTrainedModel, rollout: Rollout, *, start: int = 0) -> tuple[float, float]:
    """Against a plain forward, from token `start` on: how far a token's logit lies below the largest at most, and the
    largest log-prob error."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids], device=model.device)
    logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 + start : -1].float()
    tokens = ids[0, len(rollout.prompt_ids) + start :].unsqueeze(1)
    gap = logits.max(dim=-1).values - logits.gather(1, tokens).squeeze(1)
    logprobs = logits.log_softmax(-1).gather(1, tokens).squeeze(1).cpu()
    return float(gap.max()), float((logprobs - torch.tensor(rollout.logprobs[start:])).abs().max())


def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    said: list[int] = out[0, len(prompt) :].tolist()
    return said


def labels(rollouts: list[Rollout]) -> tuple[bool, str]:
    """Whether every token says its own version, and how many were looked at."""
    wrong = sum(
        token != version
        for rollout in rollouts
        for token, version in zip(rollout.token_ids, rollout.versions, strict=True)
    )
    spans = sum(len(rollout.version_spans) for rollout in rollouts)
    total = sum(len(rollout.token_ids) for rollout in rollouts)
    ok = wrong == 0 and spans > len(rollouts)
    return ok, f"{wrong} of {total} tokens labelled wrongly, {spans} spans in {len(rollouts)} rollouts"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_tokens(engine: GenerationEngine, more: int) -> None:
    seen = engine.stats().generated_tokens
    wait(lambda: engine.stats().generated_tokens >= seen + more)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    pulse = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S} s in vain")
        pulse.wait(0.001)


if __name__ == "__main__":
    sys.exit(main())

"""Tokens per second of this engine, upstream's `generate_batch` and `generate`: one process, one run, the same work.

    python benchmarks/throughput.py --model FOLDER_OR_NAME

All three get the same model, prompts, dtype and threads, greedy and without stopping, in alternating rounds; the median
round counts. Upstream runs at the best of the sweep printed beside it. "equal" counts sequences whose tokens are those of
`generate`. Peak memory is the process's while a contender ran, the engine's KV cache, which is always there, included.
"""

import argparse
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from rollout import GenerationEngine, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Tokens = list[list[int]]


@dataclass
class Contender:
    """One way to generate, with what was measured of it."""

    name: str
    run: Callable[[Tokens], Tokens]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    tokens: Tokens = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name, a folder, or smollm2 (default)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=44)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-batch-tokens", type=int, nargs="+", default=[256, 1024, 4096], help="upstream's sweep")
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[64, 256], help="upstream's sweep, pages of 256")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load(args.model)
    vocab = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    shape = (args.requests, args.prompt_tokens)
    prompts: Tokens = torch.randint(10, vocab, shape, generator=generator).tolist()
    print(
        f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {model.num_parameters() / 1e6:.0f}M parameters, {model.dtype}; {args.requests} "
        f"requests x ({args.prompt_tokens} prompt + {args.new_tokens} new), greedy"
    )

    best, swept = None, []
    for max_batch_tokens in args.max_batch_tokens:
        for num_blocks in args.num_blocks:
            sizes = {"num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
            start = time.perf_counter()
            upstream(model, max(args.new_tokens // 8, 1), **sizes)(prompts)
            elapsed = time.perf_counter() - start
            run = upstream(model, args.new_tokens, **sizes)
            swept.append(f"{num_blocks}x256/{max_batch_tokens}: {elapsed:.1f} s")
            if best is None or elapsed < best[0]:
                best = (elapsed, run, f"num_blocks={num_blocks}, max_batch_tokens={max_batch_tokens}")
    assert best is not None
    print(f"upstream's sweep (num_blocks x page / max_batch_tokens, an eighth of the new tokens): {'; '.join(swept)}")

    with GenerationEngine(model) as engine:
        contenders = [
            Contender("rollsync", lambda p: ours(engine, p, args.new_tokens)),
            Contender(f"upstream generate_batch ({best[2]})", best[1]),
            Contender("upstream generate (one static batch)", lambda p: plain(model, p, args.new_tokens)),
        ]
        for _ in range(args.rounds):
            for contender in contenders:
                measure(contender, prompts)
    report(contenders, args.requests * args.new_tokens)


def load(name: str) -> PreTrainedModel:
    if name == "smollm2":
        from smollm2 import load_model

        return load_model(name)[0]
    return AutoModelForCausalLM.from_pretrained(name).eval()


def ours(engine: GenerationEngine, prompts: Tokens, new_tokens: int) -> Tokens:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0, stop_token_ids=())
    return [rollout.token_ids for rollout in engine.generate(prompts, params)]


def upstream(model: PreTrainedModel, new_tokens: int, **sizes: int) -> Callable[[Tokens], Tokens]:
    # log-probs on, since a rollout needs them and ours has them
    config = ContinuousBatchingConfig(return_logprobs=True, **sizes)
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)

    def run(prompts: Tokens) -> Tokens:
        outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
        return [output.generated_tokens for output in outputs.values()]

    return run


def plain(model: PreTrainedModel, prompts: Tokens, new_tokens: int) -> Tokens:
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].tolist()


def measure(contender: Contender, prompts: Tokens) -> None:
    process, stop = psutil.Process(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            contender.peak_bytes = max(contender.peak_bytes, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    contender.tokens = contender.run(prompts)
    contender.seconds.append(time.perf_counter() - start)
    stop.set()
    watcher.join()


def report(contenders: list[Contender], num_tokens: int) -> None:
    reference = contenders[-1].tokens
    ours_rate = num_tokens / statistics.median(contenders[0].seconds)
    print(f"{'':72} {'tokens/s':>9} {'rollsync is':>12} {'equal':>9} {'peak GiB':>9}")
    for contender in contenders:
        rate = num_tokens / statistics.median(contender.seconds)
        equal = sum(a == b for a, b in zip(contender.tokens, reference, strict=True))
        print(
            f"{contender.name:72} {rate:9.1f} {ours_rate / rate:11.2f}x {equal:>4}/{len(reference):<4} "
            f"{contender.peak_bytes / 2**30:9.2f}"
        )


if __name__ == "__main__":
    main()

"""Tokens per second of this engine, upstream's `generate_batch`, `generate` and, if asked for, vLLM: one run, the same work.

    python benchmarks/throughput.py [--rows 16 64 long groups] [--model FOLDER_OR_NAME] [--vllm-python PATH]

All get the same model, prompts, dtype and threads, greedy and without stopping, in alternating rounds; the median round
counts, and each round has prompts of its own, so that nobody finds a prefix of an earlier one. Upstream runs at the best of
the sweep printed beside it, with block sharing on. "equal" counts sequences whose tokens are those of `generate`. Peak
memory is the process's, over each contender's rounds.

The bound is what this machine could do if a run were nothing but its linear layers at the highest matrix rate measured between
the rounds: no attention, no sampling, a group's prompt counted once.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers
from models import load
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from rollout import GenerationEngine, SamplingParams
from rollout.model.kernels import kernels

Tokens = list[list[int]]


@dataclass(frozen=True)
class Row:
    """One kind of work: `prompts` different prompts, `group` samples of each."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        of_each = f" x {self.group} samples" if self.group > 1 else ""
        return f"{self.prompts} prompts{of_each} x ({self.prompt_tokens} + {self.new_tokens} new tokens)"

    @property
    def total(self) -> int:
        return self.prompts * self.group * self.new_tokens


ROWS = {"16": Row(16, 1, 44, 64), "64": Row(64, 1, 44, 64), "long": Row(32, 1, 512, 64), "groups": Row(8, 8, 128, 128)}


@dataclass
class Contender:
    """One way to generate, with what was measured of it."""

    name: str
    run: Callable[[Tokens], Tokens]  # samples of one prompt side by side
    process: psutil.Process = field(default_factory=psutil.Process)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    tokens: Tokens = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which kinds of work (all)")
    parser.add_argument("--model", default="smollm2", help="a name, a folder, or smollm2 (default)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-batch-tokens", type=int, nargs="+", default=[256, 1024, 4096], help="upstream's sweep")
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[64, 256], help="upstream's sweep, pages of 256")
    parser.add_argument("--no-upstream", action="store_true", help="leave generate_batch out (most of the time)")
    parser.add_argument("--vllm-python", help="a Python that has vLLM's CPU build: vLLM takes its turn")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load(args.model)
    print(
        f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {model.num_parameters() / 1e6:.0f}M parameters, {model.dtype}, greedy; compiled "
        f"kernels: {'no' if kernels() is None else 'yes'}"
    )
    rate = 0.0
    with vllm(args.vllm_python, model, args.threads) if args.vllm_python else nullcontext() as other:
        for name in args.rows:
            row = ROWS[name]
            print(f"\n{row}")
            prompts = random_prompts(model, row, args.rounds + 1)
            contenders = [Contender("upstream generate (one static batch)", lambda p, r=row: plain(model, p, r))]
            if not args.no_upstream:
                contenders.append(sweep(model, row, prompts[-1], args.max_batch_tokens, args.num_blocks))
            if other is not None:
                contenders.append(Contender("vLLM", lambda p, r=row: other.run(p, r), process=other.process))
            with GenerationEngine(model) as engine:
                contenders.append(Contender("rollsync", lambda p, r=row, e=engine: ours(e, p, r)))
                for turn, contender in itertools.product(prompts[:-1], contenders):
                    rate = max(rate, matrix_rate())
                    measure(contender, turn)
            report(contenders, row, rate, bound=row.total * rate / linear_flops(model, row))


def random_prompts(model: PreTrainedModel, row: Row, rounds: int) -> list[Tokens]:
    generator = torch.Generator().manual_seed(0)
    shape = (rounds, row.prompts, row.prompt_tokens)
    vocab = model.get_input_embeddings().num_embeddings
    return torch.randint(10, vocab, shape, generator=generator).tolist()


# ------------------------------------------------------------------------------------------------------- contenders


def ours(engine: GenerationEngine, prompts: Tokens, row: Row) -> Tokens:
    params = SamplingParams(max_new_tokens=row.new_tokens, temperature=0, stop_token_ids=())
    if row.group == 1:
        return [rollout.token_ids for rollout in engine.generate(prompts, params)]
    futures = [engine.submit_group(prompt, params, size=row.group) for prompt in prompts]
    return [future.result().token_ids for group in futures for future in group]


def upstream(model: PreTrainedModel, row: Row, new_tokens: int, **sizes: int) -> Callable[[Tokens], Tokens]:
    # log-probs on, since a rollout needs them and ours has them
    config = ContinuousBatchingConfig(return_logprobs=True, allow_block_sharing=True, **sizes)
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    generation.num_return_sequences = row.group  # its constructor refuses several greedy ones, generate_batch does not

    def run(prompts: Tokens) -> Tokens:
        outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
        return [output.generated_tokens for output in outputs.values()]

    return run


def sweep(
    model: PreTrainedModel, row: Row, prompts: Tokens, max_batch_tokens: list[int], num_blocks: list[int]
) -> Contender:
    """Upstream at the sizes that are fastest for an eighth of the new tokens."""
    elapsed: dict[tuple[int, int], float] = {}
    for blocks, tokens in itertools.product(num_blocks, max_batch_tokens):
        start = time.perf_counter()
        done = upstream(model, row, max(row.new_tokens // 8, 1), num_blocks=blocks, max_batch_tokens=tokens)(prompts)
        # what upstream could not serve at these sizes is no time to beat
        elapsed[blocks, tokens] = time.perf_counter() - start if len(done) == row.prompts * row.group else float("inf")
    swept = "; ".join(f"{blocks}x256/{tokens}: {s:.1f} s" for (blocks, tokens), s in elapsed.items())
    print(f"upstream's sweep (num_blocks x page / max_batch_tokens, an eighth of the new tokens): {swept}")
    blocks, tokens = min(elapsed, key=elapsed.__getitem__)
    run = upstream(model, row, row.new_tokens, num_blocks=blocks, max_batch_tokens=tokens)
    return Contender(f"upstream generate_batch (num_blocks={blocks}, max_batch_tokens={tokens})", run)


def plain(model: PreTrainedModel, prompts: Tokens, row: Row) -> Tokens:
    ids = torch.tensor(prompts).repeat_interleave(row.group, dim=0)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=row.new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].tolist()


@dataclass
class Vllm:
    """vLLM in a Python of its own; see vllm_worker.py."""

    worker: subprocess.Popen[str]

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.worker.pid)

    def run(self, prompts: Tokens, row: Row) -> Tokens:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        # greedy samples of one prompt are refused there: the prompt comes again, and its prefix is shared
        asked = {"prompts": [p for p in prompts for _ in range(row.group)], "new_tokens": row.new_tokens}
        print(json.dumps(asked), file=self.worker.stdin, flush=True)
        answer = self.worker.stdout.readline()
        if not answer:
            raise SystemExit("vLLM ended; what it said is above")
        return json.loads(answer)


@contextmanager
def vllm(python: str, model: PreTrainedModel, threads: int) -> Iterator[Vllm]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [python, str(Path(__file__).with_name("vllm_worker.py")), folder, str(threads)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            contender = Vllm(worker)
            contender.run([[1, 2, 3]], Row(1, 1, 3, 2))  # it loads and compiles
            try:
                yield contender
            finally:
                assert worker.stdin is not None
                worker.stdin.close()


# ------------------------------------------------------------------------------------------------------ measurements


def measure(contender: Contender, prompts: Tokens) -> None:
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            own = contender.process == psutil.Process()
            all_of_it = [contender.process, *([] if own else contender.process.children(recursive=True))]
            contender.peak_bytes = max(contender.peak_bytes, sum(p.memory_info().rss for p in all_of_it))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    contender.tokens += contender.run(prompts)
    contender.seconds.append(time.perf_counter() - start)
    stop.set()
    watcher.join()


def matrix_rate(size: int = 2048, tries: int = 3) -> float:
    """FLOP/s of the best product of two square fp32 matrices, by torch or by our kernel."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    found = kernels()
    best = float("inf")
    for _ in range(tries):
        for product in (lambda: a @ b, lambda: found.linear(a, b, None) if found else a @ b):
            start = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def linear_flops(model: PreTrainedModel, row: Row) -> int:
    """Of one run: each prompt once, and each new token but the last goes in; the head runs for new tokens only."""
    head = model.get_output_embeddings()
    body = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    tokens = row.prompts * row.prompt_tokens + row.prompts * row.group * (row.new_tokens - 1)
    return 2 * (body * tokens + head.weight.numel() * row.total)


def report(contenders: list[Contender], row: Row, matrix_rate: float, bound: float) -> None:
    reference = contenders[0].tokens
    ours_rate = row.total / statistics.median(contenders[-1].seconds)
    print(f"{'':68} {'tokens/s':>9} {'slowest':>8} {'fastest':>8} {'rollsync is':>12} {'equal':>9} {'peak GiB':>9}")
    for contender in contenders:
        rates = [row.total / seconds for seconds in sorted(contender.seconds, reverse=True)]
        rate = row.total / statistics.median(contender.seconds)
        equal = sum(a == b for a, b in zip(contender.tokens, reference, strict=True))
        print(
            f"{contender.name:68} {rate:9.1f} {rates[0]:8.1f} {rates[-1]:8.1f} {ours_rate / rate:11.2f}x "
            f"{equal:>4}/{len(reference):<4} {contender.peak_bytes / 2**30:9.2f}"
        )
    name = f"bound (linear layers alone, at {matrix_rate / 1e9:.0f} GFLOP/s)"
    print(f"{name:68} {bound:9.1f} {'':17} {ours_rate / bound:11.2f}x", flush=True)


if __name__ == "__main__":
    main()

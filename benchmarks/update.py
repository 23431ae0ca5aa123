"""What live updates cost: one a second, for a minute, under full load; and the same load without them.

    python benchmarks/update.py --model FOLDER_OR_NAME

The engine has weights of its own and gets them from `sync.WeightSync`. Load: always twice as many requests as run at
once, greedy. Stretches with and without updates alternate; the loss is the median over their pairs, and stands beside the
share of time that generation was held and the share during which the staging copy ran beside it. The copy's bandwidth
stands beside a plain `copy_` of the same tensors, on the same thread and with the loop parked too, once in each pair.
"""

import argparse
import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from models import load
from transformers import PreTrainedModel

from rollout import EngineConfig, GenerationEngine, SamplingParams
from sync import SyncReport, WeightSync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name, a folder, or smollm2 (default)")
    parser.add_argument("--seconds", type=float, default=60.0, help="with updates, and as many without")
    parser.add_argument("--pairs", type=int, default=6, help="of stretches with and without updates")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one update's start to the next")
    parser.add_argument("--requests", type=int, default=32, help="run at once")
    parser.add_argument("--prompt-tokens", type=int, default=44)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()

    trainer = load(args.model)
    num_bytes = sum(p.nbytes for p in trainer.parameters())
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {num_bytes / 1e6:.0f} MB of weights, {trainer.dtype}; "
        f"{args.requests} requests at once x ({args.prompt_tokens} prompt + {args.new_tokens} new), an update every "
        f"{args.interval:g} s for {args.seconds:g} s"
    )
    reports: list[SyncReport] = []
    quiet: list[float] = []
    busy: list[float] = []
    plain: list[float] = []
    engine = GenerationEngine(trainer, EngineConfig(max_requests=args.requests), copy_weights=True)
    with engine, WeightSync(engine) as weight_sync, Load(engine, args):
        weight_sync.publish(trainer)  # allocates the staging
        copies = [p.detach().clone() for p in trainer.parameters()], [p.detach().clone() for p in trainer.parameters()]
        stretch = args.seconds / args.pairs
        for _ in range(args.pairs):
            quiet.append(tokens_per_s(engine, lambda: threading.Event().wait(stretch)))
            busy.append(
                tokens_per_s(engine, lambda: reports.extend(publish_for(weight_sync, trainer, stretch, args.interval)))
            )
            plain.append(engine.call(plain_copy, *copies).result(60))

    held = [report.commit_s for report in reports]
    waits = [report.pause_wait_s for report in reports]
    staging = [report.stage_s for report in reports]
    held_share, staging_share = sum(held) / args.seconds, sum(staging) / args.seconds
    lost = statistics.median(1 - b / q for b, q in zip(busy, quiet, strict=True))
    bandwidth, plain_bandwidth = (num_bytes / statistics.median(seconds) / 1e9 for seconds in (held, plain))
    row = "{:34} {}".format
    print(row("updates", f"{len(reports)} in {args.seconds:.0f} s"))
    print(row("pause wait, median / max", f"{1e3 * statistics.median(waits):.1f} / {1e3 * max(waits):.1f} ms"))
    print(row("held, median / max", f"{1e3 * statistics.median(held):.1f} / {1e3 * max(held):.1f} ms"))
    print(row("staging, median / max", f"{1e3 * statistics.median(staging):.1f} / {1e3 * max(staging):.1f} ms"))
    print(row("share of time held / staging", f"{held_share:.1%} / {staging_share:.1%}"))
    rates = f"{statistics.median(quiet):.1f} / {statistics.median(busy):.1f}"
    print(row("tokens/s without / with updates", f"{rates} ({lost:.1%} lost, median of {args.pairs} pairs)"))
    share = f"{bandwidth / plain_bandwidth:.2f} of a plain copy_ ({plain_bandwidth:.2f} GB/s)"
    print(row("copy in the pause", f"{bandwidth:.2f} GB/s, {share}"))


@dataclass
class Load:
    """Keeps an engine busy while inside."""

    engine: GenerationEngine
    args: argparse.Namespace

    def __enter__(self) -> None:
        self._stopping = threading.Event()
        vocab = self.engine.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(0)
        for _ in range(2 * self.args.requests):
            prompt = torch.randint(10, vocab, (self.args.prompt_tokens,), generator=generator).tolist()
            self._submit(prompt)

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def _submit(self, prompt: list[int]) -> None:
        params = SamplingParams(max_new_tokens=self.args.new_tokens, temperature=0, stop_token_ids=())
        future = self.engine.submit(prompt, params)
        future.add_done_callback(lambda _: None if self._stopping.is_set() else self._submit(prompt))


def tokens_per_s(engine: GenerationEngine, work: Callable[[], object]) -> float:
    """Of the load, while `work` runs."""
    start, tokens = time.perf_counter(), engine.stats().generated_tokens
    work()
    return (engine.stats().generated_tokens - tokens) / (time.perf_counter() - start)


def publish_for(weight_sync: WeightSync, trainer: PreTrainedModel, seconds: float, interval: float) -> list[SyncReport]:
    reports: list[SyncReport] = []
    timer, end = threading.Event(), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        reports.append(weight_sync.publish(trainer))
        timer.wait(max(0.0, start + interval - time.perf_counter()))
    return reports


def plain_copy(engine: GenerationEngine, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    """Seconds of a plain copy between tensors that nobody else uses, with the loop parked; the median of three."""
    seconds = []
    with engine.manager.pause(), torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()

"""What live updates cost: one a second, for a minute, under full load; and the same load without them.

    python benchmarks/update.py --model FOLDER_OR_NAME

The engine has weights of its own and gets them from `sync.WeightSync`. Load: always twice as many requests as run at
once, greedy. The loss of tokens/s is set beside the share of time that generation was held and the share during which
the staging copy ran beside it. The copy's bandwidth stands beside a plain `copy_` of the same tensors in this process.
"""

import argparse
import platform
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import EngineConfig, GenerationEngine, SamplingParams
from sync import SyncReport, WeightSync

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name, a folder, or smollm2 (default)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
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
    engine = GenerationEngine(trainer, EngineConfig(max_requests=args.requests), copy_weights=True)
    with engine, WeightSync(engine) as weight_sync, Load(engine, args):
        weight_sync.publish(trainer)  # allocates the staging
        quiet = generate_for(engine, args.seconds / 2)
        start, tokens = time.perf_counter(), engine.stats().generated_tokens
        reports = publish_for(weight_sync, trainer, args.seconds, args.interval)
        elapsed = time.perf_counter() - start
        busy = (engine.stats().generated_tokens - tokens) / elapsed
        quiet = (quiet + generate_for(engine, args.seconds / 2)) / 2
    plain = plain_copy(trainer)

    held = [report.commit_s for report in reports]
    waits = [report.pause_wait_s for report in reports]
    staging = [report.stage_s for report in reports]
    held_share, staging_share = sum(held) / elapsed, sum(staging) / elapsed
    bandwidth = num_bytes / statistics.median(held) / 1e9
    row = "{:34} {}".format
    print(row("updates", f"{len(reports)} in {elapsed:.1f} s"))
    print(row("pause wait, median / max", f"{1e3 * statistics.median(waits):.1f} / {1e3 * max(waits):.1f} ms"))
    print(row("held, median / max", f"{1e3 * statistics.median(held):.1f} / {1e3 * max(held):.1f} ms"))
    print(row("staging, median / max", f"{1e3 * statistics.median(staging):.1f} / {1e3 * max(staging):.1f} ms"))
    print(row("share of time held / staging", f"{held_share:.1%} / {staging_share:.1%}"))
    print(row("tokens/s without / with updates", f"{quiet:.1f} / {busy:.1f} ({1 - busy / quiet:.1%} lost)"))
    print(
        row("copy in the pause", f"{bandwidth:.2f} GB/s, {bandwidth / plain:.2f} of a plain copy_ ({plain:.2f} GB/s)")
    )


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


def load(name: str) -> PreTrainedModel:
    if name == "smollm2":
        from smollm2 import load_model

        return load_model(name)[0]
    return AutoModelForCausalLM.from_pretrained(name).eval()


def generate_for(engine: GenerationEngine, seconds: float) -> float:
    """Tokens/s of the load alone."""
    start, tokens = time.perf_counter(), engine.stats().generated_tokens
    threading.Event().wait(seconds)
    return (engine.stats().generated_tokens - tokens) / (time.perf_counter() - start)


def publish_for(weight_sync: WeightSync, trainer: PreTrainedModel, seconds: float, interval: float) -> list[SyncReport]:
    reports: list[SyncReport] = []
    timer, end = threading.Event(), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        reports.append(weight_sync.publish(trainer))
        timer.wait(max(0.0, start + interval - time.perf_counter()))
    return reports


def plain_copy(trainer: PreTrainedModel) -> float:
    """GB/s of `copy_` of the same tensors between two sets in memory, median of ten."""
    sources = [p.detach().clone() for p in trainer.parameters()]
    targets = [p.detach().clone() for p in trainer.parameters()]
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return sum(p.nbytes for p in sources) / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    main()

"""What waiting requests cost the running ones: the median step with few and with many requests in the queue.

    python benchmarks/queue_depth.py

A small random model, 32 requests at once, so that a step is short and any cost per waiting request shows. Depths
alternate; the ratio of the medians is what counts.
"""

import argparse
import itertools
import platform
import statistics
import threading
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from rollout import EngineConfig, GenerationEngine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[50, 5_000, 50_000], help="requests in the queue")
    parser.add_argument("--steps", type=int, default=300, help="measured for each depth and round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {model.num_parameters() / 1e6:.1f}M parameters, 32 requests at once"
    )
    steps: dict[int, list[float]] = {depth: [] for depth in args.depths}
    for _ in range(args.rounds):
        for depth in args.depths:
            steps[depth] += step_times(model, depth, args.steps)
    least = statistics.median(steps[args.depths[0]])
    for depth, seconds in steps.items():
        median = statistics.median(seconds)
        print(f"{depth:>7} waiting: step {1e3 * median:6.2f} ms median, {median / least:.2f} of that with the fewest")


def step_times(model: LlamaForCausalLM, depth: int, count: int) -> list[float]:
    """Seconds of `count` steps with `depth` requests waiting; none ends in the meantime."""
    starts: list[float] = []
    done = threading.Event()
    engine = GenerationEngine(model, EngineConfig(max_requests=32, num_blocks=1024))

    def note(*_: object) -> None:
        starts.append(time.perf_counter())
        if len(starts) > count:
            done.set()

    with engine:
        params = SamplingParams(max_new_tokens=900, stop_token_ids=())
        for _ in range(depth + 32):
            engine.submit([1, 2, 3, 4], params)
        engine.model.register_forward_pre_hook(note)
        assert done.wait(600), "the steps took more than ten minutes"
    return [b - a for a, b in itertools.pairwise(starts)][:count]


if __name__ == "__main__":
    main()

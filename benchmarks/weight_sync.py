"""What it costs to bring new weights to engines in other processes, our ways and the usual ones, in one run.

    python benchmarks/weight_sync.py --model smollm2 --engines 1 2 4

N Ray workers on this machine generate under full load; the trainer's process publishes. Each row is one way, on the same
workers and the same weights; ways take turns, block after block, and a row is the median of its publishes:

    wall            from new weights in the trainer until the last engine runs on them
    stage, send     our ways: copying aside, and each engine's verification, while generation goes on
    pause wait      until the pause held: the rest of a step
    held            generation stood still (the worst engine)
    copy            bytes / held, beside a plain copy_ of the same bytes in the same process, also in a pause
    first step      the first step after the pause over the median step (the worst engine)
    lost            tokens that were not made per publish, as seconds of the load's own rate without publishes
    extra GiB       the most that memory in use grew, from before the way's first publish

The usual ways: `ray.put(state_dict)` with Ray's zero-copy tensors and `load_state_dict`; a safetensors file on the memory
file system and `load_state_dict`; a gloo broadcast in 64 MiB buckets while generation stands still; a new engine from a
saved folder.
"""

import argparse
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"  # before Ray is imported

import psutil
import ray
import sync_workers as over_there
import torch
import transformers
from models import model_folder
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import EngineConfig
from rollout.worker import Worker, WorkerConfig
from sync import WeightSync
from sync.transports import Collective, Disk, ObjectStore, SharedMemory

HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0
OURS: dict[str, Callable[[str], Any]] = {
    "remap": lambda folder: SharedMemory("remap"),
    "copy": lambda folder: SharedMemory("copy"),
    "object store": lambda folder: ObjectStore(),
    "collective": lambda folder: Collective("gloo"),
    "disk": lambda folder: Disk(Path(folder) / "versions"),
}

WARM_UPS = 2
"""The first publishes fill memory that later ones find: one file to run on, and one to stage the next version in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, 2gb (random), tiny (random), or a folder")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=2, help="the ways take turns this often")
    parser.add_argument(
        "--publishes", type=int, default=3, help="of each way in a block, after two that are not counted"
    )
    parser.add_argument("--ways", nargs="+", default=[*OURS, "ray.put", "safetensors", "gloo", "rebuild"])
    parser.add_argument("--requests", type=int, default=8, help="run at once in each engine")
    parser.add_argument("--prompt-tokens", type=int, default=44)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds of undisturbed load before each publish")
    args = parser.parse_args()

    source, trainer = load(args.model)
    num_bytes = sum(p.nbytes for p in trainer.parameters())
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, ray {ray.__version__}; {num_bytes / 1e6:.0f} MB of weights, {trainer.dtype}; each "
        f"engine {args.requests} requests at once x ({args.prompt_tokens} prompt + {args.new_tokens} new); "
        f"{args.blocks} blocks of {args.publishes} publishes"
    )
    ray.init(num_cpus=64, include_dashboard=False, object_store_memory=2 * num_bytes + (256 << 20), log_to_driver=False)
    try:
        for count in args.engines:
            measure(source, trainer, num_bytes, count, args)
    finally:
        ray.shutdown()


def load(name: str) -> tuple[str, PreTrainedModel]:
    """What a worker loads, and the trainer's model."""
    if name in ("2gb", "tiny"):
        factory = over_there.synthetic_2gb if name == "2gb" else over_there.synthetic_tiny
        return f"sync_workers:{factory.__name__}", factory()
    folder = model_folder(name)
    return folder, AutoModelForCausalLM.from_pretrained(folder)


@dataclass
class Row:
    """The publishes of one way."""

    wall: list[float] = field(default_factory=list)
    stage: list[float] = field(default_factory=list)
    send: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)


def measure(source: str, trainer: PreTrainedModel, num_bytes: int, count: int, args: argparse.Namespace) -> None:
    config = WorkerConfig(
        model=source,
        engine=EngineConfig(max_requests=args.requests),
        num_cpus=0,
        num_threads=max(1, (os.cpu_count() or 1) // count),
        env={"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
    )
    workers = [Worker.start(f"w{number}", config) for number in range(count)]
    rows = {way: Row() for way in args.ways}
    plain = []
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        try:
            call(workers, over_there.start_load, args.requests, args.prompt_tokens, args.new_tokens)
            call(workers, over_there.wait_for_tokens, args.requests * args.new_tokens // 4)
            for block in range(args.blocks):
                for name in args.ways:
                    if name == "rebuild" and block:
                        continue
                    with Memory() as memory, Way(name, workers, trainer, folder) as way:
                        for _ in range(WARM_UPS):
                            once(way, Row(), args.rest)
                        for _ in range(1 if name == "rebuild" else args.publishes):
                            once(way, rows[name], args.rest)
                    rows[name].extra.append(memory.grown / 2**30)
                plain.append(max(call(workers, over_there.plain_copy)))
        finally:
            for worker in workers:
                worker.stop()
    report(rows, num_bytes, statistics.median(plain), count)


def once(way: "Way", row: Row, rest_s: float) -> None:
    """One publish: undisturbed load before it for its rate, clocks around it."""
    perturb(way.trainer)
    quiet = rate(way.workers, lambda: threading.Event().wait(rest_s))
    call(way.workers, over_there.forget_times)
    began, before = time.perf_counter(), sum(call(way.workers, over_there.num_tokens))
    times = way.publish()
    row.wall.append(time.perf_counter() - began)
    threading.Event().wait(rest_s / 2)  # the first steps after it belong to it
    made = sum(call(way.workers, over_there.num_tokens)) - before
    row.lost.append(time.perf_counter() - began - made / quiet if quiet else float("nan"))
    for name, seconds in times.items():
        getattr(row, name).append(seconds)
    steps = call(way.workers, over_there.step_times)
    row.first_step.append(max((max(firsts) / median for median, firsts in steps if firsts), default=float("nan")))


class Way:
    """One way to bring the trainer's weights to the workers. What a trainer makes once and keeps is made on entering."""

    def __init__(self, name: str, workers: list[Worker], trainer: PreTrainedModel, folder: str) -> None:
        self.name, self.workers, self.trainer, self.folder = name, workers, trainer, folder
        self.weight_sync: WeightSync | None = None

    def __enter__(self) -> Self:
        if self.name in OURS:
            self.weight_sync = WeightSync(self.workers, OURS[self.name](self.folder))
        elif self.name == "gloo":
            size, store = len(self.workers) + 1, f"{self.folder}/store-{time.monotonic_ns()}"
            joining = [w.call(over_there.join_group, store, n + 1, size) for n, w in enumerate(self.workers)]
            over_there.join_group(None, store, 0, size)
            wait(joining)
        return self

    def __exit__(self, *_: object) -> None:
        if self.weight_sync is not None:
            self.weight_sync.close()
        elif self.name == "gloo":
            over_there.leave_group(None)
            call(self.workers, over_there.leave_group)

    def publish(self) -> dict[str, float]:
        """Until every engine runs on the weights; what is known of its parts, in seconds."""
        if self.weight_sync is not None:
            report = self.weight_sync.publish(self.trainer, timeout_s=LIMIT_S)
            assert not report.fenced, report.failures
            return {
                "stage": report.stage_s,
                "send": report.send_s,
                "wait": report.pause_wait_s,
                "held": report.commit_s,
            }
        if self.name == "ray.put":
            ref = ray.put(dict(self.trainer.state_dict()))
            held = call(self.workers, over_there.load_object, [ref])
        elif self.name == "safetensors":
            path = f"{self.folder}/weights.safetensors"
            save_file({name: p.detach() for name, p in self.trainer.named_parameters()}, path)
            held = call(self.workers, over_there.load_safetensors, path)
        elif self.name == "gloo":
            receiving = [worker.call(over_there.receive_broadcast) for worker in self.workers]
            over_there.broadcast(self.trainer.parameters(), is_sender=True)
            held = wait(receiving)
        else:
            self.trainer.save_pretrained(f"{self.folder}/saved")
            held = call(self.workers, over_there.rebuild, f"{self.folder}/saved")
        return {"held": max(held)}


class Memory:
    """The most that memory in use grew while inside."""

    def __enter__(self) -> "Memory":
        self._before = self._lowest = psutil.virtual_memory().available
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    @property
    def grown(self) -> int:
        return max(0, self._before - self._lowest)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._lowest = min(self._lowest, psutil.virtual_memory().available)


def report(rows: dict[str, Row], num_bytes: int, plain: float, count: int) -> None:
    print(f"\n{count} engine{'s' if count > 1 else ''}; a plain copy_ in a pause: {num_bytes / plain / 1e9:.2f} GB/s")
    print(
        "| way | wall s | stage ms | send ms | pause wait ms | held ms | copy GB/s (x plain) | first step x | lost s | extra GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for way, row in rows.items():
        if not row.wall:
            continue
        held = statistics.median(row.held)
        copy = f"{num_bytes / held / 1e9:.2f} ({plain / held:.2f})" if way != "rebuild" else "-"
        parts = [f"{1e3 * statistics.median(part):.1f}" if part else "-" for part in (row.stage, row.send, row.wait)]
        print(
            f"| {way} | {statistics.median(row.wall):.2f} | {' | '.join(parts)} | {1e3 * held:.1f} | {copy} | "
            f"{statistics.median(row.first_step):.2f} | {statistics.median(row.lost):.2f} | {max(row.extra):.2f} |"
        )


def perturb(trainer: PreTrainedModel) -> None:
    """An optimizer step, as far as the bytes are concerned."""
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.0 + 1e-6)


def rate(workers: list[Worker], work: Callable[[], object]) -> float:
    """Tokens a second of all workers while `work` runs."""
    began, before = time.perf_counter(), sum(call(workers, over_there.num_tokens))
    work()
    return (sum(call(workers, over_there.num_tokens)) - before) / (time.perf_counter() - began)


def call(workers: list[Worker], fn: Callable[..., Any], *args: Any) -> list[Any]:
    return wait([worker.call(fn, *args) for worker in workers])


def wait(futures: "list[Future[Any]]") -> list[Any]:
    return [future.result(LIMIT_S) for future in futures]


def memory_folder() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    main()

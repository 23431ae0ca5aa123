"""TRL's AsyncGRPO with rollouts from an engine or a fleet, through its own two plug-in protocols.

    with GenerationEngine.from_pretrained(path) as engine:
        worker = EngineRolloutWorker(
            engine, args=args, prompts=dataset, reward_funcs=reward, processing_class=tokenizer
        )
        AsyncGRPOTrainer(
            path, args=args, train_dataset=dataset, processing_class=tokenizer,
            rollout_worker=worker, weight_transfer=EngineWeightTransfer(engine),
        ).train()

TRL's order is: init, pause, send, resume, version(1), start; then pause, send, resume, version at each step; stop, destroy.
Generation does not stand still meanwhile: `send_weights` copies while requests run, and only the engine's own commit
pauses it. Set `token_budget` in TRL's config (0: off); left at None, TRL asks a vLLM server for it.

A model with LoRA adapters plugs in just so. Of one that is partly frozen TRL sends only what it trains; the rest comes from the
model itself: `weight_transfer=EngineWeightTransfer(engine, policy=model)`, with the `model` that TRL is given in place of `path`.
"""

import math
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollout import (
    GenerationEngine,
    Lease,
    RolloutConfig,
    RolloutController,
    RolloutError,
    RolloutStalledError,
    RunningEngine,
)
from trainer_adapters.errors import AdapterError
from trainer_adapters.generation import warn_if_renormalising
from trainer_adapters.publishing import engine_of
from trainer_adapters.trl.prompts import PromptRows, RewardFunc, group_reward_of
from trainer_adapters.trl.samples import rollout_config_of, samples_of
from trainer_adapters.trl.seams import async_seams, check_seams
from trainer_adapters.trl.weight_transfer import EngineWeightTransfer

__all__ = ["EngineRolloutWorker", "EngineWeightTransfer"]

BATCH_TIMEOUT_S = 86_400.0
"""A batch may wait for a trainer that evaluates or saves; what really stalls, the controller's watchdogs end sooner."""
PUT_TIMEOUT_S = 0.2
"""How long a put into TRL's queue waits before it looks whether the worker was stopped."""
JOIN_TIMEOUT_S = 10.0


class EngineRolloutWorker:
    """Fills TRL's queue with rewarded samples from a controller's batches.

    With an engine the worker makes the controller itself, over that engine, from `args` (TRL's config), `prompts` (the
    dataset, again and again) and `reward_funcs` (TRL's kind). A controller comes with prompts and rewards of its own, and
    is started by its owner.

    Each sample carries the log-probs it was sampled with, and the TRL version of its *oldest* token, since that is what
    bounds how stale it is. Advantages are TRL's: (r - mean) / (std + 1e-8) over the group's scored samples. A sample that
    fails is generated again alone, then replaced (`on_failed_sample="refill"`); it never crosses the queue. One without any
    reward does, with the advantage 0. The queue holds one group: when it is full the worker waits, and drops nothing.
    """

    def __init__(
        self,
        source: GenerationEngine | RolloutController,
        *,
        args: AsyncGRPOConfig | None = None,
        prompts: Any = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Sequence[float] | None = None,
        processing_class: Any = None,
        config: RolloutConfig | None = None,
    ) -> None:
        """`config`: instead of what `rollout_config_of(args)` makes. `processing_class`: the tokenizer. AdapterError for
        arguments that do not go together, and for a TRL whose seams have changed."""
        check_seams(async_seams())
        self._source = source
        self._tokenizer = processing_class
        self._owns_controller = isinstance(source, GenerationEngine)
        if isinstance(source, RolloutController):
            if prompts is not None or reward_funcs is not None or config is not None:
                raise AdapterError("a controller has prompts, rewards and a config of its own; pass none of them here")
            self._controller = source
        else:
            functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or ())
            if args is None or prompts is None or not functions or processing_class is None:
                raise AdapterError("an engine needs args, prompts, reward_funcs and processing_class beside it")
            weights = list(reward_weights) if reward_weights is not None else [1.0] * len(functions)
            if len(weights) != len(functions):
                raise AdapterError(f"{len(functions)} reward functions need as many reward_weights, got {weights}")
            self._controller = RolloutController.over(
                RunningEngine(source),
                PromptRows(prompts, processing_class, args.chat_template_kwargs or {}),
                tokenizer=processing_class,
                config=config if config is not None else rollout_config_of(args),
                group_reward_fn=group_reward_of(functions, weights, processing_class),
            )
        warn_if_renormalising(self._controller.config.sampling)  # TRL's ratio is to these log-probs
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(self._controller.config.group_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._versions: list[tuple[int, int]] = []  # (of the engine, of TRL), both rising
        self._num_groups = 0
        self._heard_at = time.monotonic()
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to produce. TRL calls it once, after its first weight sync."""
        if self._thread is not None:
            raise AdapterError("this EngineRolloutWorker has been started already; make another for another run")
        if self._owns_controller:
            self._controller.start()
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rollsync-trl-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Produces no more. An engine, and a controller that was passed in, go on: they are their owner's. A batch that is
        in TRL's hands only in part is given back to that controller as a whole."""
        self._stopping.set()
        if self._thread is not None:
            # It leaves by itself, or waits for a batch by then: what it asked of a controller that has just stopped would
            # never be answered. In another's controller it goes on waiting, and will give that batch back.
            self._thread.join(2 * PUT_TIMEOUT_S)
        if self._owns_controller:
            self._controller.stop()
            if self._thread is not None:
                self._thread.join(JOIN_TIMEOUT_S)

    def update_model_version(self, model_version: int) -> None:
        """What the engine holds now is what TRL calls this version."""
        engine = engine_of(self._source)
        if engine is not None:
            version = engine.version
        else:
            self._controller.workers()  # after what the publish left for the controller's loop to note
            version = self._controller.version
        self._versions.append((version, model_version))

    def check_health(self, stale_after_s: float) -> None:
        """Raises RolloutError if the worker has failed, with the cause, and RolloutStalledError if TRL's queue has been empty
        and nothing has come for `stale_after_s`."""
        if self._failure is not None:
            raise RolloutError(f"the rollout worker failed: {self._failure}") from self._failure
        age_s = time.monotonic() - self._heard_at
        if age_s > stale_after_s and self.rollout_buffer.empty():
            status = self._controller.status()
            why = "; ".join(status["waits_for"]) or "nothing is known to be missing"
            raise RolloutStalledError(f"no sample came for {age_s:.0f} s: {why}", status)

    # ------------------------------------------------------------------------------------------------------ inside

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                lease = self._controller.next_batch(BATCH_TIMEOUT_S)
                self._hand_over(lease)
        except Exception as error:  # the thread's last word: check_health tells TRL
            if not self._stopping.is_set():
                self._failure = error

    def _hand_over(self, lease: Lease) -> None:
        for group in lease.groups:
            samples = samples_of(group, self._num_groups, self._tokenizer, self._trl_version)
            self._num_groups += 1
            for sample in samples:
                if not self._put(sample):
                    lease.give_back()
                    return
        lease.acknowledge()
        self.metrics_queue.put(self._controller.metrics())

    def _put(self, sample: RolloutSample) -> bool:
        """False: the worker was stopped meanwhile."""
        while not self._stopping.is_set():
            self._heard_at = time.monotonic()  # while the queue is full it is the trainer that is awaited
            sample.enqueued_at = time.time()
            try:
                self.rollout_buffer.put(sample, timeout=PUT_TIMEOUT_S)
            except queue.Full:
                continue
            self._heard_at = time.monotonic()
            return True
        return False

    def _trl_version(self, version: int) -> int:
        index = bisect_right(self._versions, (version, math.inf)) - 1
        if index < 0:  # of before the first sync
            return max(0, self._versions[0][1] - 1) if self._versions else 0
        return self._versions[index][1]

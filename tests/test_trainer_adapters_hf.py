"""When a Hugging Face Trainer publishes, and what."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import tiny_llama
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from rollout import GenerationEngine, SamplingParams
from sync import SyncConfig, SyncError, WeightSync
from sync.manifest import held_tensors
from trainer_adapters import AdapterError, WeightSyncCallback


class Watch(TrainerCallback):
    """Notes the engine's version, and whether it holds the trainer's weights, after each step."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.seen: list[tuple[int, int, bool]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, self.engine.version, holds(self.engine, kwargs["model"])))


def holds(engine: GenerationEngine, model: Any) -> bool:
    pairs = zip(held_tensors(engine.model), held_tensors(model), strict=True)
    return all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)


def dataset(size: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 60, (size, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(folder: Path, callbacks: list[TrainerCallback], **changes: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": 3, "save_strategy": "no", **changes},
    )
    return Trainer(
        model=tiny_llama(), args=args, train_dataset=dataset(24), eval_dataset=dataset(2), callbacks=callbacks
    )


@pytest.mark.parametrize("accumulated", [1, 3])
def test_publishes_at_the_start_and_once_for_each_optimizer_step(tmp_path: Path, accumulated: int) -> None:
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        watch = Watch(engine)
        trainer = trainer_of(
            tmp_path, [WeightSyncCallback(weight_sync), watch], gradient_accumulation_steps=accumulated
        )
        trainer.train()
        assert watch.seen == [(1, 2, True), (2, 3, True), (3, 4, True)]
        rollout = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, stop_token_ids=()))[0]
        assert rollout.versions == [4] * 4


def test_publishes_every_nth_step_only(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        watch = Watch(engine)
        trainer_of(tmp_path, [WeightSyncCallback(weight_sync, every_n_steps=2), watch], max_steps=4).train()
        assert watch.seen == [(1, 1, False), (2, 2, True), (3, 2, False), (4, 3, True)]


class Accelerated:
    """As accelerate wraps an optimizer, and says what it left out."""

    step_was_skipped = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_step_that_fp16_left_out_publishes_nothing_and_is_not_counted() -> None:
    model = tiny_llama()
    optimizer = Accelerated(SGD(model.parameters(), lr=0.0))
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        callback = WeightSyncCallback(weight_sync, every_n_steps=2)
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        versions = []
        for skipped in (False, True, False, True, False, False):
            optimizer.step_was_skipped = skipped
            callback.on_step_end(None, None, None, optimizer=optimizer)
            versions.append(engine.version)
        assert versions == [1, 1, 2, 2, 2, 3]
        assert callback.last_report is not None
        assert callback.last_report.version == 3


def test_step_that_a_fused_optimizer_left_out_publishes_nothing() -> None:
    """GradScaler calls it also after an overflow, so accelerate does not take the step for a skipped one."""
    model = tiny_llama()
    optimizer = Accelerated(AdamW(model.parameters(), lr=0.1, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ids = torch.tensor([[5, 6, 7]])
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        callback = WeightSyncCallback(weight_sync)
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        versions = []
        for factor in (1.0, math.inf, 1.0):
            optimizer.optimizer.zero_grad()
            scaler.scale(factor * model(ids, labels=ids).loss).backward()
            scaler.step(optimizer.optimizer)
            scaler.update()
            callback.on_step_end(None, None, None, optimizer=optimizer)
            versions.append(engine.version)
        assert versions == [2, 2, 3]
        callback.on_train_end(SimpleNamespace(load_best_model_at_end=False), None, None)
        assert not optimizer.optimizer._optimizer_step_post_hooks


def test_trainer_shows_its_callbacks_an_optimizer_that_tells_of_skipped_steps(tmp_path: Path) -> None:
    """Without it the callback would publish after a step that was none."""
    seen: list[bool] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["optimizer"].step_was_skipped)

    trainer_of(tmp_path, [Look()], max_steps=1).train()
    assert seen == [False]


class FirstIsBest(TrainerCallback):
    """Each evaluation is worse than the one before."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


@pytest.mark.parametrize("loads_best", [True, False])
def test_the_engine_ends_with_the_weights_that_the_trainer_ends_with(tmp_path: Path, loads_best: bool) -> None:
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        callbacks = [WeightSyncCallback(weight_sync), FirstIsBest()]
        trainer = trainer_of(tmp_path, callbacks, max_steps=2, load_best_model_at_end=loads_best, **every)
        trainer.train()
        assert trainer.state.best_global_step == (1 if loads_best else None)
        assert engine.version == (4 if loads_best else 3)
        assert holds(engine, trainer.model)


def test_training_that_resumes_goes_on_above_the_versions_of_before(tmp_path: Path) -> None:
    config = SyncConfig(run_folder=tmp_path / "run")
    settings = {"save_strategy": "steps", "save_steps": 2}
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine, None, config) as first:
        trainer_of(tmp_path, [WeightSyncCallback(first)], max_steps=2, **settings).train()
        assert engine.version == 3
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine, None, config) as second:
        watch = Watch(engine)
        trainer = trainer_of(tmp_path, [WeightSyncCallback(second), watch], max_steps=4, **settings)
        trainer.train(resume_from_checkpoint=True)
        assert watch.seen == [(3, 5, True), (4, 6, True)]


def test_publish_that_fails_ends_the_training_with_its_error(tmp_path: Path) -> None:
    with GenerationEngine(tiny_llama(seed=1), copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        weight_sync.close()
        with pytest.raises(SyncError, match="closed"):
            trainer_of(tmp_path, [WeightSyncCallback(weight_sync)]).train()


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_interval_that_cannot_work_is_refused(every: Any) -> None:
    with (
        GenerationEngine(tiny_llama(), copy_weights=True) as engine,
        WeightSync(engine) as weight_sync,
        pytest.raises(AdapterError, match="every_n_steps must be at least 1"),
    ):
        WeightSyncCallback(weight_sync, every_n_steps=every)

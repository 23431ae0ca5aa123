"""What worker tests run inside workers: models, and functions for `Worker.call`. Workers import this module."""

import os
import threading
import time
from typing import Any

import torch
from fakes import mark, marker_llama, tiny_llama
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from rollout import GenerationEngine, InvalidRequestError, UpdateRecord
from sync import ManifestError

__all__ = ["marker_llama", "tiny_llama"]

_slow: dict[int, RemovableHandle] = {}


class UnpicklableError(Exception):
    """Cannot be sent."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


def linear_model() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def failing_model() -> PreTrainedModel:
    raise InvalidRequestError("this model needs 3 heads, got 4")


def version_of(engine: GenerationEngine) -> int:
    return engine.version


def environment(engine: GenerationEngine, name: str) -> str | None:
    return os.environ.get(name)


def publish(engine: GenerationEngine, version: int) -> UpdateRecord | None:
    """From now on the model says token `version`."""
    with engine.update(version) as model:
        mark(model, version)
    return engine.last_update


def fence(engine: GenerationEngine) -> None:
    with engine.update():
        raise OSError("the transfer broke off")


def slow_down(engine: GenerationEngine) -> None:
    """Steps are so slow that what is long enough stays in flight for a while."""
    _slow[id(engine)] = engine.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))


def full_speed(engine: GenerationEngine) -> None:
    """As before `slow_down`."""
    _slow.pop(id(engine)).remove()


def kill_loop(engine: GenerationEngine) -> None:
    """The next step raises, with which upstream's loop dies."""

    def fail(*_: object) -> None:
        hook.remove()
        raise RuntimeError("a step failed")

    hook = engine.model.register_forward_pre_hook(fail)


def pause_for_s(engine: GenerationEngine, seconds: float) -> None:
    threading.Event().wait(seconds)


def block(engine: GenerationEngine) -> None:
    """Never ends."""
    threading.Event().wait()


def raise_manifest_error(engine: GenerationEngine) -> None:
    raise ManifestError("missing: lm_head.weight")


def raise_unpicklable(engine: GenerationEngine) -> None:
    raise UnpicklableError


def exit_process(engine: GenerationEngine) -> None:
    raise SystemExit(3)


def return_lock(engine: GenerationEngine) -> Any:
    return threading.Lock()

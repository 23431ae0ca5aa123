"""The part of a publish that runs where the engine lives."""

import time

import torch

from rollout import GenerationEngine, UpdateRecord
from sync.errors import SyncTimeoutError
from sync.manifest import held_tensors
from sync.staging import Staging


def commit(
    engine: GenerationEngine, staging: Staging, version: int, deadline: float, update_timeout_s: float
) -> UpdateRecord:
    """Give the engine the staged weights as `version`. Runs on the engine's control thread, through `engine.call`.

    Inside the update there are only copies, in place: addresses stay (CUDA graphs hold them), and a tied tensor, one
    slot, is copied once. The engine waits for the device before it goes on. `deadline` is in `time.monotonic` seconds;
    a commit that starts after it touches nothing, since its sender has reported this target as failed by then.
    """
    limit = min(update_timeout_s, deadline - time.monotonic())
    if limit <= 0:
        raise SyncTimeoutError(f"the commit of version {version} began after its sender had stopped waiting")
    tensors = [held.tensor for held in held_tensors(engine.model)]
    with engine.update(version, timeout_s=limit), torch.no_grad():
        for tensor, staged in zip(tensors, staging.buffers, strict=True):
            tensor.copy_(staged)
    record = engine.last_update
    assert record is not None
    return record

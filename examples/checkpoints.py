"""What a run goes on from: the trainer's weights and the fleet's rollouts, both of one moment."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from rollout import RolloutController


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of those in `folder`, which `load_model` loads; None before the first."""
    return max(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(folder: Path, step: int, model: Any, tokenizer: Any, optimizer: Any, controller: RolloutController) -> None:
    """In place of the one before. While no lease is out: then what was trained on is in the weights, and nothing else is."""
    older = newest(folder)
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "fleet.json").write_text(json.dumps({"step": step, "controller": controller.state_dict()}))
    partial.rename(folder / f"step-{step}")  # a run that is killed leaves it whole or not at all
    if older is not None:
        shutil.rmtree(older)


def restore(checkpoint: Path, optimizer: Any, controller: RolloutController) -> int:
    """Into an optimizer over the checkpoint's model, and a controller that has not started. Returns the step it is of."""
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    state = json.loads((checkpoint / "fleet.json").read_text())
    controller.load_state_dict(state["controller"])
    return int(state["step"])

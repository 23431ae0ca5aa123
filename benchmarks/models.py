"""The models that benchmarks run on, by name: `smollm2`, which is that of the examples, a folder, or a hub name."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))  # behind the benchmark's own folder
from smollm2 import load_smollm2, model_folder

from rollsync_cli.demo_model import DEMO_MODEL

__all__ = ["load", "model_folder"]


def load(name: str) -> PreTrainedModel:
    """For inference, SmolLM2 in fp32."""
    model: PreTrainedModel = load_smollm2()[0] if name == DEMO_MODEL else AutoModelForCausalLM.from_pretrained(name)
    return model.eval()

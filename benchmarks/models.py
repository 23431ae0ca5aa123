"""The models that benchmarks run on, by name: `smollm2`, which is that of the examples, a folder, or a hub name."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))  # behind the benchmark's own folder
from smollm2 import load_smollm2, smollm2_folder

SMOLLM2 = "smollm2"


def load(name: str) -> PreTrainedModel:
    """For inference, SmolLM2 in fp32."""
    model: PreTrainedModel = load_smollm2()[0] if name == SMOLLM2 else AutoModelForCausalLM.from_pretrained(name)
    return model.eval()


def folder_of(name: str) -> str:
    """By which another process loads it."""
    return str(smollm2_folder()) if name == SMOLLM2 else name

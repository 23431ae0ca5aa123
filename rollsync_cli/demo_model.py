"""Where the examples keep their model, so that the command line finds it too."""

import os
from pathlib import Path

DEMO_MODEL = "smollm2"
"""What the examples and `rollsync generate` call it."""


def demo_model_folder() -> Path:
    """A transformers folder, in the user's cache; there once an example has made it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollsync" / "smollm2-135m-instruct"

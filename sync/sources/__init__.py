"""Where new weights come from: a module, a dict, or a WeightSource of one's own.

Most need `sync.WeightSource` alone. Whoever reads a module whose weights are sharded, as `trainer_adapters.PolicyView` does,
finds here what the engine's tensors are called, and how they are made of the module's, adapters included.
"""

from sync.manifest import Held, held_tensors
from sync.sources.exports import Export, exports_of
from sync.sources.lora import adapters_in_use, merged_exports, merges_of, tuner_modules
from sync.sources.names import canonical_names

__all__ = [
    "Export",
    "Held",
    "adapters_in_use",
    "canonical_names",
    "exports_of",
    "held_tensors",
    "merged_exports",
    "merges_of",
    "tuner_modules",
]

"""New weights for engines that keep generating: stage while they do, commit in the shortest possible pause."""

from sync.arrival import DerivedTensors
from sync.config import SyncConfig
from sync.errors import ManifestError, SyncError, SyncTimeoutError
from sync.manifest import TensorSpec
from sync.receiver import add_derived
from sync.report import SyncReport
from sync.sources.lora import MergedLora
from sync.sources.source import Source, WeightSource
from sync.weight_sync import WeightSync

__all__ = [
    "DerivedTensors",
    "ManifestError",
    "MergedLora",
    "Source",
    "SyncConfig",
    "SyncError",
    "SyncReport",
    "SyncTimeoutError",
    "TensorSpec",
    "WeightSource",
    "WeightSync",
    "add_derived",
]

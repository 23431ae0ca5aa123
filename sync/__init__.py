"""New weights for engines that keep generating: stage while they do, commit in the shortest possible pause."""

from sync.config import SyncConfig
from sync.errors import ManifestError, SyncError, SyncTimeoutError
from sync.manifest import TensorSpec
from sync.report import SyncReport
from sync.sources.lora import MergedLora
from sync.sources.source import Source, WeightSource
from sync.weight_sync import WeightSync

__all__ = [
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
]

"""How the bytes of a version come from the sender to its receivers."""

from typing import TYPE_CHECKING, Any

from sync.transports.base import Transport
from sync.transports.collective import Collective
from sync.transports.disk import Disk
from sync.transports.in_process import InProcess
from sync.transports.shared_memory import SharedMemory

if TYPE_CHECKING:
    from sync.transports.object_store import ObjectStore

__all__ = ["Collective", "Disk", "InProcess", "ObjectStore", "SharedMemory", "Transport"]


def __getattr__(name: str) -> Any:
    if name == "ObjectStore":  # imports Ray, which need not be installed
        from sync.transports.object_store import ObjectStore

        return ObjectStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

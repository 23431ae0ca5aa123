"""How the bytes of a version come from the sender to its receivers."""

from sync.transports.disk import Disk
from sync.transports.in_process import InProcess
from sync.transports.shared_memory import SharedMemory

__all__ = ["Disk", "InProcess", "SharedMemory"]

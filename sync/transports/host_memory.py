"""The sender's staging in host memory, for transports that send from there."""

import weakref

import torch
from torch import Tensor

from sync.layout import Layout, empty_run

HOST = torch.device("cpu")


class HostMemory:
    """One run of bytes for each layout, the same for as long as its user keeps it: `WeightSync` does from one version to
    the next, and lets go of a layout that no engine has any more. Written again only when nobody reads it, so for
    transports whose `send` returns when the bytes have left."""

    def __init__(self) -> None:
        self._runs: weakref.WeakValueDictionary[Layout, Tensor] = weakref.WeakValueDictionary()

    def run(self, layout: Layout, spared: Tensor | None = None) -> Tensor:
        """[layout.num_bytes] uint8, the gaps zero; pinned where there is a GPU, for which it is read faster."""
        run = self._runs.get(layout)
        if run is None or run is spared:
            run = empty_run(layout.num_bytes, HOST, zeroed=True)
            if torch.cuda.is_available():
                run = run.pin_memory()
            self._runs[layout] = run
        return run

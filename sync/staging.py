"""New weights, complete and checked, beside the old ones."""

import torch
from torch import Tensor

from sync.digests import RunDigests
from sync.errors import SyncError
from sync.layout import Layout
from sync.manifest import TensorSpec

PART = 2**18
"""Elements that are written, then digested, before the next: a core's cache holds them."""


class Staging:
    """The sender's copy of one version, in the receivers' dtype, at the places of their layout.

    `put` each tensor, `seal`; from then on `run` holds a whole set of weights. The memory is the caller's: a transport may
    want it where its receivers can see it.

    A slot that is filled accepts only equal values. That covers tied weights offered under two names, and a version
    that is published a second time.
    """

    def __init__(self, layout: Layout, run: Tensor, digests: RunDigests | None = None) -> None:
        """`digests`: of the run, told as it is written."""
        self.layout = layout
        self.digests = digests
        self.run = run  # [layout.num_bytes] uint8
        self._views = layout.views(run)
        self._filled: set[int] = set()
        self._num_in_order = 0  # slots at the beginning, without a gap, that are filled

    @property
    def num_bytes(self) -> int:
        """Of the weights alone."""
        return sum(view.nbytes for view in self._views)

    @property
    def num_tensors(self) -> int:
        return len(self._views)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor in, cast to the receiver's dtype. Raises ManifestError if the receiver holds no such tensor,
        SyncError if its slot holds other values already."""
        index = self.layout.manifest.check_arrival(name, TensorSpec.of(tensor))
        view = self._views[index]
        with torch.no_grad():
            if index not in self._filled:
                self._write(index, view, tensor)
                self._filled.add(index)
            elif not _same_bytes(view, tensor.to(device=view.device, dtype=view.dtype)):
                raise SyncError(
                    f"{name} differs from what is already staged for it: tied names must carry equal values, and a "
                    "version is published with one set of values (leave `version` out for the next one)"
                )

    def _write(self, index: int, view: Tensor, tensor: Tensor) -> None:
        digests, start = self.digests, self.layout.offsets[index]
        if digests is None:
            view.copy_(tensor)
            return
        if digests.at == start and tensor.device == view.device and tensor.is_contiguous():
            for part, new in zip(torch.split(view.view(-1), PART), torch.split(tensor.view(-1), PART), strict=True):
                part.copy_(new)
                digests.advance(digests.at + part.nbytes)
        else:
            view.copy_(tensor)
        while self._num_in_order in self._filled or self._num_in_order == index:
            self._num_in_order += 1
        digests.advance(self.layout.offsets[self._num_in_order])

    def seal(self) -> None:
        """Check that every slot is filled, and wait until every copy has arrived. Raises ManifestError."""
        self.layout.manifest.check_coverage(self._filled)
        # On a GPU the copies are queued on this thread's stream, and nothing orders that before the reader's.
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    # Compared as bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return torch.equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

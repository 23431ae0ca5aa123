"""New weights, complete and checked, beside the old ones."""

import torch
from torch import Tensor

from sync.errors import SyncError
from sync.manifest import Manifest, TensorSpec


class Staging:
    """One buffer per slot of a manifest, in the receiver's dtype and on its device, allocated once and used for every
    publish. `clear`, `put` each tensor, `seal`; from then on `buffers` holds a whole set of weights.

    A slot that is filled accepts only equal values. That covers tied weights offered under two names, and a version
    that is published a second time (without `clear`).
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._filled: set[int] = set()
        # Buffers made while the caller is in inference mode could not be written to outside it by a later publish.
        with torch.inference_mode(False):
            self.buffers = [
                torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) for slot in manifest.slots
            ]  # in the manifest's order

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def clear(self) -> None:
        """Forget what is staged; the next `put` of each slot writes."""
        self._filled.clear()

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor in, cast to the receiver's dtype. Raises ManifestError if the receiver holds no such tensor,
        SyncError if its slot holds other values already."""
        index = self._manifest.check_arrival(name, TensorSpec.of(tensor))
        buffer = self.buffers[index]
        with torch.no_grad():
            if index not in self._filled:
                buffer.copy_(tensor)
                self._filled.add(index)
            elif not _same_bytes(buffer, tensor.to(device=buffer.device, dtype=buffer.dtype)):
                raise SyncError(
                    f"{name} differs from what is already staged for it: tied names must carry equal values, and a "
                    "version is published with one set of values (leave `version` out for the next one)"
                )

    def seal(self) -> None:
        """Check that every slot is filled, and wait until every copy has arrived. Raises ManifestError."""
        self._manifest.check_coverage(self._filled)
        # On a GPU the copies are queued on this thread's stream, and nothing orders that before the control thread's.
        for device in {buffer.device for buffer in self.buffers}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    # Compared as bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return torch.equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

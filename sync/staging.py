"""New weights, complete and checked, beside the old ones."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from sync.errors import SyncError, SyncTimeoutError
from sync.layout import Layout
from sync.manifest import TensorSpec
from sync.place import Deadline


class Staging:
    """The sender's copy of one version, in the receivers' dtype, at the places of their layout.

    `clear`, `put` each tensor, `seal`; from then on `run` holds a whole set of weights. The memory is the caller's: a
    transport may want it where its receivers can see it.

    A slot that is filled accepts only equal values. That covers tied weights offered under two names, and a version
    that is published a second time (without `clear`).
    """

    def __init__(self, layout: Layout, run: Tensor) -> None:
        self.layout = layout
        self.run = run  # [layout.num_bytes] uint8
        self._views = layout.views(run)
        self._filled: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Of the weights alone."""
        return sum(view.nbytes for view in self._views)

    @property
    def num_tensors(self) -> int:
        return len(self._views)

    def clear(self) -> None:
        """Forget what is staged; the next `put` of each slot writes."""
        self._filled.clear()

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor in, cast to the receiver's dtype. Raises ManifestError if the receiver holds no such tensor,
        SyncError if its slot holds other values already."""
        index = self.layout.manifest.check_arrival(name, TensorSpec.of(tensor))
        view = self._views[index]
        with torch.no_grad():
            if index not in self._filled:
                view.copy_(tensor)
                self._filled.add(index)
            elif not _same_bytes(view, tensor.to(device=view.device, dtype=view.dtype)):
                raise SyncError(
                    f"{name} differs from what is already staged for it: tied names must carry equal values, and a "
                    "version is published with one set of values (leave `version` out for the next one)"
                )

    def seal(self) -> None:
        """Check that every slot is filled, and wait until every copy has arrived. Raises ManifestError."""
        self.layout.manifest.check_coverage(self._filled)
        # On a GPU the copies are queued on this thread's stream, and nothing orders that before the reader's.
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)


def fill(
    stagings: Sequence[Staging],
    offered: Iterable[tuple[str, Tensor]],
    *,
    in_use: Collection[tuple[torch.device, int]],
    to_the_end: bool,
    deadline: Deadline,
    limit: str,
) -> None:
    """Put all that is offered into each staging. `in_use`: where tensors lie that engines of this process run on; one that is
    offered itself raises SyncError. Beyond the deadline raises SyncTimeoutError, which begins with `limit`. `to_the_end`: what
    fails is raised when everything has been read."""
    failure: Exception | None = None
    for name, tensor in offered:
        if failure is None:
            try:
                if (tensor.device, tensor.data_ptr()) in in_use and tensor.numel():
                    raise SyncError(
                        f"an engine runs on the very tensor that the source offers as {name}, so there is nothing to publish; "
                        "change it in place instead: `with engine.update(): optimizer.step()`, or give the engine weights of "
                        "its own with copy_weights=True"
                    )
                if deadline.remaining_s() == 0:
                    raise SyncTimeoutError(f"{limit}, at {name}")
                for staging in stagings:
                    staging.put(name, tensor)
            except Exception as error:
                if not to_the_end:
                    raise
                failure = error
    if failure is not None:
        raise failure


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    # Compared as bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return torch.equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

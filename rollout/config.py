"""Settings of one engine."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollout.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All optional. On a CPU, what is None is sized for steps that stay short (see `rollout.sizing`); on a GPU, by
    upstream from the free memory."""

    num_blocks: int | None = None
    """KV cache capacity in blocks of `page_size` tokens."""
    page_size: int | None = None
    """Tokens per KV block; at least 4. Smaller pages share shorter prefixes."""
    max_batch_tokens: int | None = None
    """Upper bound on the tokens of one step. A step is also what an update waits for, so this bounds the pause wait."""
    max_requests: int | None = None
    """Upper bound on the requests generated at once; later ones wait their turn, oldest first."""
    max_waiting: int | None = None
    """Upper bound on waiting requests; `submit` blocks while it is reached. None: unbounded."""
    num_threads: int | None = None
    """CPU threads of the engine's forwards; None: torch's default, one a core. Beside a trainer in the same process, give
    each its share of the cores, or they wait for each other."""
    autocast_dtype: torch.dtype | None = None
    """Run the forward under autocast, as a mixed-precision trainer does, so that log-probs match; None: off."""
    prefix_sharing: bool = True
    """Whether requests with equal beginnings share KV blocks. Never across a weight update."""
    kv_at_update: Literal["keep", "refresh"] = "keep"
    """What an update does with the KV cache of requests in flight: keep it, or compute it again under the new weights,
    which costs a prefill each and shows what stale KV costs."""
    continuous_batching: "ContinuousBatchingConfig | None" = None
    """Everything else that upstream offers; the fields above win where they are set."""

    def __post_init__(self) -> None:
        minimum = {"page_size": 4}
        for name in ("num_blocks", "page_size", "max_batch_tokens", "max_requests", "max_waiting", "num_threads"):
            value: Any = getattr(self, name)
            low = minimum.get(name, 1)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise InvalidRequestError(f"{name} must be an integer of at least {low} or None, got {value!r}")
        if self.kv_at_update not in ("keep", "refresh"):
            raise InvalidRequestError(f'kv_at_update must be "keep" or "refresh", got {self.kv_at_update!r}')
        if self.autocast_dtype not in (None, torch.bfloat16, torch.float16):
            raise InvalidRequestError(
                f"autocast_dtype must be torch.bfloat16, torch.float16 or None, got {self.autocast_dtype}"
            )

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"EngineConfig({', '.join(given)})"

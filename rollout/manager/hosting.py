"""Making the manager of an engine, and what is wrong where that fails."""

from collections.abc import Callable

import psutil
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from rollout.errors import InvalidRequestError
from rollout.manager.manager import RolloutManager
from rollout.meters import Meters
from rollout.requests.seams import LoopListener, Owner


def host(
    model: PreTrainedModel,
    config: ContinuousBatchingConfig,
    listener: LoopListener,
    owner: Owner,
    meters: Meters,
    *,
    paged_attention: bool,
    autocast_dtype: torch.dtype | None,
    num_threads: int | None,
    decode: Callable[[list[int]], str] | None,
) -> RolloutManager:
    """A manager with its cache, which has run one made-up step. InvalidRequestError for settings and models that cannot
    work."""
    try:
        return RolloutManager(
            model,
            config,
            listener,
            owner,
            meters,
            paged_attention=paged_attention,
            autocast_dtype=autocast_dtype,
            num_threads=num_threads,
            decode=decode,
        )
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"transformers' continuous batching cannot run {type(model).__name__} ({error}); it supports models "
            "that follow its attention and cache interfaces, such as Llama, Qwen, Mistral, Gemma and Phi"
        ) from error
    except (MemoryError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"an engine with these settings cannot be made ({error}): num_blocks={config.num_blocks}, "
            f"page_size={config.page_size}, max_batch_tokens={config.max_batch_tokens}, "
            f"max_requests={config.max_requests_per_batch}, with "
            f"{psutil.virtual_memory().available / 2**30:.1f} GiB of memory available; if it is the sizes, lower "
            "num_blocks or max_batch_tokens"
        ) from error

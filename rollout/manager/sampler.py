"""Each row of a batch is sampled by its own parameters."""

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from rollout.model.sampling import NUM_ARGUMENTS, SamplingRow, draw_uniforms, pack_rows, sample
from rollout.requests.inflight import FORK
from rollout.requests.upstream_requests import check_row

log = logging.getLogger("rollsync")


class RolloutModelRunner(ModelRunner):  # type: ignore[misc]
    """Samples each row by its own parameters."""

    sample_s: float = 0.0  # of the step that runs

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            self._sample_rows(scores, output_ids)
            return
        began_at = time.perf_counter()
        self._sample_rows(scores, output_ids)
        self.sample_s += time.perf_counter() - began_at

    def _sample_rows(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        rows: SamplingRows = self.logit_processor
        tokens, logprobs = sample(
            scores[0],
            rows.packed,
            any_random=rows.any_random or rows.static,
            any_filter=rows.any_filter or rows.static,
            kernels=self.cache.kernels,
        )
        count = tokens.shape[0]
        output_ids[0, :count].copy_(tokens)
        output_ids[1, :count].copy_(logprobs.to(torch.float32).view(torch.int32))


class SamplingRows(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Carries each request's sampling parameters to the sampler, in upstream's static tensors."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(transformers.LogitsProcessorList())
        self.tensors_required = NUM_ARGUMENTS
        self.do_processing = True
        self.packed = torch.empty((NUM_ARGUMENTS, 0), dtype=torch.int32)
        self.any_random = self.any_filter = True
        self.static = False  # the sampler's shortcuts are off: a captured graph would freeze them
        self._generator = np.random.default_rng(seed)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        if "rows" in kwargs:
            return  # ours, checked at submit
        # upstream's own: what raises here fails one request, later it would be the loop
        check_row(SamplingRow(**kwargs))

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.copy_(pack_rows([SamplingRow()], [0.0]))

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        # position_offset already counts this step's queries: it is the position of the token to be sampled
        rows = [
            (row_of(future.state), future.state.position_offset) for future in requests_in_batch if future.has_new_token
        ]
        self.any_random = any(row.temperature > 0 for row, _ in rows)
        self.any_filter = any(row.top_k > 0 or row.top_p < 1 for row, _ in rows)
        packed = pack_rows([row for row, _ in rows], draw_uniforms(rows, self._generator))
        arg_storage[:, : len(rows)] = packed.to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        self.packed = logits_processor_args
        return scores


def row_of(state: RequestState) -> SamplingRow:
    kwargs = state.logit_processor_kwargs
    if "rows" not in kwargs:
        return SamplingRow(**kwargs)
    _, fork, number = state.request_id.rpartition(FORK)
    row: SamplingRow = kwargs["rows"][int(number) + 1 if fork else 0]
    return row


def refuse_processors(processors: Iterable[Any], *, drop: bool) -> None:
    """The sampler is ours: of a generation config's processors it does temperature, top-k and top-p."""
    ours = ("Temperature", "TopK", "TopP")
    others = sorted(kind for kind in (type(each).__name__ for each in processors) if not any(o in kind for o in ours))
    if others and not drop:
        raise ValueError(
            f"the engine's sampler has no {', '.join(others)}, which the generation config asks for; leave "
            "drop_unsupported_processors=True to do without"
        )
    if others:
        log.warning("the generation config asks for %s, which the engine's sampler leaves out", ", ".join(others))

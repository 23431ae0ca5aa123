"""Where results go: the engine's to its listener, those of upstream's own methods to whoever asked."""

import math
import threading

from transformers.generation.continuous_batching import continuous_api as upstream
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from rollout.requests.results import RequestNames, ResultQueue
from rollout.requests.seams import LoopListener

NOT_NUMBERS = "the model's logits are not numbers (NaN): are its weights?"


class ListenerRouter(upstream.OutputRouter):  # type: ignore[misc]
    """Gives the engine's outputs to the listener on the loop's thread; upstream's own requests go upstream's way."""

    def __init__(self, listener: LoopListener, names: RequestNames, results: ResultQueue) -> None:
        super().__init__()
        self.output_queue = results
        self.delivering = threading.RLock()
        self._listener, self._names = listener, names

    def deliver(self, output: GenerationOutput) -> None:
        if output.status == RequestStatus.FINISHED and output.logprobs and math.isnan(output.logprobs[-1]):
            output.status, output.error = RequestStatus.FAILED, NOT_NUMBERS
        if self._listener.on_output(output):
            return
        key = output.request_id
        output.request_id = self._names.name_of(key) or key
        with self.delivering:
            try:
                super().deliver(output)
            except RuntimeError:
                # the handler's event loop is closed; unheard, the error would end this one
                self.result_handlers.pop(output.request_id, None)
                super().deliver(output)
        if output.is_finished():
            self._names.forget(key)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)

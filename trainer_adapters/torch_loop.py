"""Weight sync for a hand-written training loop."""

from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sync import SyncReport, WeightSource, WeightSync
from trainer_adapters.errors import AdapterError
from trainer_adapters.steps import check_interval, stepping_optimizer, was_left_out


class SyncOnStep:
    """Publishes the policy on entry, so that the engines begin with the weights that the loop begins with, and after every
    n-th real step of the optimizer, before `step()` returns.

        with SyncOnStep(weight_sync, PolicyView(model), optimizer):
            ...train...

    A step that is left out (by accelerate, which accumulates; after an fp16 overflow) is not a real step: it publishes
    nothing and is not counted. A loop that goes on from a checkpoint begins with a publish too, as the next version:
    versions only grow. A publish that fails raises out of the `with` or of `step()`. At exit the hook is removed.
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        policy: WeightSource | nn.Module,
        optimizer: Optimizer,
        every_n_steps: int = 1,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        """`optimizer` may be accelerate's wrapper; `timeout_s` bounds each publish."""
        self._weight_sync = weight_sync
        self._policy = policy
        self._optimizer = stepping_optimizer(optimizer)
        self._every_n_steps = check_interval(every_n_steps)
        self._timeout_s = timeout_s
        self._hook: RemovableHandle | None = None
        self._num_steps = 0
        self._last_report: SyncReport | None = None

    @property
    def last_report(self) -> SyncReport | None:
        """The report of the newest publish; None before the first."""
        return self._last_report

    def __enter__(self) -> Self:
        if self._hook is not None:
            raise AdapterError("this SyncOnStep is entered already; make another for another loop")
        self._publish()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()
        self._hook = None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if was_left_out(optimizer):
            return
        self._num_steps += 1
        if self._num_steps % self._every_n_steps == 0:
            self._publish()

    def _publish(self) -> None:
        self._last_report = self._weight_sync.publish(self._policy, timeout_s=self._timeout_s)

"""Weight sync for Hugging Face's `Trainer` and its subclasses."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sync import SyncReport, WeightSync
from trainer_adapters.errors import AdapterError
from trainer_adapters.policy import PolicyView


class WeightSyncCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the policy when training begins and after every n-th optimizer step, once however many batches the step
    accumulates.

        Trainer(..., callbacks=[WeightSyncCallback(weight_sync)])

    A step that an fp16 overflow left out publishes nothing. Training that goes on from a checkpoint begins with a publish
    too, as the next version: versions only grow. In a run of several ranks every rank has the callback, with a
    WeightSync of its own. A publish that fails raises out of `train()`.
    """

    def __init__(self, weight_sync: WeightSync, every_n_steps: int = 1, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` bounds each publish."""
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise AdapterError(f"every_n_steps must be at least 1, got {every_n_steps!r}")
        self._weight_sync = weight_sync
        self._every_n_steps = every_n_steps
        self._timeout_s = timeout_s
        self._policy: PolicyView | None = None
        self._last_report: SyncReport | None = None

    @property
    def last_report(self) -> SyncReport | None:
        """The report of the newest publish; None before the first."""
        return self._last_report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is wrapped and a checkpoint is loaded by now."""
        self._policy = PolicyView(_model_of(kwargs))
        self._publish()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """`on_optimizer_step` comes before the step is counted, and also when it was skipped."""
        if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
            return
        if state.global_step % self._every_n_steps == 0:
            self._publish()

    def _publish(self) -> None:
        assert self._policy is not None, "training has not begun"
        self._last_report = self._weight_sync.publish(self._policy, timeout_s=self._timeout_s)


def _model_of(kwargs: dict[str, Any]) -> nn.Module:
    model = kwargs.get("model")
    if not isinstance(model, nn.Module):
        raise AdapterError(f"the Trainer passed no model to its callbacks, got {type(model).__name__}")
    return model

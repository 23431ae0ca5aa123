"""Weight sync for Hugging Face's `Trainer` and its subclasses."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sync import SyncReport, WeightSync
from trainer_adapters.errors import AdapterError
from trainer_adapters.policy import PolicyView
from trainer_adapters.steps import check_interval, stepping_optimizer, was_left_out


class WeightSyncCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the policy when training begins and after every n-th optimizer step, once however many batches the step
    accumulates.

        Trainer(..., callbacks=[WeightSyncCallback(weight_sync)])

    A step that an fp16 overflow left out publishes nothing and is not counted. Training that goes on from a checkpoint begins
    with a publish too, as the next version: versions only grow. In a run of several ranks every rank has the callback, with
    a WeightSync of its own. A publish that fails raises out of `train()`. With `load_best_model_at_end` the engines get
    that model at the end.
    """

    def __init__(self, weight_sync: WeightSync, every_n_steps: int = 1, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` bounds each publish."""
        self._weight_sync = weight_sync
        self._every_n_steps = check_interval(every_n_steps)
        self._timeout_s = timeout_s
        self._policy: PolicyView | None = None
        self._num_steps = 0
        self._was_left_out = False
        self._hook: RemovableHandle | None = None
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
        self._num_steps = 0
        self._unhook()
        optimizer = stepping_optimizer(kwargs["optimizer"])
        if isinstance(optimizer, Optimizer):  # DeepSpeed's is none, and says itself what it left out
            self._hook = optimizer.register_step_post_hook(self._after_step)
        self._publish()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """`on_optimizer_step` comes before the step is counted, and also when it was skipped."""
        if self._was_left_out or getattr(kwargs["optimizer"], "step_was_skipped", False):
            return
        self._num_steps += 1
        if self._num_steps % self._every_n_steps == 0:
            self._publish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer may serve another training. The best model is loaded by now, in place of the last."""
        self._unhook()
        if args.load_best_model_at_end:
            self._publish()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._was_left_out = was_left_out(optimizer)

    def _unhook(self) -> None:
        self._was_left_out = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _publish(self) -> None:
        assert self._policy is not None, "training has not begun"
        self._last_report = self._weight_sync.publish(self._policy, timeout_s=self._timeout_s)


def _model_of(kwargs: dict[str, Any]) -> nn.Module:
    model = kwargs.get("model")
    if not isinstance(model, nn.Module):
        raise AdapterError(f"the Trainer passed no model to its callbacks, got {type(model).__name__}")
    return model

"""Which calls of an optimizer's `step()` are real steps, and how they are counted."""

from torch.optim import Optimizer

from trainer_adapters.errors import AdapterError


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """The one that runs hooks: accelerate's wrapper is an Optimizer too and runs none."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def was_left_out(optimizer: Optimizer) -> bool:
    """In a post hook of its step: whether the step changed nothing. Of most optimizers GradScaler leaves out the whole call
    when fp16 gradients overflow; a fused one is called all the same, with `found_inf` (a scalar tensor, not 0) to look at."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def check_interval(every_n_steps: object) -> int:
    """AdapterError unless it is a whole number of steps."""
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise AdapterError(f"every_n_steps must be at least 1, a whole number, got {every_n_steps!r}")
    return every_n_steps

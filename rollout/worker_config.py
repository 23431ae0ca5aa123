"""Settings of one worker: which model it hosts, what of a node it takes, and how long anybody waits for it."""

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from rollout.config import EngineConfig
from rollout.errors import InvalidRequestError

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import SchedulingStrategyT

NEEDS_RAY = 'workers in other processes run on Ray, which is not installed here: pip install "ray[default]"'
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Only `model` is needed."""

    model: str | Callable[[], PreTrainedModel]
    """A hub name or folder, or a factory `"package.module:function"` that is called in the worker. A function of an
    importable module is turned into its name. Never a module: weights do not travel in a pickle."""
    tokenizer: str | Callable[[], Any] | None = None
    """A hub name or folder, or a factory; None: the one that lies beside the model, if any. Only stop strings need it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine's own settings. `max_waiting` must be None: a worker refuses rather than blocks, see `max_outstanding`."""
    dtype: torch.dtype | None = None
    """Of the weights; None: the model's own."""
    num_cpus: float = 1.0
    """CPUs that Ray books for it; 0 books none."""
    num_gpus: float = 0.0
    """GPUs that Ray books for it; with any, the engine is on one."""
    num_threads: int | None = None
    """CPU threads of the engine's forwards; None: `num_cpus` of them where it is at least 1, else torch's default. Give
    the workers of a node its cores between them, or they wait for each other."""
    scheduling: "SchedulingStrategyT" = "DEFAULT"
    """Where Ray places it: "DEFAULT", "SPREAD", or a node-affinity or placement-group strategy of
    `ray.util.scheduling_strategies`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its process."""
    max_outstanding: int = 4096
    """Upper bound on requests in flight plus results that nobody has read yet; beyond it requests are refused."""
    max_engine_restarts: int = 3
    """How often in a row, with no rollout that ends well in between, an engine whose loop died is restarted in place."""
    start_timeout_s: float = 300.0
    """For a new incarnation, model loading included."""
    submit_timeout_s: float = 60.0
    """For `submit`, `cancel` and `require_version`."""
    call_timeout_s: float = 300.0
    """For a `call`, its wait for the engine's control thread included."""
    snapshot_timeout_s: float = 60.0
    """For `snapshot`."""
    grace_s: float = 5.0
    """What an answer may take beyond the time that the worker itself was told to wait (`poll`, `call`)."""
    heartbeat_s: float = 1.0
    """How often it says that it lives, at least."""
    suspect_after_s: float = 5.0
    """It is SUSPECT when nothing was heard for this long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", _named("model", self.model))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", _named("tokenizer", self.tokenizer))
        if not isinstance(self.engine, EngineConfig):
            raise InvalidRequestError(f"engine must be an EngineConfig, got {self.engine!r:.80}")
        if self.engine.max_waiting is not None:
            raise InvalidRequestError(
                f"engine.max_waiting={self.engine.max_waiting} would block the worker's submit; leave it None and bound the "
                "worker by max_outstanding, beyond which it refuses"
            )
        for name, low in (("max_outstanding", 1), ("max_engine_restarts", 0), ("num_threads", 1)):
            value = getattr(self, name)
            if name == "num_threads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidRequestError(f"{name} must be an integer of at least {low}, got {value!r}")
        for name in ("num_cpus", "num_gpus"):
            _check_number(name, getattr(self, name), positive=False)
        for name in (
            *("start_timeout_s", "submit_timeout_s", "call_timeout_s", "snapshot_timeout_s"),
            *("grace_s", "heartbeat_s", "suspect_after_s"),
        ):
            _check_number(name, getattr(self, name), positive=True)
        if self.suspect_after_s <= self.heartbeat_s:
            raise InvalidRequestError(
                f"suspect_after_s must be above heartbeat_s={self.heartbeat_s}, or every worker is suspect between two "
                f"heartbeats; got {self.suspect_after_s}"
            )


def is_factory(name: str) -> bool:
    """Whether it is `package.module:function` rather than a hub name or folder."""
    return _FACTORY.fullmatch(name) is not None


def call_factory(name: str) -> Any:
    """What the factory `package.module:function` returns. InvalidRequestError when there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(
            f"the factory {name!r} cannot be imported in the worker ({error}); it must be a function at the top level of a "
            "module that is installed or on PYTHONPATH there"
        ) from error
    return factory()


def _named(what: str, value: Any) -> str:
    """The name by which a worker finds it."""
    if isinstance(value, str) and value:
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or isinstance(value, torch.nn.Module) or not isinstance(name, str):
        raise InvalidRequestError(
            f"{what} must be a hub name, a folder, or a factory (a function of a module, or its name "
            f'"package.module:function"), got {type(value).__name__}; a worker loads its own, objects are not sent'
        )
    if module in (None, "__main__") or not name.isidentifier():
        raise InvalidRequestError(
            f"{what}={module}.{name} cannot be imported in a worker; put it at the top level of a module of its own, not in the "
            "script that runs"
        )
    return f"{module}:{name}"


def _check_number(name: str, value: Any, *, positive: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise InvalidRequestError(
            f"{name} must be a {'positive' if positive else 'non-negative'} number, got {value!r}"
        )

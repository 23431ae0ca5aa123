"""A trainer's weights on their way to an engine or a fleet, whichever way they have to go."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn

from rollout import EngineStateError, GenerationEngine, RolloutController
from sync import SyncConfig, WeightSync
from sync.sources import held_tensors
from trainer_adapters.errors import AdapterError
from trainer_adapters.policy import PolicyView


class PolicyPublisher:
    """Publishes the model that a trainer trains, as it is wrapped at that moment.

    An engine that runs on the very Parameters of the model has the new weights already: they get their version in an
    empty update, while nothing is generated. Any other gets them through a `WeightSync`.
    Every rank has one and calls `publish`; the first has the engine or controller, the others may have None.
    """

    def __init__(
        self,
        source: GenerationEngine | RolloutController | None,
        accelerator: Accelerator,
        *,
        config: SyncConfig | None,
        timeout_s: float,
    ) -> None:
        if source is None and accelerator.is_main_process:
            raise AdapterError("the first rank generates for all and needs an engine or a controller, got None")
        self._source = source
        self._accelerator = accelerator
        self._config = config
        self._timeout_s = timeout_s
        self.weight_sync: WeightSync | None = None
        """None before the first publish that needs one, and after `close`."""

    def publish(self, model: nn.Module) -> dict[str, float]:
        """`model`: with whatever accelerate put around it. What it took, in numbers by name; empty on other ranks."""
        shares = None
        if self._accelerator.is_main_process:
            shares = shares_weights(self._source, self._accelerator.unwrap_model(model, keep_torch_compile=False))
        if broadcast_object_list([shares])[0]:
            return self._version_what_is_shared() if self._accelerator.is_main_process else {}
        if self.weight_sync is None:
            self.weight_sync = WeightSync(targets_of(self._source), config=self._config)
        report = self.weight_sync.publish(PolicyView(model, self._accelerator), timeout_s=self._timeout_s)
        return {
            "sync/stage_s": report.stage_s,
            "sync/send_s": report.send_s,
            "sync/pause_wait_s": report.pause_wait_s,
            "sync/commit_s": report.commit_s,
            "sync/bytes": float(report.num_bytes),
            "sync/targets_missed": float(len(report.fenced)),
        }

    def close(self) -> None:
        """Frees the staging. A later `publish` makes another."""
        if self.weight_sync is not None:
            self.weight_sync.close()
            self.weight_sync = None

    def _version_what_is_shared(self) -> dict[str, float]:
        source = self._source
        assert source is not None
        with source.update(timeout_s=self._timeout_s):
            pass
        engine = source if isinstance(source, GenerationEngine) else source.engine
        record = engine.last_update
        assert record is not None
        return {"sync/pause_wait_s": record.wait_s, "sync/commit_s": record.held_s, "sync/bytes": 0.0}


def shares_weights(source: GenerationEngine | RolloutController | None, model: Any) -> bool:
    """Whether the engine runs on the very tensors of the model. Under adapters it does not, although it may on their base:
    the policy is the sum of both."""
    engine = engine_of(source)
    if engine is None or is_peft_model(model):
        return False
    ours = {id(held.tensor) for held in held_tensors(model)}
    return all(id(held.tensor) in ours for held in held_tensors(engine.model))


def engine_of(source: GenerationEngine | RolloutController | None) -> GenerationEngine | None:
    """The engine in this process, if that is where it is."""
    if isinstance(source, RolloutController):
        try:
            return source.engine
        except EngineStateError:
            return None
    return source


def targets_of(source: GenerationEngine | RolloutController | None) -> list[Any]:
    """What a WeightSync publishes to: of a controller the workers of the moment, at each publish; none without a source."""
    return [] if source is None else [source]

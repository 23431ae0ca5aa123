"""The weights of TRL's AsyncGRPO on their way into an engine or a fleet; for how it is used see `async_grpo`."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from rollout import GenerationEngine, RolloutController
from sync import ManifestError, SyncConfig, SyncReport, WeightSync
from sync.sources import held_tensors
from sync.transports import Transport
from trainer_adapters.errors import AdapterError
from trainer_adapters.publishing import engine_of, targets_of
from trainer_adapters.trl.seams import async_seams, check_seams


class EngineWeightTransfer:
    """Brings the weights that TRL sends into an engine, or every worker of a controller.

    The tensors that TRL hands out alias its live parameters, and making them may be a collective: `send_weights` takes all
    of them, and has copied them, before it waits for any engine to commit. `resume` waits for the commits.

    TRL sends every parameter that it trains, of a model with LoRA adapters all, merged. What it does not send:

    - frozen parameters of a model without adapters, such as `model.get_input_embeddings().requires_grad_(False)` makes. Give
      that model, as TRL is given it: `EngineWeightTransfer(engine, policy=model)`;
    - buffers. An engine of this process keeps its own; a fleet gets those that a model registers as persistent from `unsent`.

    A parameter of an engine that comes from nowhere is a ManifestError: kept as it was, it would pass for up to date.
    """

    def __init__(
        self,
        source: GenerationEngine | RolloutController,
        *,
        policy: nn.Module | None = None,
        unsent: Mapping[str, Tensor] | None = None,
        transport: Transport | None = None,
        sync_config: SyncConfig | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`policy`: the model whose parameters without `requires_grad` are sent too, at each send as they are then. `unsent`:
        tensors by name, for what neither TRL nor `policy` has. `timeout_s` bounds each publish; the other arguments are those
        of WeightSync."""
        check_seams(async_seams())
        self._source = source
        self._policy = policy
        self._unsent = unsent or {}
        self._transport = transport
        self._sync_config = sync_config
        self._timeout_s = timeout_s
        self._weight_sync: WeightSync | None = None
        self._under_way: Future[SyncReport] | None = None
        self._names: frozenset[str] | None = None
        self._last_report: SyncReport | None = None

    @property
    def last_report(self) -> SyncReport | None:
        """Of the newest publish that has ended; None before the first."""
        return self._last_report

    def init_weight_transfer(self) -> None:
        """TRL calls it when training begins; an engine or controller must run by then."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size > 1:
                raise AdapterError(
                    f"EngineWeightTransfer serves trainers of one process, this one has {size}: TRL sends from its first rank "
                    "alone, and a WeightSync takes part on all of them"
                )
        self._weight_sync = WeightSync(targets_of(self._source), self._transport, self._sync_config)

    def pause(self) -> None:
        """Nothing: the engines pause for their commits themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Returns when everything is staged. Raises what `WeightSync.publish` raises."""
        if self._weight_sync is None:
            raise AdapterError("send_weights() comes after init_weight_transfer() and before destroy()")
        self._under_way = self._weight_sync.publish(self._completed(iterator), timeout_s=self._timeout_s, wait=False)

    def resume(self) -> None:
        """Waits until the engines hold what was sent. SyncError if none of them does."""
        if self._under_way is not None:
            self._last_report = self._under_way.result(self._timeout_s)
            self._under_way = None

    def destroy(self) -> None:
        """Frees the staging. Safe to call again."""
        if self._weight_sync is not None:
            self._weight_sync.close()
            self._weight_sync = None

    def _completed(self, iterator: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        sent = set()
        for name, tensor in iterator:
            sent.add(name)
            yield name, tensor
        if not sent or sent != (self._names or sent):
            # Filled up with what the engine has, such an update would pass for one.
            raise AdapterError(
                f"TRL sent {len(sent)} tensors, the first time {len(self._names or ())}: a send must hold every trained tensor"
            )
        yield from self._rest(sent)
        self._names = frozenset(sent)

    def _rest(self, sent: set[str]) -> Iterator[tuple[str, Tensor]]:
        more = {**frozen_parameters(self._policy), **self._unsent}
        engine = engine_of(self._source)
        held_here = held_tensors(engine.model) if engine is not None else []
        kept = [held for held in held_here if sent.union(more).isdisjoint(held.names)]
        missing = [held.names[0] for held in kept if isinstance(held.tensor, nn.Parameter)]
        if missing:
            raise ManifestError(
                f"TRL sent {len(sent)} tensors, and {len(missing)} parameters of the engine are not among them: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; if they are frozen, give the model that TRL was "
                "given: EngineWeightTransfer(engine, policy=model)"
            )
        for name, tensor in more.items():
            if name not in sent:
                yield name, tensor
        for held in kept:
            yield held.names[0], held.tensor.detach().clone()


def frozen_parameters(policy: nn.Module | None) -> dict[str, Tensor]:
    """Those that TRL does not send, by name: of a model under adapters it sends all."""
    if policy is None or is_peft_model(policy):
        return {}
    return {name: parameter.detach() for name, parameter in policy.named_parameters() if not parameter.requires_grad}

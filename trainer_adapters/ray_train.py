"""Ray Train: a trainer of one or several ranks in one placement, a fleet of engines in another.

    def make_fleet(config):  # called on the first rank
        return RolloutController(
            config["model"], prompts, reward, config=RolloutConfig(num_workers=2, num_epochs=None, placement="SPREAD")
        )

    def train(fleet, config):  # called on every rank
        model = ray.train.torch.prepare_model(AutoModelForCausalLM.from_pretrained(config["model"]))
        policy = PolicyView(model)
        fleet.publish(policy)
        for step in range(config["steps"]):
            with fleet.next_batch() as groups:
                ...train on this rank's share of the batch...
            fleet.publish(policy)

    TorchTrainer(
        engine_train_loop(train, make_fleet),
        train_loop_config={"model": path, "steps": 100},
        scaling_config=ScalingConfig(num_workers=4),
    ).fit()

The fleet's workers are actors beside the trainer's: Ray Train reserves a placement group for its ranks, and the fleet books
what `WorkerConfig` says, in a group of its own where `RolloutConfig.placement` is set. A cluster that has no room for both
ends the run with WorkerUnreachableError, after `WorkerConfig.start_timeout_s`. The fleet ends with the trainer's first rank.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollout import MissingDependencyError, RolloutController, RolloutGroup
from sync import Source, SyncReport, WeightSync
from trainer_adapters.errors import AdapterError
from trainer_adapters.publishing import targets_of
from trainer_adapters.rank_group import RankGroup

STATE_FILE = "rollsync_fleet.json"
"""In a checkpoint's folder, beside the trainer's own files."""

Config = dict[str, Any]


def engine_train_loop(
    train: "Callable[[RankFleet, Config], Any]", make_fleet: Callable[[Config], RolloutController]
) -> Callable[[Config], Any]:
    """The `train_loop_per_worker` of a `ray.train.torch.TorchTrainer`: runs `train(fleet, train_loop_config)` on every rank
    while the controller that `make_fleet(train_loop_config)` makes, on the first rank, keeps generating.

    A run that goes on from a checkpoint in which `RankFleet.save` wrote goes on with the prompts, partial rollouts and ready
    groups of that moment. What fails on the first rank raises on all of them.
    """

    def loop(config: Config) -> Any:
        ranks = RankGroup()
        with ExitStack() as stack:
            controller: RolloutController | None = None

            def start() -> list[None]:
                nonlocal controller
                made = make_fleet(config)
                state = _saved_state()
                if state is not None:
                    made.load_state_dict(state)
                controller = stack.enter_context(made)
                return [None] * ranks.size

            ranks.deal(start)  # before the WeightSync, whose ranks would wait for one that has no fleet
            weight_sync = stack.enter_context(WeightSync(targets_of(controller)))
            return train(RankFleet(ranks, controller, weight_sync), config)

    return loop


class RankFleet:
    """What one rank of the trainer has of the fleet. Every rank calls each method."""

    def __init__(self, ranks: RankGroup, controller: RolloutController | None, weight_sync: WeightSync) -> None:
        self._ranks = ranks
        self._weight_sync = weight_sync
        self.controller = controller
        """On the first rank, for its metrics and status; None on the others."""

    @contextmanager
    def next_batch(self, timeout_s: float = 600.0) -> Iterator[list[RolloutGroup]]:
        """This rank's groups of the next batch, as many as every other rank has. A clean exit on the first rank acknowledges
        the whole batch, an exception there gives it back.

        Raises what `RolloutController.next_batch` raises on the first rank, AdapterError on the others, and on all of them
        for a batch that cannot be dealt out evenly: a rank that has nothing to train on would leave the others waiting in
        their gradients' reduction."""
        with ExitStack() as until_trained:

            def lease() -> list[list[RolloutGroup]]:
                assert self.controller is not None
                batch = until_trained.enter_context(self.controller.next_batch(timeout_s))
                return shares(batch.groups, self._ranks.size)

            yield self._ranks.deal(lease)

    def publish(self, source: Source, *, timeout_s: float = 120.0) -> SyncReport:
        """The trainer's weights to the whole fleet, as its next version; `source` is a `PolicyView`. Begin with it: the
        workers have loaded weights of their own, and in a run that goes on from a checkpoint they wait for the trainer's.
        Returns, or raises what `WeightSync.publish` raises, on all ranks alike."""
        return self._weight_sync.publish(source, timeout_s=timeout_s)

    def save(self, folder: Path | str) -> None:
        """Adds the fleet's state to a checkpoint's folder, on the first rank. After the batch that was trained on last, with
        the weights that it led to; then give the folder to `ray.train.report(checkpoint=...)`."""
        if self.controller is not None:
            (Path(folder) / STATE_FILE).write_text(json.dumps(self.controller.state_dict()))


def shares(groups: Sequence[RolloutGroup], count: int) -> list[list[RolloutGroup]]:
    """`count` lists of equally many groups, dealt in turn, each in canonical order. AdapterError if that cannot be."""
    if len(groups) % count:
        raise AdapterError(
            f"a batch of {len(groups)} groups cannot be dealt to {count} ranks evenly; make prompts_per_step a multiple of the "
            "ranks, and let the prompts be a multiple of prompts_per_step or repeat (num_epochs=None)"
        )
    return [list(groups[rank::count]) for rank in range(count)]


def _saved_state() -> Mapping[str, Any] | None:
    """That of the checkpoint that this run goes on from."""
    try:
        import ray.train
    except ImportError as error:
        raise MissingDependencyError(
            f'a train loop runs in Ray Train, which cannot be imported here: pip install "rollsync[train]" ({error})'
        ) from error
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        file = Path(folder) / STATE_FILE
        if not file.exists():
            return None
        state: Mapping[str, Any] = json.loads(file.read_text())
        return state

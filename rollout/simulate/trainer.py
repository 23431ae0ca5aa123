"""A trainer that takes its time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.batches.lease import Lease
from rollout.controller import RolloutController
from rollout.errors import PromptsExhaustedError

if TYPE_CHECKING:
    from rollout.simulate.fleet import SimulatedFleet


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, in seconds of the loop."""

    step: int
    version: int
    """At the hand-out."""
    waited_s: float
    """For the batch."""
    step_s: float
    """From asking for the batch to the publish."""
    staleness: int
    """Of the stalest group."""
    num_tokens: int
    group_ids: tuple[str, ...]


class SimulatedTrainer:
    """Takes a batch, trains for `step_s`, publishes, and so on."""

    def __init__(
        self,
        controller: RolloutController,
        fleet: "SimulatedFleet",
        *,
        step_s: float,
        publishes_per_step: int = 1,
        on_batch: Callable[[Lease], None] | None = None,
        timeout_s: float = 36_000.0,
    ) -> None:
        """`publishes_per_step`: 0 never publishes. `on_batch`: called with each lease; what it raises gives the batch back.
        `timeout_s`: of one `next_batch`."""
        self._controller = controller
        self._fleet = fleet
        self._step_s = step_s
        self._publishes = publishes_per_step
        self._on_batch = on_batch
        self._timeout_s = timeout_s
        self._num_steps = 0

    def run(self, num_steps: int) -> list[StepRecord]:
        """That many steps, or fewer if the prompts end."""
        records: list[StepRecord] = []
        for _ in range(num_steps):
            try:
                records.append(self._step())
            except PromptsExhaustedError:
                break
        return records

    def _step(self) -> StepRecord:
        loop = self._fleet.loop
        began_at = loop.now()
        with self._controller.next_batch(timeout_s=self._timeout_s) as lease:
            waited_s = loop.now() - began_at
            if self._on_batch is not None:
                self._on_batch(lease)
            loop.advance(self._step_s)
        for _ in range(self._publishes):
            self._fleet.publish()
        self._num_steps += 1
        return StepRecord(
            step=self._num_steps - 1,
            version=lease.version,
            waited_s=waited_s,
            step_s=loop.now() - began_at,
            staleness=lease.staleness,
            num_tokens=sum(len(rollout.token_ids) for rollout in lease.rollouts),
            group_ids=tuple(group.group_id for group in lease.groups),
        )

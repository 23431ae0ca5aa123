"""Simulated fleets with the real controller, and what must hold of every batch."""

from rollout import Rollout, RolloutConfig, RolloutController, SamplingParams
from rollout.batches.lease import Lease
from rollout.simulate import LogNormalLengths, SimulatedFleet

TAIL = LogNormalLengths(mean=100, sigma=1.0, longest=800)
PROMPTS = [[2 + n % 50, 3] for n in range(1000)]


def a_fleet(num_workers: int = 4, **settings: object) -> SimulatedFleet:
    return SimulatedFleet(num_workers, **{"lengths": TAIL, "slots": 8, **settings})


def a_config(**settings: object) -> RolloutConfig:
    defaults = {"group_size": 4, "prompts_per_step": 4, "sampling": SamplingParams(max_new_tokens=1000)}
    return RolloutConfig(**{**defaults, **settings})


def reward(rollout: Rollout, text: str) -> float:
    return float(len(rollout.token_ids) % 2)


def check_books(controller: RolloutController) -> None:
    controller._coordinator.collection.ledger.check()
    assert controller.metrics()["rollout/imbalance"] == 0


def check_rollouts(lease: Lease) -> None:
    """Each simulated token is the version that sampled it."""
    for group in lease.groups:
        assert [rollout.sample_index for rollout in group] == sorted(rollout.sample_index for rollout in group)
        for rollout in group:
            assert rollout.token_ids == rollout.versions
            assert rollout.group_id == group.group_id
            assert rollout.reward is not None
    numbers = [number_of(group.group_id) for group in lease.groups]
    assert numbers == sorted(numbers)


def number_of(group_id: str) -> int:
    return int(group_id[1:].split("r", maxsplit=1)[0])

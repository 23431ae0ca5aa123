"""Work is shared evenly among workers that take a publish one after the other, and nobody waits long for a slow one."""

from collections import Counter

import pytest
from simulated_fleets import PROMPTS, a_config, reward

from rollout import RolloutController
from rollout.batches.lease import Lease
from rollout.fleet.roster import CATCH_UP_S
from rollout.simulate import ConstantLengths, SimulatedFleet, SimulatedTrainer


def by_worker(controller: RolloutController) -> dict[str, int]:
    return {name: worker["samples"] for name, worker in controller.status()["workers"].items()}


@pytest.mark.parametrize(("num_workers", "prompts_per_step"), [(2, 4), (2, 2), (4, 8)])
def test_the_first_to_commit_does_not_get_all_that_is_admitted_at_a_publish(
    num_workers: int, prompts_per_step: int
) -> None:
    fleet = SimulatedFleet(num_workers, lengths=ConstantLengths(tokens=32), stagger_s=1.0)
    shares: list[Counter[str]] = []

    def note(lease: Lease) -> None:
        shares.append(Counter(rollout.worker_id for rollout in lease.rollouts if rollout.worker_id is not None))

    config = a_config(prompts_per_step=prompts_per_step)
    with fleet.controller(PROMPTS, reward, config=config) as controller:
        SimulatedTrainer(controller, fleet, step_s=3.0, on_batch=note).run(8)
    even = 4 * prompts_per_step // num_workers
    # the first two batches are of before the first publish, and hold what was ready first
    assert shares[2:] == [Counter({f"w{number}": even for number in range(num_workers)})] * 6


def test_a_worker_with_nothing_to_do_waits_for_no_other_and_nobody_for_one_that_takes_no_publish() -> None:
    fleet = SimulatedFleet(2, lengths=ConstantLengths(tokens=1000), slots=64)
    with fleet.controller(PROMPTS, reward, config=a_config(max_staleness=0)) as controller:
        controller.next_batch(timeout_s=1000).acknowledge()
        assert by_worker(controller) == {"w0": 0, "w1": 0}
        fleet.workers["w1"].commit(1)
        fleet.loop.advance(0.5)
        assert by_worker(controller) == {"w0": 0, "w1": 4}, "the second group is for w0"
        fleet.loop.advance(CATCH_UP_S + fleet.loop.tick_s)
        assert by_worker(controller) == {"w0": 0, "w1": 16}

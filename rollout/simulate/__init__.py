"""A fleet that runs on a laptop: workers that make tokens on a clock, deaths and faults to order, a trainer.

    fleet = SimulatedFleet(num_workers=64, lengths=LogNormalLengths(mean=500, sigma=1.0, longest=4000))
    controller = fleet.controller(prompts, reward_fn, config=RolloutConfig(prompts_per_step=32, max_staleness=1))
    with controller:
        records = SimulatedTrainer(controller, fleet, step_s=20.0).run(100)
    print(fleet.loop.now(), controller.metrics())

The controller is the real one, unchanged; only its loop's clock is virtual, and jumps from one event to the next. Two runs
with equal arguments are equal, event by event. Each simulated token is the version that sampled it, so that spans can be
checked.
"""

from rollout.simulate.clock import VirtualLoop
from rollout.simulate.faults import Faults
from rollout.simulate.fleet import SimulatedFleet
from rollout.simulate.lengths import ConstantLengths, Lengths, LogNormalLengths
from rollout.simulate.rewards import SimulatedRewards
from rollout.simulate.trainer import SimulatedTrainer, StepRecord
from rollout.simulate.worker import SimulatedWorker

__all__ = [
    "ConstantLengths",
    "Faults",
    "Lengths",
    "LogNormalLengths",
    "SimulatedFleet",
    "SimulatedRewards",
    "SimulatedTrainer",
    "SimulatedWorker",
    "StepRecord",
    "VirtualLoop",
]

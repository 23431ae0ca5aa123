"""Whatever the settings, the faults and the order of events: the books balance, nothing is too old, and the run ends."""

import random
from collections import Counter

import pytest

from rollout import PromptsExhaustedError, Rollout, RolloutConfig, RolloutController, SamplingParams
from rollout.batches.lease import Lease
from rollout.simulate import Faults, LogNormalLengths, SimulatedFleet, SimulatedTrainer

LONG_S = 20_000.0


def a_fleet(noise: random.Random, num_workers: int) -> SimulatedFleet:
    standing_still = (noise.random() * 40, noise.choice([3.0, 50.0, 500.0]))
    faults = Faults(
        seconds_between_deaths=noise.choice([None, 5.0, 20.0]),
        error_rate=noise.choice([0, 0.1, 0.4]),
        duplicate_rate=noise.choice([0, 0.2]),
        late_rate=noise.choice([0, 0.2]),
        freezes={f"w{noise.randrange(num_workers)}": (standing_still,)},
    )
    return SimulatedFleet(
        num_workers,
        lengths=LogNormalLengths(mean=100, sigma=1.0, longest=800),
        slots=noise.choice([2, 8, 32]),
        max_outstanding=noise.choice([6, 50, 4096]),
        restart_s=noise.choice([1.0, 10.0]),
        join_s=noise.choice([0.5, 5.0]),
        stagger_s=noise.choice([0, 1.0]),
        faults=faults,
        seed=noise.randrange(2**32),
    )


def a_config(noise: random.Random) -> RolloutConfig:
    group_size = noise.randint(1, 4)
    return RolloutConfig(
        group_size=group_size,
        prompts_per_step=noise.randint(1, 5),
        max_staleness=noise.randint(0, 3),
        admission=noise.choice(["windowed", "fifo", "expiring"]),
        max_requeues=noise.choice([0, 1, 100]),
        max_tokens_ahead=noise.choice([None, 5_000, 20_000]),
        max_samples_per_worker=noise.choice([None, group_size, 3 * group_size]),
        max_infra_retries=noise.choice([1, 100]),
        max_data_retries=noise.choice([0, 2]),
        on_failed_sample=noise.choice(["shrink", "drop", "refill"]),
        min_group_size=noise.choice([1, 2]),
        drop_equal_rewards=noise.random() < 0.3,
        max_groups_without_output=10**6,
        worker_restarts=10**6,
        suspect_limit_s=20.0,
        # a worker that dies again before anybody sees a token of it comes back ever later
        **dict.fromkeys(("no_progress_s", "reward_stall_s", "pause_stall_s"), 1e6),
        snapshot_every_s=noise.choice([None, 2.0, 10.0]),
        shuffle=noise.random() < 0.5,
        seed=noise.randrange(1000),
        sampling=SamplingParams(max_new_tokens=1000),
    )


def live_and_die(seed: int) -> None:
    noise = random.Random(seed)
    num_workers, num_prompts = noise.randint(1, 6), noise.randint(5, 60)
    fleet, config = a_fleet(noise, num_workers), a_config(noise)
    rewards = random.Random(seed + 1)

    def reward(rollout: Rollout, text: str) -> float:
        if rewards.random() < 0.05:
            raise KeyError("answer")
        return float(len(rollout.token_ids) % 2)

    def rewards_of(group: list[Rollout]) -> list[float]:
        return [reward(rollout, "") for rollout in group]

    together = noise.random() < 0.3
    controller = fleet.controller(
        [[2 + n % 50, 3] for n in range(num_prompts)],
        None if together else reward,
        group_reward_fn=rewards_of if together else None,
        reward_delay_s=noise.choice([0.0, 2.0]),
        config=config,
    )
    trained: Counter[str] = Counter()
    with controller:
        for _ in range(3000):
            try:
                lease = controller.next_batch(timeout_s=LONG_S)
            except PromptsExhaustedError:
                break
            check(lease, controller)
            fleet.loop.advance(noise.choice([0.5, 5.0]))
            if noise.random() < 0.1:
                lease.give_back()
            else:
                lease.acknowledge()
                trained.update(group.prompt_id for group in lease.groups)
            for _ in range(noise.choice([0, 1, 1, 1, 3])):
                fleet.publish()
            disturb(noise, controller)
        else:
            pytest.fail("the run does not end")
        ledger = controller._coordinator.collection.ledger
        ledger.check()
        assert ledger.imbalance() == 0
        assert ledger.counts()["outstanding"] == 0
        assert ledger.issued["prompts"] == num_prompts
    assert max(trained.values(), default=1) == 1


def check(lease: Lease, controller: RolloutController) -> None:
    controller._coordinator.collection.ledger.check()
    for group in lease.groups:
        assert group.staleness <= controller.config.max_staleness
        for rollout in group:
            assert rollout.token_ids == rollout.versions, "a simulated token is its version"
            assert rollout.reward is not None


def disturb(noise: random.Random, controller: RolloutController) -> None:
    what = noise.random()
    if what < 0.05:
        assert len(controller.evaluate([[4, 5]], timeout_s=LONG_S)) == 1
    elif what < 0.1:
        controller.add_worker()
    elif what < 0.15 and len(controller.workers()) > 1:
        controller.remove_worker(noise.choice(controller.workers()).worker_id)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_prompt_ends_once(seed: int) -> None:
    live_and_die(seed)


@pytest.mark.slow
def test_whatever_happens_a_thousand_times_every_prompt_ends_once() -> None:
    for seed in range(40, 1040):
        live_and_die(seed)


@pytest.mark.slow
def test_an_hour_of_512_workers_replays_exactly() -> None:
    def hour() -> tuple[object, ...]:
        fleet = SimulatedFleet(
            512,
            lengths=LogNormalLengths(mean=50, sigma=1.0, longest=400),
            slots=4,
            tokens_per_s=2.0,
            faults=Faults(seconds_between_deaths=60.0),
        )
        config = RolloutConfig(
            prompts_per_step=256, num_epochs=None, snapshot_every_s=300.0, sampling=SamplingParams(max_new_tokens=400)
        )
        with fleet.controller([[2, 3]] * 100, lambda rollout, text: 1.0, config=config) as controller:
            trainer = SimulatedTrainer(controller, fleet, step_s=30.0)
            records = []
            while fleet.loop.now() < 3600:
                records += trainer.run(1)
            return records, fleet.loop.num_events, controller.metrics()

    assert hour() == hour()

"""The controller over one engine in this process: the same promises with real tokens."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from fakes import mark, marker_llama, tiny_llama, wait_until
from transformers import LlamaForCausalLM

from rollout import EngineConfig, FinishReason, GenerationEngine, InvalidRequestError, Rollout, SamplingParams
from rollout.controller import RolloutController
from rollout.errors import EngineFencedError, EngineStateError, RolloutStalledError
from rollout.fleet.local_fleet import LocalFleet
from rollout.fleet.loop import ThreadLoop
from rollout.rollout_config import RolloutConfig
from rollout.status import EngineState
from sync import SyncError, WeightSync

T = TypeVar("T")

PROMPTS = [[2 + n, 3, 4] for n in range(24)]


def a_config(**settings: object) -> RolloutConfig:
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=())
    return RolloutConfig(**{"group_size": 2, "prompts_per_step": 3, "sampling": sampling, **settings})


def a_controller(model: torch.nn.Module, reward_fn: object = None, **settings: object) -> RolloutController:
    return RolloutController(
        model,
        PROMPTS,
        reward_fn or (lambda rollout, text: float(rollout.token_ids[0])),
        engine=EngineConfig(num_blocks=64, page_size=16),
        config=a_config(**settings),
    )


class FailsOnce(LlamaForCausalLM):
    """The forward raises once `fail` is set."""

    fail = threading.Event()

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.fail.is_set():
            self.fail.clear()
            raise ArithmeticError("the disk is on fire")
        return super().forward(*args, **kwargs)


@pytest.fixture
def failing() -> Iterator[LlamaForCausalLM]:
    plain = tiny_llama()
    model = FailsOnce(plain.config)
    model.load_state_dict(plain.state_dict())
    yield model.eval()
    FailsOnce.fail.clear()


def test_every_prompt_is_trained_on_once_with_exact_versions() -> None:
    model = marker_llama()
    trained: Counter[str] = Counter()
    with a_controller(model) as controller:
        for step in range(1, 9):
            with controller.next_batch(timeout_s=60) as lease:
                assert lease.staleness <= 1
                for group in lease.groups:
                    assert len(group) == 2
                    for rollout in group:
                        assert rollout.token_ids == rollout.versions, "the model says its version"
                        assert rollout.reward == rollout.token_ids[0]
                trained.update(group.prompt_id for group in lease.groups)
            with controller.update() as engine_model:
                mark(engine_model, step)
        metrics = controller.metrics()
    assert trained == Counter(f"p{n}" for n in range(24))
    assert metrics["rollout/samples_consumed"] == 48
    assert metrics["sync/updates"] == 8
    assert metrics["rollout/imbalance"] == 0


def test_the_noise_is_the_seeds_and_no_two_groups_share_it() -> None:
    def tokens(seed: int) -> list[list[int]]:
        with RolloutController(
            tiny_llama(),
            [[5, 6]] * 3,
            engine=EngineConfig(num_blocks=64, page_size=16),
            config=a_config(seed=seed),
        ) as controller:
            return [rollout.token_ids for rollout in controller.next_batch(timeout_s=60).rollouts]

    first = tokens(0)
    assert first == tokens(0)
    assert first != tokens(1)
    assert len({tuple(ids) for ids in first}) == 6


def test_an_engine_that_dies_is_restarted_and_its_samples_go_on(failing: LlamaForCausalLM) -> None:
    with a_controller(failing) as controller:
        controller.next_batch(timeout_s=60).acknowledge()
        FailsOnce.fail.set()
        for _ in range(3):
            with controller.next_batch(timeout_s=60) as lease:
                assert all(len(rollout.token_ids) == 12 for rollout in lease.rollouts)
        metrics = controller.metrics()
    assert metrics["rollout/failures_infra"] > 0
    assert metrics["rollout/samples_failed"] == 0
    assert metrics["rollout/imbalance"] == 0


def test_a_checkpoint_goes_on_in_another_controller_with_its_partial_rollouts() -> None:
    model = tiny_llama()
    trained: Counter[str] = Counter()
    with a_controller(model) as controller:
        with controller.next_batch(timeout_s=60) as lease:
            trained.update(group.prompt_id for group in lease.groups)
        state = json.loads(json.dumps(controller.state_dict()))
    again = a_controller(model)
    again.load_state_dict(state)
    with again:
        while sum(trained.values()) < 24:
            with again.next_batch(timeout_s=60) as lease:
                trained.update(group.prompt_id for group in lease.groups)
    assert trained == Counter(f"p{n}" for n in range(24))


def test_after_updates_a_checkpoints_weights_get_a_label_above_all() -> None:
    model = tiny_llama()
    with a_controller(model) as controller:
        for _ in range(2):
            controller.next_batch(timeout_s=60).acknowledge()
            with controller.update():
                pass
        state = controller.state_dict()
    again = a_controller(model)
    again.load_state_dict(state)
    with again:
        assert again.engine.version == 3
        assert again.next_batch(timeout_s=60).version == 3


def test_a_prompt_that_does_not_fit_fails_alone() -> None:
    with RolloutController(
        tiny_llama(),
        [[2, 3], [2] * 5000, [2, 4]],
        engine=EngineConfig(num_blocks=64, page_size=16),
        config=a_config(prompts_per_step=2),
    ) as controller:
        assert [group.prompt_id for group in controller.next_batch(timeout_s=60).groups] == ["p0", "p2"]
        assert "places in the KV cache" in controller.status()["last_failure"]
        assert controller.metrics()["rollout/samples_failed"] == 2


def test_an_evaluation_with_a_prompt_that_does_not_fit_has_a_result_that_says_so() -> None:
    params = SamplingParams(max_new_tokens=4, stop_token_ids=())
    with a_controller(tiny_llama()) as controller:
        long, short = controller.evaluate([[2] * 5000, [5, 6]], params, timeout_s=60)
        assert long.finish_reason is FinishReason.ERROR
        assert "places in the KV cache" in (long.error or "")
        assert (len(short.token_ids), short.error) == (4, None)
        with pytest.raises(InvalidRequestError, match="places in the KV cache"):
            controller.evaluate([[2] * 5000] * 2, params, timeout_s=60)


def test_an_evaluation_is_of_one_version_even_if_a_publish_is_asked_for_meanwhile() -> None:
    model = marker_llama()
    results: list[Rollout] = []
    with a_controller(model) as controller:
        evaluation = threading.Thread(
            target=lambda: results.extend(
                controller.evaluate([[7, 8]] * 4, SamplingParams(max_new_tokens=60, stop_token_ids=()))
            )
        )
        evaluation.start()
        evaluations = controller._coordinator.evaluations
        wait_until(lambda: evaluations.num_on("local") > 0 or bool(results))
        with controller.update() as engine_model:
            mark(engine_model, 1)
        evaluation.join(60)
        assert controller.engine.version == 1
    assert len(results) == 4
    assert [len(rollout.version_spans) for rollout in results] == [1] * 4
    assert all(rollout.reward is not None for rollout in results)


class InterruptedLoop(ThreadLoop):
    """Ctrl-C comes in the next wait once `interrupts` is set."""

    interrupts = False

    def wait(self, future: "Future[T]", timeout_s: float) -> T:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return super().wait(future, timeout_s)


def test_an_update_that_is_interrupted_while_it_waits_leaves_the_engine_to_evaluations() -> None:
    loop = InterruptedLoop()
    fleet = LocalFleet(GenerationEngine(tiny_llama(), EngineConfig(num_blocks=64, page_size=16)))
    with RolloutController.over(fleet, PROMPTS, config=a_config(), loop=loop) as controller:
        loop.interrupts = True
        with pytest.raises(KeyboardInterrupt), controller.update():
            pass
        assert len(controller.generate([[7, 8]], timeout_s=30)) == 1
        assert controller.version == 0


def test_an_evaluation_is_of_one_version_beside_the_publishes_of_a_weight_sync() -> None:
    trainer = marker_llama()
    mark(trainer, 1)
    with (
        a_controller(marker_llama()) as controller,
        WeightSync(controller) as weight_sync,
        ThreadPoolExecutor() as pool,
    ):
        params = SamplingParams(max_new_tokens=60, stop_token_ids=())
        evaluation = pool.submit(controller.evaluate, [[7, 8]] * 4, params)
        wait_until(lambda: controller._coordinator.evaluations.num_on("local") > 0 or evaluation.done())
        report = weight_sync.publish(trainer)
        results = evaluation.result(60)
        assert (report.version, report.fenced, controller.engine.version) == (1, (), 1)
        (after,) = controller.evaluate([[7, 8]], params)
    assert [len(rollout.version_spans) for rollout in results] == [1] * 4
    assert set(after.token_ids) == {1}


def test_an_evaluation_that_a_publish_cannot_wait_for_carries_its_spans() -> None:
    model = marker_llama()
    results: list[Rollout] = []
    with a_controller(model, evaluation_wait_s=0.001) as controller:
        evaluation = threading.Thread(
            target=lambda: results.extend(
                controller.evaluate([[7, 8]], SamplingParams(max_new_tokens=400, stop_token_ids=()))
            )
        )
        evaluation.start()
        evaluations = controller._coordinator.evaluations
        wait_until(lambda: evaluations.num_on("local") > 0)
        with controller.update() as engine_model:
            mark(engine_model, 1)
        evaluation.join(60)
    assert results[0].token_ids == results[0].versions


def test_next_batch_is_bounded_in_real_time_too() -> None:
    gate = threading.Event()
    with a_controller(tiny_llama(), lambda rollout, text: float(gate.wait(30))) as controller:
        with pytest.raises(RolloutStalledError, match="wait for their rewards"):
            controller.next_batch(timeout_s=0.5)
        gate.set()
        assert len(controller.next_batch(timeout_s=60).groups) == 3


def test_an_error_in_the_training_loop_ends_everything() -> None:
    before = threading.active_count()

    def train() -> None:
        with a_controller(tiny_llama()) as controller, controller.next_batch(timeout_s=60):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    wait_until(lambda: threading.active_count() <= before)


def test_an_update_that_failed_is_named_as_what_the_next_batch_waits_for() -> None:
    def fail(controller: RolloutController) -> None:
        with controller.update():
            raise ZeroDivisionError

    with a_controller(marker_llama()) as controller:
        with controller.next_batch(60):
            pass
        with pytest.raises(ZeroDivisionError):
            fail(controller)
        waits_for = controller.status()["waits_for"][0]
        assert "local is stale (its engine is fenced: the update to version 1 failed: ZeroDivisionError" in waits_for
        assert "until an update succeeds: with engine.update()" in waits_for
        with controller.update():
            pass
        with controller.next_batch(60):
            pass


def change_outside(controller: RolloutController, model: torch.nn.Module) -> None:
    """And the engine has noticed."""
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    controller.engine.submit([5, 6], SamplingParams(max_new_tokens=4, stop_token_ids=())).result(60)
    assert controller.engine.state is EngineState.FENCED


def all_batches(controller: RolloutController, *, timeout_s: float) -> None:
    """Until one does not come: some may be ready."""
    for _ in PROMPTS:
        controller.next_batch(timeout_s)


def test_weights_changed_outside_update_end_the_next_batch_at_once_with_the_remedy_until_an_update() -> None:
    model = tiny_llama()
    with a_controller(model) as controller:
        change_outside(controller, model)
        says = r"changed outside update\(\).*optimizer\.step\(\).*with controller\.update\(\)"
        with pytest.raises(EngineFencedError, match=says):
            all_batches(controller, timeout_s=60)
        with pytest.raises(EngineFencedError, match=says):
            controller.generate([[5, 6]], timeout_s=60)
        with controller.update():
            pass
        assert len(controller.next_batch(60)) == 3
        assert controller.status()["workers"]["local"]["reason"] is None


def test_a_publish_that_is_under_way_may_repair_what_was_changed_outside() -> None:
    model = tiny_llama()
    with a_controller(model) as controller:
        coordinator, ask = controller._coordinator, controller._questions.ask
        ask(lambda: coordinator.commit_begins("local", lambda: None))
        change_outside(controller, model)
        with pytest.raises(RolloutStalledError, match=r"no batch within 1 s.*changed outside update\(\)"):
            all_batches(controller, timeout_s=1)
        ask(lambda: coordinator.commit_ends("local"))
        with pytest.raises(EngineFencedError):
            controller.next_batch(60)


@pytest.mark.parametrize("wait", [True, False])
def test_a_publish_on_the_engines_own_control_thread_is_refused_at_once(wait: bool) -> None:
    model = tiny_llama()
    with a_controller(model) as controller, WeightSync(controller) as weight_sync:

        def publish(engine: GenerationEngine) -> None:
            weight_sync.publish(model, wait=wait)

        error = controller.engine.call(publish).exception(60)
    assert isinstance(error, SyncError)
    assert "on its engine's control thread would wait for itself; make it on another thread" in str(error)


def test_the_engine_of_this_process_cannot_be_removed() -> None:
    with a_controller(marker_llama()) as controller:
        with pytest.raises(InvalidRequestError, match="is one engine"):
            controller.remove_worker("local")
        assert len(controller.next_batch(60)) == 3


def test_whoever_waits_learns_of_the_stop() -> None:
    controller = a_controller(tiny_llama(), lambda rollout, text: None, max_groups_without_output=10**6)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            controller.next_batch(timeout_s=60)
        except EngineStateError as error:
            errors.append(error)

    with controller:
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: controller._coordinator.handout.num_waiting == 1)
    waiter.join(30)
    assert "stopped" in str(errors[0])


class GatedLoop(ThreadLoop):
    """What the thread called "late" asks reaches the loop only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def call_soon(self, callback: Callable[[], None]) -> None:
        if threading.current_thread().name == "late":
            self.asked.set()
            assert self.go.wait(60)
        super().call_soon(callback)


@pytest.mark.parametrize("question", ["next_batch", "metrics", "status", "drain", "state_dict"])
def test_what_is_asked_at_the_very_moment_of_a_stop_ends_at_once(question: str) -> None:
    loop = GatedLoop()
    fleet = LocalFleet(GenerationEngine(tiny_llama(), EngineConfig(num_blocks=64, page_size=16)))
    controller = RolloutController.over(fleet, PROMPTS, config=a_config(), loop=loop)
    errors: list[str] = []

    def ask() -> None:
        try:
            getattr(controller, question)()
        except EngineStateError as error:
            errors.append(str(error))

    with controller:
        asker = threading.Thread(target=ask, name="late", daemon=True)
        asker.start()
        assert loop.asked.wait(30)
    loop.go.set()
    asker.join(20)
    assert errors == ["the controller was stopped"]


def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="needs a model"):
        RolloutController("some/path", PROMPTS)
    with pytest.raises(InvalidRequestError, match="each worker loads its own"):
        RolloutController(tiny_llama(), PROMPTS, config=a_config(num_workers=2))
    with (
        a_controller(tiny_llama()) as controller,
        pytest.raises(InvalidRequestError, match="one engine"),
    ):
        controller.add_worker()


def test_a_call_of_a_target_that_has_begun_cannot_be_taken_back_so_that_nobody_believes_it_was() -> None:
    """A weight sync uses a version again only if no engine can have it."""
    with a_controller(tiny_llama()) as controller:
        (target,) = controller.targets()
        began, let = threading.Event(), threading.Event()

        def version(engine: GenerationEngine) -> int:
            began.set()
            assert let.wait(30)
            return engine.version

        answer = target.call(version)
        assert began.wait(30)
        assert not answer.cancel()
        let.set()
        assert answer.result(30) == 0

"""Publishing into engines that generate."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from fakes import StepGate, greedy_reference, mark, marker_llama, random_prompts, tiny_llama
from fakes_sync import Memory
from torch import Tensor, nn

from rollout import (
    EngineFencedError,
    EngineState,
    EngineStateError,
    GenerationEngine,
    InvalidRequestError,
    Rollout,
    SamplingParams,
    UpdateRecord,
)
from sync import ManifestError, SyncConfig, SyncError, SyncTimeoutError, WeightSync
from sync.layout import Layout
from sync.link import Link
from sync.manifest import Manifest, held_tensors
from sync.place import Deadline
from sync.receiver import commit
from sync.sources.source import TensorMap
from sync.ticket import Claim, Package, Ticket
from sync.transports import InProcess, SharedMemory
from sync.transports.base import Transport

PROMPT = [5, 17, 33, 8]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=())
SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "compiled": torch.compile,
    "data_parallel": nn.DataParallel,
    "dict": lambda model: model.state_dict(),
    "weight_source": lambda model: TensorMap(dict(model.named_parameters())),
    "iterable": lambda model: iter(model.named_parameters()),
}


def own(model: Any) -> GenerationEngine:
    """An engine with weights of its own."""
    return GenerationEngine(model, copy_weights=True)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {held.names[0]: held.tensor.detach().clone() for held in held_tensors(module)}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@contextmanager
def busy_control_thread(engine: GenerationEngine) -> Iterator[None]:
    """No commit can begin inside this block."""
    entered, leave = threading.Event(), threading.Event()

    def stay(_: GenerationEngine) -> bool:
        entered.set()
        return leave.wait(30)

    staying = engine.call(stay)
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        assert staying.result(30)


class Breaking(nn.Parameter):
    """A parameter that no copy can be written into."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            raise RuntimeError("the device failed")
        return super().__torch_function__(function, types, args, kwargs or {})


@contextmanager
def breaking_last_weight(engine: GenerationEngine) -> Iterator[None]:
    """Commits into the engine fail inside this block, after all other weights have been changed."""
    head = engine.model.lm_head
    whole = head.weight
    head.weight = Breaking(whole.data, requires_grad=False)
    yield
    head.weight = whole


# ------------------------------------------------------------------------------------------------ what a publish does


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_engine_says_what_the_published_model_says(kind: str, tied: bool) -> None:
    trainer = tiny_llama(seed=1, tie_word_embeddings=tied)
    with own(tiny_llama(tie_word_embeddings=tied)) as engine, WeightSync(engine) as weight_sync:
        before = engine.generate([PROMPT], GREEDY)[0]
        weight_sync.publish(SOURCES[kind](trainer))
        after = engine.generate([PROMPT], GREEDY)[0]
        assert_equal(weights(engine.model), weights(trainer))
    assert after.token_ids == greedy_reference(trainer, PROMPT, 12) != before.token_ids
    assert (before.versions, after.versions) == ([0] * 12, [1] * 12)


def test_report_says_what_was_done() -> None:
    trainer = tiny_llama(tie_word_embeddings=True)
    with own(trainer) as engine, WeightSync(engine) as weight_sync:
        report = weight_sync.publish(trainer, version=5)
        assert engine.last_update is not None
        assert (report.pause_wait_s, report.commit_s) == (engine.last_update.wait_s, engine.last_update.held_s)
    assert report.version == engine.version == 5
    assert report.num_bytes == sum(parameter.nbytes for parameter in trainer.parameters())
    assert report.num_tensors == len(list(trainer.parameters()))
    assert (report.straddlers, report.fenced, report.transport) == (0, (), "in_process")


def test_trainers_tensors_are_bit_identical_after_twenty_publishes_and_not_shared() -> None:
    trainer = tiny_llama().train()
    before = weights(trainer)
    counters = [parameter._version for parameter in trainer.parameters()]
    with own(tiny_llama(seed=1)) as engine, WeightSync(engine) as weight_sync:
        addresses = [held.tensor.data_ptr() for held in held_tensors(engine.model)]
        for _ in range(20):
            weight_sync.publish(trainer)
        assert engine.version == 20
        assert [held.tensor.data_ptr() for held in held_tensors(engine.model)] == addresses
        assert not set(addresses) & {parameter.data_ptr() for parameter in trainer.parameters()}
    assert_equal(weights(trainer), before)
    assert [parameter._version for parameter in trainer.parameters()] == counters
    assert trainer.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in trainer.parameters())


def test_rollout_in_flight_spans_both_versions_and_each_token_is_of_its_own() -> None:
    trainer = marker_llama()
    mark(trainer, 7)
    params = SamplingParams(max_new_tokens=300, stop_token_ids=())
    with own(marker_llama()) as engine, WeightSync(engine) as weight_sync:
        gate = StepGate(engine)
        future = engine.submit(PROMPT, params)
        gate.step(5)
        committing = weight_sync.publish(trainer, version=7, wait=False)
        gate.open()
        report = committing.result(60)
        rollout: Rollout = future.result(60)
    assert report.straddlers == 1
    assert [span.version for span in rollout.version_spans] == [0, 7]
    assert rollout.token_ids == rollout.versions


def test_source_may_change_as_soon_as_publish_without_wait_returns() -> None:
    trainer = tiny_llama(seed=1)
    published = weights(trainer)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with busy_control_thread(engine):
            future = weight_sync.publish(trainer, wait=False)
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.zero_()
            assert not future.done()
        assert future.result(30).version == 1
        assert_equal(weights(engine.model), published)


def test_each_engine_gets_the_weights_in_its_own_dtype() -> None:
    trainer = tiny_llama(seed=1)
    engines = [own(tiny_llama()), own(tiny_llama().bfloat16())]
    with engines[0], engines[1], WeightSync(engines) as weight_sync:
        weight_sync.publish(trainer)
        assert_equal(weights(engines[0].model), weights(trainer))
        assert_equal(weights(engines[1].model), weights(deepcopy(trainer).bfloat16()))


def test_members_of_a_group_are_those_of_the_moment_of_each_publish() -> None:
    class Member:
        def __init__(self, name: str, engine: GenerationEngine) -> None:
            self.worker_id, self.engine = name, engine

        def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
            return self.engine.call(function, *args)

    class Group:
        def __init__(self) -> None:
            self.engines: dict[str, GenerationEngine] = {}

        def targets(self) -> list[Member]:
            return [Member(name, engine) for name, engine in self.engines.items()]

    trainer, group = tiny_llama(seed=1), Group()
    with own(tiny_llama()) as first, own(tiny_llama()) as second, WeightSync(group) as weight_sync:
        with pytest.raises(SyncError, match="no worker at the moment"):
            weight_sync.publish(trainer)
        group.engines["a"] = first
        weight_sync.publish(trainer)
        assert [first.version, second.version] == [1, 0]
        group.engines["b"] = second
        weight_sync.publish(trainer)
        assert [first.version, second.version] == [2, 2]
        del group.engines["a"]
        assert weight_sync.publish(trainer).fenced == ()
        assert [first.version, second.version] == [2, 3]
        assert_equal(weights(second.model), weights(trainer))


def test_persistent_buffers_travel_too() -> None:
    def with_buffer(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("scale", torch.full((3,), value))
        return module

    engine = PlainEngine(with_buffer(0.0))
    with WeightSync(engine) as weight_sync:
        weight_sync.publish(with_buffer(4.0))
    assert engine.model.scale.tolist() == [4.0] * 3


# ------------------------------------------------------------------------------------- what is refused, and leaves all


def _without_norm(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}


BAD_SOURCES: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    r"missing: model\.norm\.weight \[32\]": _without_norm,
    r"unexpected: ghost \[3\]": lambda model: {**model.state_dict(), "ghost": torch.zeros(3)},
    r"wrong shape: lm_head\.weight: offered \[64, 16\], the engine holds \[64, 32\]": lambda model: {
        **model.state_dict(),
        "lm_head.weight": torch.zeros(64, 16),
    },
}


@pytest.mark.parametrize("as_iterable", [False, True])
@pytest.mark.parametrize("message", BAD_SOURCES)
def test_mismatch_is_refused_before_the_engine_changes(message: str, as_iterable: bool) -> None:
    offered = BAD_SOURCES[message](tiny_llama(seed=1))
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        before = weights(engine.model)
        with pytest.raises(ManifestError, match=message):
            weight_sync.publish(iter(offered.items()) if as_iterable else offered)
        assert (engine.version, engine.state) == (0, EngineState.RUNNING)
        assert_equal(weights(engine.model), before)
        assert weight_sync.publish(tiny_llama(seed=2)).version == 1


def test_source_with_specs_is_refused_before_it_gathers_anything() -> None:
    class Gathering(TensorMap):
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            raise AssertionError("gathered")

    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync, pytest.raises(ManifestError, match="missing"):
        weight_sync.publish(Gathering(_without_norm(tiny_llama(seed=1))))


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weight_may_come_under_either_name_and_stays_tied(dropped: str) -> None:
    trainer = tiny_llama(seed=1, tie_word_embeddings=True)
    offered = {name: tensor for name, tensor in trainer.state_dict().items() if name != dropped}
    with own(tiny_llama(tie_word_embeddings=True)) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(offered)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        assert torch.equal(engine.model.lm_head.weight, trainer.lm_head.weight)


def test_untied_source_is_refused_by_an_engine_with_tied_weights() -> None:
    with own(tiny_llama(tie_word_embeddings=True)) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(SyncError, match=r"lm_head\.weight differs"):
            weight_sync.publish(tiny_llama(seed=1))
        assert engine.version == 0


def test_engine_on_the_sources_own_parameters_is_refused_with_the_remedy() -> None:
    model = tiny_llama()
    before = weights(model)
    with GenerationEngine(model) as engine, WeightSync(engine) as weight_sync:
        for source in SOURCES.values():
            with pytest.raises(SyncError, match=r"with engine\.update\(\): optimizer\.step\(\)"):
                weight_sync.publish(source(model))
        assert engine.version == 0
    assert_equal(weights(model), before)


def test_engine_on_the_sources_own_parameters_is_refused_behind_another_target_too() -> None:
    """As a controller's `targets()` hide it: what was staged would be written back over a later optimizer step."""

    class Hidden:
        worker_id = "local"

        def __init__(self, engine: GenerationEngine) -> None:
            self.call = engine.call

    model = tiny_llama()
    with GenerationEngine(model) as engine, WeightSync(Hidden(engine)) as weight_sync:
        with pytest.raises(SyncError, match="nothing to publish"):
            weight_sync.publish(model)
        assert engine.version == 0


def test_source_that_fails_half_way_leaves_the_engine_and_the_next_publish_alone() -> None:
    def failing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield next(iter(model.named_parameters()))
        raise KeyError("gather failed")

    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        before = weights(engine.model)
        with pytest.raises(KeyError, match="gather failed"):
            weight_sync.publish(failing(trainer))
        assert_equal(weights(engine.model), before)
        assert weight_sync.publish(trainer).version == 1


# ----------------------------------------------------------------------------------------------------------- versions


def test_next_version_is_one_above_the_newest_of_all_engines() -> None:
    trainer = tiny_llama(seed=1)
    engines = [own(tiny_llama()), own(tiny_llama())]
    with engines[0], engines[1], WeightSync(engines) as weight_sync:
        with engines[1].update(3):
            pass
        assert weight_sync.publish(trainer).version == 4
        assert [engine.version for engine in engines] == [4, 4]


def test_same_version_with_equal_bytes_is_harmless() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(trainer, version=2)
        again = weight_sync.publish(trainer, version=2)
        assert (again.version, again.fenced, again.commit_s) == (2, (), 0.0)
        assert (engine.version, engine.stats().updates) == (2, 1)


def test_same_version_with_other_bytes_is_refused() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(trainer, version=2)
        with pytest.raises(SyncError, match=r"differs from what is already staged"):
            weight_sync.publish(tiny_llama(seed=2), version=2)
        assert_equal(weights(engine.model), weights(trainer))


def test_version_that_an_engine_has_passed_is_refused() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        weight_sync.publish(trainer, version=2)
        weight_sync.publish(trainer, version=3)
        with pytest.raises(SyncError, match="version must be at least 4, got 2"):
            weight_sync.publish(trainer, version=2)


# ----------------------------------------------------------------------------------------------- failures and time limits


def test_failure_between_copies_fences_the_engine_and_the_next_publish_rolls_it_forward() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with breaking_last_weight(engine), pytest.raises(SyncError, match="the device failed") as failed:
            weight_sync.publish(trainer)
        assert isinstance(failed.value.__cause__, RuntimeError)
        assert (engine.version, engine.state) == (0, EngineState.FENCED)
        with pytest.raises(EngineFencedError):
            engine.submit(PROMPT, GREEDY)
        assert weight_sync.publish(trainer).version == 2
        assert (engine.version, engine.state) == (2, EngineState.RUNNING)
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == greedy_reference(trainer, PROMPT, 12)


def test_failed_engine_is_named_and_the_others_go_on_and_the_same_version_repairs_it() -> None:
    trainer = tiny_llama(seed=1)
    engines = [own(tiny_llama()), own(tiny_llama())]
    with engines[0], engines[1], WeightSync(engines) as weight_sync:
        with breaking_last_weight(engines[0]):
            report = weight_sync.publish(trainer)
        assert (report.version, report.fenced) == (1, ("engine[0]",))
        assert [engine.version for engine in engines] == [0, 1]
        repaired = weight_sync.publish(trainer, version=1)
        assert (repaired.version, repaired.fenced) == (1, ())
        assert [engine.version for engine in engines] == [1, 1]
        assert [engine.stats().updates for engine in engines] == [1, 1]
        assert_equal(weights(engines[0].model), weights(trainer))


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "in process": InProcess,
    "copy": lambda: SharedMemory("copy"),
    "remap": lambda: SharedMemory("remap"),
    "bucket by bucket": Memory,
}


def break_off(engine: GenerationEngine) -> None:
    """An update of the user's own that fails."""
    with engine.update() as model, torch.no_grad():
        model.lm_head.weight.zero_()
        raise RuntimeError("half-way")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_that_somebodys_own_update_broke_is_repaired_by_its_version_published_again(transport: str) -> None:
    trainer = marker_llama()
    mark(trainer, 1)
    with own(marker_llama()) as engine, WeightSync(engine, TRANSPORTS[transport]()) as weight_sync:
        weight_sync.publish(trainer)
        in_flight = engine.submit(PROMPT, SamplingParams(max_new_tokens=200, stop_token_ids=()))
        with pytest.raises(RuntimeError, match="half-way"):
            break_off(engine)
        assert engine.state == EngineState.FENCED
        report = weight_sync.publish(trainer, version=1)
        assert (report.fenced, engine.state, engine.version) == ((), EngineState.RUNNING, 1)
        assert_equal(weights(engine.model), weights(trainer))
        assert in_flight.result(30).token_ids == [1] * 200
        assert in_flight.result().versions == [1] * 200
        with pytest.raises(InvalidRequestError, match="above the engine's 1"), engine.update(1):
            pass


def test_engine_that_was_too_slow_for_a_version_gets_it_when_it_is_published_again() -> None:
    trainer = tiny_llama(seed=1)
    engines = [own(tiny_llama()), own(tiny_llama())]
    with engines[0], engines[1], WeightSync(engines) as weight_sync:
        with busy_control_thread(engines[0]):
            report = weight_sync.publish(trainer, timeout_s=1.0)
        assert (report.version, report.fenced) == (1, ("engine[0]",))
        assert [engine.version for engine in engines] == [0, 1]
        assert weight_sync.publish(trainer, version=1).fenced == ()
        assert_equal(weights(engines[0].model), weights(trainer))


def test_stopped_engine_is_named_and_alone_it_is_an_error_with_its_cause() -> None:
    trainer = tiny_llama(seed=1)
    stopped = own(tiny_llama())
    with stopped:
        pass
    with own(tiny_llama()) as engine, WeightSync([engine, stopped]) as weight_sync:
        assert weight_sync.publish(trainer).fenced == ("engine[1]",)
        assert engine.version == 1
    with WeightSync(stopped) as weight_sync, pytest.raises(SyncError, match=r"engine\[0\]: .*stopped") as failed:
        weight_sync.publish(trainer)
    assert isinstance(failed.value.__cause__, EngineStateError)


def test_engine_that_does_not_answer_in_time_is_named_and_its_late_commit_touches_nothing() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        before = weights(engine.model)
        with (
            busy_control_thread(engine),
            pytest.raises(SyncTimeoutError, match=r"engine\[0\]: its commit of version 1 exceeded 1 s"),
        ):
            weight_sync.publish(trainer, timeout_s=1.0)
        engine.call(lambda _: None).result(30)  # the control thread has passed the late commit
        assert (engine.version, engine.state) == (0, EngineState.RUNNING)
        assert_equal(weights(engine.model), before)
        assert weight_sync.publish(trainer).version == 2


def test_newer_publish_overtakes_one_that_no_engine_has_begun_to_take() -> None:
    first, second = tiny_llama(seed=1), tiny_llama(seed=2)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with busy_control_thread(engine):
            overtaken = weight_sync.publish(first, wait=False)
            waiting = weight_sync.publish(second, wait=False)
            report = overtaken.result(30)
            assert (report.version, report.overtaken, report.fenced) == (1, ("engine[0]",), ())
            assert not waiting.done()
        report = waiting.result(30)
        assert (report.overtaken, report.fenced) == ((), ())
        assert (engine.version, engine.stats().updates) == (report.version, 1)
        assert_equal(weights(engine.model), weights(second))


def test_publish_waits_for_the_stage_before_it_and_not_for_ever() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        entered.set()
        assert leave.wait(30)
        yield from model.named_parameters()

    first, second = tiny_llama(seed=1), tiny_llama(seed=2)
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync, ThreadPoolExecutor(1) as pool:
        staging = pool.submit(weight_sync.publish, slow(first))
        assert entered.wait(30)
        with pytest.raises(SyncTimeoutError, match="waiting for the publish before this one to engine"):
            weight_sync.publish(second, timeout_s=0.05)
        leave.set()
        assert staging.result(30).version == 1
        assert weight_sync.publish(second).version == 2
        assert_equal(weights(engine.model), weights(second))


def test_staging_beyond_the_limit_is_named_as_such_and_ends_before_the_commit() -> None:
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(SyncTimeoutError, match=r"staging version 1 took longer than 1e-06 s, at model\.embed"):
            weight_sync.publish(tiny_llama(seed=1), timeout_s=1e-6)
        assert engine.version == 0


class PlainEngine:
    """What a WeightSync needs of an engine, with no limit on updates and a log of the weights after each."""

    can_remap = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.version = 0
        self.state = EngineState.RUNNING
        self.last_update: UpdateRecord | None = None
        self.history: list[dict[str, Tensor]] = []
        self._control = ThreadPoolExecutor(1)

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._control.submit(function, self, *args)

    @contextmanager
    def update(self, version: int, timeout_s: float) -> Iterator[nn.Module]:
        yield self.model
        self.version = version
        self.last_update = UpdateRecord(version=version, wait_s=0.0, held_s=0.0, straddlers=0)
        self.history.append(weights(self.model))


def test_commit_that_begins_after_the_deadline_touches_nothing() -> None:
    engine = PlainEngine(nn.Linear(2, 2))
    layout = Layout(Manifest.of(engine.model), 256)
    ticket = Ticket(claim=Claim(run_id="run", epoch=1, sender="me"), version=1, seal="")
    (link,) = [Link("engine", engine)]
    transport = InProcess()
    package = Package(ticket=ticket, layout=layout, digests=None)
    transport.send(package, transport.run(layout), [link], Deadline.after(30))
    late = link.call(commit, ticket, "copy", Deadline.after(-1), 30.0)
    with pytest.raises(SyncTimeoutError, match="version 1 began after its sender had stopped waiting"):
        late.result(30)
    assert engine.history == []
    assert link.call(commit, ticket, "copy", Deadline.after(30), 30.0).result(30).version == 1


def test_commit_that_outlives_its_publish_keeps_its_bytes() -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is Tensor.copy_:
                reached.set()
                assert go_on.wait(30)
            return super().__torch_function__(function, types, args, kwargs or {})

    def filled(value: float) -> dict[str, Tensor]:
        return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}

    module = nn.Linear(2, 2)
    module.weight = Slow(module.weight.data, requires_grad=False)
    engine = PlainEngine(module)
    with WeightSync(engine) as weight_sync:
        with pytest.raises(SyncTimeoutError, match="its commit of version 1"):
            weight_sync.publish(filled(1.0), timeout_s=1.0)
        assert reached.is_set()
        committing = weight_sync.publish(filled(2.0), wait=False)
        go_on.set()
        committing.result(30)
    assert_equal(engine.history[0], filled(1.0))
    assert_equal(engine.history[1], filled(2.0))


def test_closing_waits_for_the_commit_and_refuses_what_comes_after() -> None:
    trainer = tiny_llama(seed=1)
    with own(tiny_llama()) as engine:
        weight_sync = WeightSync(engine)
        with busy_control_thread(engine):
            committing = weight_sync.publish(trainer, wait=False)
            with pytest.raises(SyncTimeoutError, match="closing waited"):
                weight_sync.close(timeout_s=0.05)
        weight_sync.close()
        weight_sync.close()
        assert committing.result(0).version == 1
        with pytest.raises(SyncError, match="closed; make a new one"):
            weight_sync.publish(trainer)


def test_settings_that_cannot_work_are_refused_with_their_value() -> None:
    with pytest.raises(SyncError, match="at least one engine, got none"):
        WeightSync([])
    with pytest.raises(SyncError, match=r"update_timeout_s must be .* got 0"):
        SyncConfig(update_timeout_s=0)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), 1e300, "5", None, True], ids=str)
def test_a_limit_that_no_clock_can_wait_is_refused(limit: object) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        for call in (
            lambda: weight_sync.publish(tiny_llama(), timeout_s=limit),
            lambda: weight_sync.close(timeout_s=limit),
            lambda: SyncConfig(update_timeout_s=limit),
        ):
            with pytest.raises(SyncError, match=r"timeout_s must be a positive, finite number of seconds, got"):
                call()
        assert weight_sync.publish(tiny_llama()).version == 1


@pytest.mark.parametrize("version", ["1", 1.0, True])
def test_a_version_that_is_no_integer_is_refused(version: object) -> None:
    with (
        own(tiny_llama()) as engine,
        WeightSync(engine) as weight_sync,
        pytest.raises(SyncError, match=r"version must be an integer, or None"),
    ):
        weight_sync.publish(tiny_llama(), version=version)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((3, torch.ones(1)), "name must be a string, got 3"),
        (("lm_head.weight", [1.0]), "lm_head.weight is a list"),
        (("a", torch.ones(1), 3), r"\(name, tensor\) pairs, got a tuple"),
        (5, r"\(name, tensor\) pairs, got a int"),
    ],
)
def test_an_iterable_of_something_else_is_refused(item: object, message: str) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine) as weight_sync:
        with pytest.raises(SyncError, match=message):
            weight_sync.publish(iter([item]))
        assert weight_sync.publish(tiny_llama()).version == 1


def test_many_requests_survive_many_publishes_with_exact_versions() -> None:
    trainer = marker_llama()
    params = SamplingParams(max_new_tokens=60, stop_token_ids=())
    with own(marker_llama()) as engine, WeightSync(engine) as weight_sync:
        futures = [engine.submit(prompt, params) for prompt in random_prompts([3, 20, 7, 40, 11, 5])]
        for version in range(1, 9):
            mark(trainer, version)
            weight_sync.publish(trainer, version=version)
        rollouts = [future.result(60) for future in futures]
    assert all(rollout.token_ids == rollout.versions for rollout in rollouts)
    assert {len(rollout.token_ids) for rollout in rollouts} == {60}


def test_publish_inside_an_update_of_its_engine_is_refused_at_once() -> None:
    trainer = tiny_llama()
    with GenerationEngine(trainer, copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        with engine.update(), pytest.raises(SyncError, match="inside engine\\[0\\]'s update"):
            weight_sync.publish(trainer)
        assert weight_sync.publish(trainer).version == 2

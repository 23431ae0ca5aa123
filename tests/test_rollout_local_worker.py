"""The worker of a fleet of one: by the same rules as one elsewhere."""

import threading
from collections.abc import Iterator

import pytest
import worker_jobs
from fakes import tiny_llama, wait_until

from rollout import (
    EngineConfig,
    EngineState,
    FinishReason,
    GenerationEngine,
    SamplingParams,
    WorkerDiedError,
    WorkerStaleError,
)
from rollout.errors import EngineStateError
from rollout.workers.local_worker import LocalWorker
from rollout.workers.revival import EngineRevival
from rollout.workers.wire import Finished, WorkerState, WorkItem


@pytest.fixture
def engine() -> Iterator[GenerationEngine]:
    with GenerationEngine(tiny_llama(), EngineConfig(num_blocks=64, page_size=16)) as engine:
        yield engine


def run(worker: LocalWorker, name: str) -> Finished:
    params = SamplingParams(max_new_tokens=4, temperature=0, stop_token_ids=())
    assert worker.submit([WorkItem(request_id=name, prompt_ids=[5, 6, 7], params=params)]) == []
    (finished,) = worker.poll(1, 30.0)
    return finished


def die(worker: LocalWorker, name: str) -> None:
    worker.poll(1, 0.0)  # brings it back if it is dead
    worker.call(worker_jobs.kill_loop).result(20)
    assert run(worker, name).rollout.finish_reason is FinishReason.ERROR
    wait_until(lambda: worker.engine.state is EngineState.DEAD)


def test_deaths_count_only_in_a_row(engine: GenerationEngine) -> None:
    worker = LocalWorker(engine, max_engine_restarts=1)
    for number in range(3):
        die(worker, f"dies{number}")
        assert run(worker, f"ends-well{number}").rollout.finish_reason is FinishReason.LENGTH
    assert worker.health().state is WorkerState.HEALTHY


def test_an_engine_that_dies_again_and_again_is_given_up(engine: GenerationEngine) -> None:
    worker = LocalWorker(engine, max_engine_restarts=1)
    die(worker, "first")
    assert worker.health().state is WorkerState.RESTARTING
    die(worker, "second")
    assert worker.health().state is WorkerState.DEAD
    for ask in (lambda: worker.poll(1, 0.0), lambda: worker.submit([])):
        with pytest.raises(WorkerDiedError, match="died 2 times in a row"):
            ask()


def test_below_the_version_that_it_must_serve_from_an_item_is_refused_as_elsewhere(engine: GenerationEngine) -> None:
    worker = LocalWorker(engine)
    worker.require_version(1)
    assert worker.health().state is WorkerState.STALE
    (refusal,) = worker.submit([WorkItem(request_id="early", prompt_ids=[5, 6, 7])])
    assert isinstance(refusal.error, WorkerStaleError)
    with engine.update(1):
        pass
    assert run(worker, "in-time").rollout.versions == [1] * 4


class CannotComeBack:
    """An engine whose loop died, on a device whose memory somebody else has."""

    state = EngineState.DEAD

    def restart(self) -> None:
        raise RuntimeError("out of memory")


def test_whatever_keeps_an_engine_from_starting_is_told_and_counts_as_another_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Raised, it would end the thread that tries again."""
    revival = EngineRevival(CannotComeBack(), 2, name="w0")
    for _ in range(2):
        assert not revival.is_over
        assert revival.revive()
    assert revival.is_over
    assert "worker w0 could not restart its engine" in caplog.text
    assert "out of memory" in caplog.text


class SlowToComeBack:
    """An engine whose loop died, and whose restart fails when a test lets it end."""

    state = EngineState.DEAD

    def __init__(self) -> None:
        self.began, self.let = threading.Event(), threading.Event()

    def restart(self) -> None:
        self.began.set()
        assert self.let.wait(30.0)
        raise EngineStateError("its thread has not ended")


def test_an_engine_is_not_given_up_while_its_last_restart_lasts() -> None:
    """A fleet would replace the process that is just being saved."""
    engine = SlowToComeBack()
    revival = EngineRevival(engine, 1, name="w0")
    reviver = threading.Thread(target=revival.revive)
    reviver.start()
    assert engine.began.wait(30.0)
    assert not revival.is_over
    engine.let.set()
    reviver.join(30.0)
    assert revival.is_over

"""Weights broadcast to engines in a group of their own."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import tiny_llama, wait_until
from process_target import ProcessTarget
from protocol_fleet import InThread
from transport_helpers import (
    At,
    SpyTarget,
    assert_same_weights,
    digests_of,
    digests_of_model,
    flip_in_broadcast,
    marker,
    num_fds,
    num_gloo_threads,
    num_threads,
    sealed,
    signal_in_broadcast,
    version_of,
    weights,
)

from rollout import GenerationEngine, RolloutError
from sync import SyncConfig, SyncError, SyncTimeoutError, WeightSync
from sync.layout import Layout
from sync.link import Link
from sync.manifest import Manifest
from sync.place import Deadline, Place
from sync.receiver import commit, hello
from sync.run_record import next_claim
from sync.ticket import Package
from sync.transports import Collective
from sync.transports.broadcast_group import (
    BroadcastGroup,
    BrokenGroupError,
    Invitation,
    MeetingFile,
    MeetingServer,
)
from sync.transports.host_memory import HOST

SMALL = SyncConfig(bucket_bytes=20_000)
"""Eight buckets."""


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ProcessTarget]]:
    """w0 lives through the module; w1 is stopped, and then killed."""
    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(ProcessTarget, ["w0", "w1"]))
    yield workers
    for worker in workers:
        worker.close()


def own(model: Any) -> GenerationEngine:
    return GenerationEngine(model, copy_weights=True)


def layout_of(engine: GenerationEngine) -> Layout:
    return Layout(Manifest.of(engine.model), 20_000)


def committed(engine: GenerationEngine, package: Package) -> None:
    engine.call(commit, package.ticket, "copy", Deadline.after(30), 30.0).result(30)


class Invitations:
    """The ids of the groups that a target was asked into."""

    def __init__(self) -> None:
        self.group_ids: list[str] = []

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "_take_part":
            self.group_ids.append(args[1].group_id)


# ------------------------------------------------------------------------------------------------- between processes


def test_a_group_is_kept_while_the_same_engines_take_part_and_made_anew_when_others_do(
    workers: list[ProcessTarget],
) -> None:
    invitations = Invitations()
    targets = [SpyTarget(workers[0], invitations), workers[1]]
    with WeightSync(targets, Collective(), SMALL) as weight_sync:
        for seed in (1, 2):
            report = weight_sync.publish(tiny_llama(seed=seed))
            assert (report.transport, report.fenced) == ("collective", ())
            for worker in workers:
                assert worker.call(digests_of).result(30) == digests_of_model(tiny_llama(seed=seed))
        again = weight_sync.publish(tiny_llama(seed=2), version=report.version)
        assert (again.version, again.fenced) == (report.version, ())
    assert len(invitations.group_ids) == 2
    assert len(set(invitations.group_ids)) == 1
    with WeightSync(targets[:1], Collective(), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=3))
    assert len(set(invitations.group_ids)) == 2


def test_a_stopped_engine_is_named_the_others_get_the_version_in_the_same_send_and_it_comes_back(
    workers: list[ProcessTarget],
) -> None:
    transport = Collective(operation_timeout_s=1.5)
    statuses = [worker.call(hello).result(30) for worker in workers]
    claim = next_claim(None, None, statuses)
    newest = max(status.version for status in statuses)
    links = [Link(worker.worker_id, worker) for worker in workers]

    def send(seed: int) -> dict[str, BaseException | None]:
        module = tiny_llama(seed=seed)
        package, run = sealed(transport, Layout(statuses[0].manifest, 20_000), module, newest + seed, claim)
        sent = transport.send(package, run, links, Deadline.after(60))
        return {name: end.exception(0) for name, end in sent.items()}

    workers[1].call(signal_in_broadcast, 4, signal.SIGSTOP).result(30)
    try:
        failures = send(1)
        assert isinstance(failures.pop("w1"), SyncTimeoutError)
        assert failures == {"w0": None}
        failures = send(2)
        assert "has not yet answered" in str(failures.pop("w1"))
        assert failures == {"w0": None}
    finally:
        os.kill(workers[1].pid, signal.SIGCONT)
    workers[1].call(version_of).result(30)
    assert send(3) == {"w0": None, "w1": None}
    transport.close()


def test_a_corrupt_bucket_is_refused_by_its_receiver_and_passes_nobody_else_by(workers: list[ProcessTarget]) -> None:
    first, last = own(tiny_llama()), own(tiny_llama())
    invitations = Invitations()
    targets = [first, workers[1], SpyTarget(_named(last), invitations)]
    with first, last, WeightSync(targets, Collective(), SMALL) as weight_sync:
        before = weight_sync.publish(tiny_llama(seed=1)).version
        workers[1].call(flip_in_broadcast, 3).result(30)
        report = weight_sync.publish(tiny_llama(seed=2))
        assert report.fenced == ("w1",)
        assert len(set(invitations.group_ids)) == 1, "a group broke"
        assert "arrived with other bytes than were sent" in report.failures["w1"]
        assert workers[1].call(version_of).result(30) == before
        assert workers[1].call(digests_of).result(30) == digests_of_model(tiny_llama(seed=1))
        for engine in (first, last):
            assert_same_weights(engine.model, tiny_llama(seed=2))
        assert weight_sync.publish(tiny_llama(seed=3)).fenced == ()
        assert workers[1].call(digests_of).result(30) == digests_of_model(tiny_llama(seed=3))


def test_an_engine_killed_amid_a_broadcast_is_named_and_the_others_get_the_version_in_the_same_publish(
    workers: list[ProcessTarget],
) -> None:
    living, victim = workers
    version = max(worker.call(version_of).result(30) for worker in workers)
    with WeightSync(workers, Collective(operation_timeout_s=2.0), SMALL) as weight_sync:
        weight_sync.publish(marker(version + 1))
        living.generate_for_ever()
        victim.call(signal_in_broadcast, 4, signal.SIGKILL).result(30)
        report = weight_sync.publish(marker(version + 2))
        assert report.fenced == ("w1",)
        assert "w1 has died" in report.failures["w1"]
        assert weight_sync.publish(marker(version + 3)).fenced == ("w1",)
        assert living.call(digests_of).result(30) == digests_of_model(marker(version + 3))
        assert living.faults() == []
    wait_until(lambda: living.call(num_gloo_threads).result(30) == 0, 20)


# ---------------------------------------------------------------------------------------- engines of this process suffice


def test_a_target_that_never_takes_part_costs_a_limit_and_the_others_get_the_version() -> None:
    class Deaf(Link):
        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            return Future() if fn.__name__ == "_take_part" else super().call(fn, *args)

    transport = Collective(operation_timeout_s=1.0)
    with own(tiny_llama()) as deaf, own(tiny_llama()) as engine:
        package, run = sealed(transport, layout_of(engine), tiny_llama(seed=1), 1)
        sent = transport.send(package, run, [Deaf("deaf", deaf), Link("w1", engine)], Deadline.after(30))
        with pytest.raises(SyncTimeoutError, match="did not answer the broadcast within 2 s"):
            sent["deaf"].result(0)
        assert sent["w1"].result(0) is None
        committed(engine, package)
        assert_same_weights(engine.model, tiny_llama(seed=1))
    transport.close()


def test_a_group_that_breaks_without_anybody_to_blame_is_tried_twice() -> None:
    tries: list[str] = []

    class Unlucky(Link):
        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            if fn.__name__ != "_take_part":
                return super().call(fn, *args)
            tries.append(args[1].group_id)
            failed: Future[Any] = Future()
            failed.set_exception(BrokenGroupError("the network failed"))
            return failed

    transport = Collective(operation_timeout_s=0.3)
    with own(tiny_llama()) as engine:
        package, run = sealed(transport, layout_of(engine), tiny_llama(seed=1), 1)
        sent = transport.send(package, run, [Unlucky("w0", engine)], Deadline.after(30))
        with pytest.raises(BrokenGroupError, match="ranks did not come together"):
            sent["w0"].result(0)
    assert len(set(tries)) == 2
    transport.close()


def test_nobody_waits_for_the_commit_of_a_target_that_was_given_up() -> None:
    class Stopped:
        worker_id = "stopped"

        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            return Future() if fn is not hello else other.call(hello)

    with own(tiny_llama()) as engine, own(tiny_llama()) as other:
        with WeightSync([Stopped(), engine], Collective(operation_timeout_s=1.0), SMALL) as weight_sync:
            report = weight_sync.publish(tiny_llama(seed=1), timeout_s=600.0)
        assert report.failures == {"stopped": "it did not answer that a version comes within 1 s"}
        assert_same_weights(engine.model, tiny_llama(seed=1))


def test_a_target_that_refuses_fails_alone() -> None:
    class Dead:
        worker_id = "dead"

        def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
            raise RolloutError("dead has died")

    transport = Collective()
    with own(tiny_llama()) as engine:
        package, run = sealed(transport, layout_of(engine), tiny_llama(seed=1), 1)
        sent = transport.send(package, run, [Link("dead", Dead()), Link("w1", engine)], Deadline.after(30))
        assert str(sent["dead"].exception(0)) == "dead has died"
        assert sent["w1"].result(0) is None
    transport.close()


def test_nobody_is_asked_to_take_part_in_what_others_are_sent() -> None:
    transport = Collective()
    with own(tiny_llama()) as engine, own(tiny_llama()) as other:
        invitations = Invitations()
        links = [Link("w0", engine), Link("w1", SpyTarget(_named(other), invitations))]
        for version, receivers in enumerate((links, links[:1], links), start=1):
            package, run = sealed(transport, layout_of(engine), tiny_llama(seed=version), version)
            for end in transport.send(package, run, receivers, Deadline.after(30)).values():
                assert end.result(0) is None
    assert len(invitations.group_ids) == len(set(invitations.group_ids)) == 2
    transport.close()


def test_who_falls_out_of_step_leaves_the_group_and_the_others_go_on() -> None:
    """Another sender's version comes between the two calls of one publish."""
    transport, other = Collective(operation_timeout_s=20.0), Collective()
    with own(tiny_llama()) as overtaken, own(tiny_llama()) as engine:
        layout = layout_of(engine)
        newer, newer_run = sealed(other, layout, tiny_llama(seed=2), 2)

        def overtake() -> None:
            assert other.send(newer, newer_run, [Link("w0", overtaken)], Deadline.after(30))["w0"].result(0) is None

        package, run = sealed(transport, layout, tiny_llama(seed=1), 1)

        class Overtaken(Link):
            def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
                at("w0" if fn.__name__ == "_take_part" else "", args)
                return super().call(fn, *args)

        at = At("w0", 1, overtake)
        sent = transport.send(package, run, [Overtaken("w0", overtaken), Link("w1", engine)], Deadline.after(10))
        with pytest.raises(SyncError, match="version 1 is not staged here, version 2 is"):
            sent["w0"].result(0)
        assert sent["w1"].result(0) is None
    transport.close()
    other.close()


def test_nothing_grows_over_many_groups_and_close_leaves_nothing() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(own(tiny_llama())) for _ in range(2)]
        fds, threads = num_fds(), num_threads()
        transport = Collective()
        with WeightSync(engines, transport, SMALL) as weight_sync:
            for number in range(30):
                links = [Link(f"engine[{i}]", engine) for i, engine in enumerate(engines)]
                status = hello(engines[0])
                if status.claim is not None and number % 2:
                    module = tiny_llama(seed=number)
                    package, run = sealed(transport, layout_of(engines[0]), module, status.version + 1, status.claim)
                    assert transport.send(package, run, links[:1], Deadline.after(30))["engine[0]"].result(0) is None
                assert weight_sync.publish(tiny_llama(seed=number)).fenced == ()
            assert transport._folder is not None
            folder = transport._folder.path
            assert len(list(folder.iterdir())) <= 3
        assert not folder.exists()
        # at most: a thread of a test before this one may have ended meanwhile
        wait_until(lambda: num_fds() <= fds and num_threads() <= threads, 20)


def test_a_group_of_the_trainers_own_is_left_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with own(tiny_llama()) as engine, WeightSync(engine, Collective(), SMALL) as weight_sync:
            weight_sync.publish(tiny_llama(seed=1))
            assert_same_weights(engine.model, tiny_llama(seed=1))
            assert dist.get_world_size() == 1
            dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1))
    finally:
        dist.destroy_process_group()


def test_ranks_that_share_no_folder_meet_at_the_named_interface_alone() -> None:
    listening: list[str] = []

    def look() -> None:
        said = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, timeout=20, check=True).stdout
        listening.extend(line.split()[3] for line in said.splitlines() if f"pid={os.getpid()}," in line)

    transport = Collective(interface="lo")
    with own(tiny_llama()) as engine:
        look()
        before = set(listening)
        target = SpyTarget(_named(engine), At("_take_part", 2, look))
        with WeightSync(target, transport, SMALL) as weight_sync:
            weight_sync.publish(tiny_llama(seed=1))
            weight_sync.publish(tiny_llama(seed=2))
        assert_same_weights(engine.model, tiny_llama(seed=2))
    opened = set(listening) - before
    assert len(opened) >= 2  # the meeting, and gloo's own
    assert {address.rpartition(":")[0] for address in opened} == {"127.0.0.1"}


def test_engines_of_another_machine_meet_at_a_socket_and_of_this_one_in_a_private_file() -> None:
    transport = Collective()
    here_alone = transport._invite((), [Place(machine="elsewhere", pid=1)])
    assert isinstance(here_alone.server, MeetingServer)
    assert here_alone.server.meeting.host == "127.0.0.1"
    here_file = transport._invite((), [])
    assert here_file.server is None
    transport.close()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(SyncError, match='backend must be "gloo" or "nccl"'):
        Collective("mpi")  # type: ignore[arg-type]
    with pytest.raises(SyncError, match="operation_timeout_s must be"):
        Collective(operation_timeout_s=0)
    with pytest.raises(SyncError, match=r"interface 'nope' has no IPv4 address here; this machine has .*lo"):
        Collective(interface="nope")
    if not torch.cuda.is_available():
        with own(tiny_llama()) as engine, WeightSync(engine, Collective("nccl")) as weight_sync:
            with pytest.raises(SyncError, match="needs a GPU here and in each engine"):
                weight_sync.publish(tiny_llama())
            assert engine.version == 0


def test_a_send_ends_with_its_deadline() -> None:
    transport = Collective(operation_timeout_s=20.0)
    with own(tiny_llama()) as engine:
        package, run = sealed(transport, layout_of(engine), tiny_llama(seed=1), 1)
        sent = transport.send(package, run, [Link("w0", engine)], Deadline.after(0))
        assert isinstance(sent["w0"].exception(0), SyncTimeoutError)
    transport.close()


def test_waiting_for_the_ranks_ends_with_the_publish(tmp_path: Path) -> None:
    alone = Invitation(
        group_id="g", meeting=MeetingFile(str(tmp_path / "meeting")), backend="gloo", rank=0, size=2, limit_s=5.0
    )
    with pytest.raises(BrokenGroupError, match=r"did not come together within 0\.\d+ s"):
        BroadcastGroup(alone, HOST, Deadline.after(0.3))


def test_a_broadcast_ends_with_the_publish(tmp_path: Path) -> None:
    meeting = MeetingFile(str(tmp_path / "meeting"))
    first, second = (
        Invitation(group_id="g", meeting=meeting, backend="gloo", rank=rank, size=2, limit_s=5.0) for rank in range(2)
    )
    leading = InThread(lambda: BroadcastGroup(first, HOST, Deadline.after(30)))
    following = BroadcastGroup(second, HOST, Deadline.after(30))
    part = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(BrokenGroupError, match=r"did not end within 0\.\d+ s"):
        following.broadcast(part, Deadline.after(0.3))
    with pytest.raises(BrokenGroupError, match="the time of the publish was over"):
        leading.result().broadcast(part, Deadline.after(0))


def _named(engine: GenerationEngine) -> Any:
    class Named:
        worker_id = "w0"
        call = engine.call

    return Named()


@pytest.mark.gpu
def test_nccl_between_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: the sender's and the engine's")
    model = tiny_llama().to("cuda:1")
    with own(model) as engine, WeightSync(engine, Collective("nccl"), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        expected = weights(tiny_llama(seed=1))
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in weights(engine.model).items())

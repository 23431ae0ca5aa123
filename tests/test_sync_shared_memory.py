"""Shared memory between real processes: what engines get, what they share, and what is left when somebody is killed."""

import gc
import multiprocessing
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import mark, marker_llama, tiny_llama, wait_until
from fakes_sync import BUCKET_BYTES, FakeTarget, check_fleet, marked
from footprint import Footprint, file_pss_kib, files_below, footprint, footprint_of, runs_on_files
from process_target import NUM_MARKS, PRELOADED, ProcessTarget
from sender_process import SenderProcess

from rollout import EngineState, GenerationEngine, SamplingParams
from sync import SyncConfig, SyncError, WeightSync
from sync.layout import Layout
from sync.link import Target
from sync.manifest import Manifest
from sync.place import MEMORY_FOLDER
from sync.receiver import add_derived
from sync.transports import SharedMemory
from sync.transports.mapped_file import MappedFile
from sync.transports.run_folder import RunFolder

CONFIG = SyncConfig(bucket_bytes=4096)
MODES = ["copy", "remap"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private place on the memory file system, empty again at the end."""
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.exists() else None) as path:
        yield Path(path)
        assert files_below(Path(path)) == [], "files stayed behind"


@pytest.fixture(scope="module")
def survivors() -> Iterator[list[ProcessTarget]]:
    """Two engines that generate all the while and must outlive everything that happens to others."""
    with ExitStack() as stack:
        targets = [stack.enter_context(ProcessTarget(name)) for name in "ab"]
        for target in targets:
            target.generate_for_ever()
        yield targets
        for target in targets:
            assert target.faults() == []


class Publisher:
    """Marker models of growing versions, above whatever the engines hold."""

    def __init__(self, weight_sync: WeightSync, *targets: Target) -> None:
        self._weight_sync = weight_sync
        self.trainer = marker_llama()
        self.version = max(version_of(target) for target in targets)

    def publish(self, *, timeout_s: float = 60.0) -> Any:
        self.version += 1
        mark(self.trainer, self.version % NUM_MARKS)
        return self._weight_sync.publish(self.trainer, version=self.version, timeout_s=timeout_s)


def version_of(target: Target) -> int:
    return int(target.call(_version).result(30))


def _version(engine: GenerationEngine) -> int:
    return engine.version


def weights_of(target: ProcessTarget) -> dict[str, bytes]:
    weights: dict[str, bytes] = target.call(_weights).result(30)
    return weights


def _weights(engine: GenerationEngine) -> dict[str, bytes]:
    return bytes_of(engine.model)


def bytes_of(module: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


def footprint_in(target: ProcessTarget, folder: Path) -> Footprint:
    found: Footprint = target.call(footprint_of, folder).result(30)
    return found


def generates(target: ProcessTarget) -> bool:
    """Whether tokens of the version that it holds now come out."""
    return bool(target.call(_generates).result(30))


def _generates(engine: GenerationEngine) -> bool:
    before = engine.stats().generated_tokens
    wait_until(lambda: engine.stats().generated_tokens > before + 8)
    return True


def tied_bfloat16() -> Any:
    return tiny_llama(seed=3, tie_word_embeddings=True).bfloat16()


# --------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("commit", [*MODES, None])
def test_engines_hold_the_very_bytes_of_the_trainer(commit: Any, folder: Path, survivors: list[ProcessTarget]) -> None:
    with WeightSync(survivors, SharedMemory(commit, folder=folder), CONFIG) as weight_sync:
        publisher = Publisher(weight_sync, *survivors)
        for _ in range(3):
            report = publisher.publish()
            assert (report.fenced, report.transport) == ((), "shared_memory")
            for target in survivors:
                assert weights_of(target) == bytes_of(publisher.trainer)
                assert version_of(target) == report.version


@pytest.mark.parametrize("commit", MODES)
def test_engines_of_two_kinds_each_get_their_own_type_and_ties_stay(commit: Any, folder: Path) -> None:
    trainer = tiny_llama(seed=1, tie_word_embeddings=True)
    cast = tiny_llama(seed=1, tie_word_embeddings=True).bfloat16()
    with (
        ProcessTarget("full", tiny_llama) as full,
        ProcessTarget("tied", tied_bfloat16) as tied,
        WeightSync([full, tied], SharedMemory(commit, folder=folder), CONFIG) as weight_sync,
    ):
        for _ in range(3):
            assert weight_sync.publish(trainer.state_dict()).fenced == ()
            assert weights_of(full) == bytes_of(trainer)
            assert weights_of(tied) == bytes_of(cast)
            assert tied.call(_is_tied).result(30)
            with torch.no_grad():
                for module in (trainer, cast):
                    for parameter in module.parameters():
                        parameter.mul_(2)  # exact in either type


def _is_tied(engine: GenerationEngine) -> bool:
    model = engine.model
    return model.lm_head.weight is model.get_input_embeddings().weight


def test_remapped_engines_share_one_physical_copy(folder: Path, survivors: list[ProcessTarget]) -> None:
    weight_sync = WeightSync(survivors, SharedMemory("remap", folder=folder), CONFIG)
    Publisher(weight_sync, *survivors).publish()
    layout = Layout(Manifest.of(marker_llama()), CONFIG.bucket_bytes)
    weight_sync.close()  # the sender maps it too until then
    assert all(target.call(runs_on_files, folder).result(30) for target in survivors)
    shares = [target.call(file_pss_kib, folder).result(30) for target in survivors]
    whole = layout.num_bytes / 1024
    assert sum(shares) <= whole * 1.1 + 8
    for share in shares:
        assert 0.4 * whole <= share <= 0.6 * whole + 4


def test_a_write_into_a_remapped_parameter_reaches_neither_the_file_nor_another_engine(
    folder: Path, survivors: list[ProcessTarget]
) -> None:
    writer, other = survivors
    with WeightSync(survivors, SharedMemory("remap", folder=folder), CONFIG) as weight_sync:
        publisher = Publisher(weight_sync, *survivors)
        publisher.publish()
        (file,) = folder.rglob("weights-*")
        before = file.read_bytes()
        publisher.version += 1
        writer.call(_scribble, publisher.version).result(30)
        assert weights_of(writer) != bytes_of(publisher.trainer)
        assert file.read_bytes() == before
        assert weights_of(other) == bytes_of(publisher.trainer)
        publisher.publish()
        assert weights_of(writer) == weights_of(other) == bytes_of(publisher.trainer)


def test_what_was_written_into_a_mapping_that_is_used_again_is_not_taken_for_a_version(folder: Path) -> None:
    """An engine keeps its mappings from one version to the next; pages that it wrote to do not follow the file."""
    with (
        GenerationEngine(marker_llama(), copy_weights=True) as engine,
        WeightSync(engine, SharedMemory("remap", folder=folder), CONFIG) as weight_sync,
    ):
        publisher = Publisher(weight_sync, engine)
        publisher.publish()
        publisher.version += 1
        engine.call(_scribble, publisher.version).result(30)
        kept = {parameter.data_ptr() for parameter in engine.model.parameters()}
        for _ in range(4):
            assert publisher.publish().fenced == ()
            assert bytes_of(engine.model) == bytes_of(publisher.trainer)
        for _ in range(2):
            publisher.publish()
        now = {parameter.data_ptr() for parameter in engine.model.parameters()}
        publisher.publish()
        publisher.publish()
        assert now == {parameter.data_ptr() for parameter in engine.model.parameters()} != kept, "mapped anew each time"


def _scribble(engine: GenerationEngine, version: int) -> None:
    with engine.update(version) as model, torch.no_grad():
        mark(model, version % NUM_MARKS)
        model.model.norm.weight.mul_(2)


# --------------------------------------------------------------------------------------------------- killed receivers


class StopsAt:
    """Stops its engine for ever in the middle of staging, or inside the pause after the copies."""

    def __init__(self, step: str, sign: Path) -> None:
        self._step = step
        self._sign = sign

    def prepare(self, staged: Any) -> None:
        self._stop("stage")

    def install(self, prepared: None) -> None:
        self._stop("commit")

    def _stop(self, step: str) -> None:
        if step == self._step:
            self._sign.touch()
            threading.Event().wait()


@pytest.mark.parametrize("commit", MODES)
@pytest.mark.parametrize("step", ["stage", "commit"])
def test_a_receiver_that_is_killed_in_the_middle_leaves_nothing_and_hurts_nobody(
    step: str, commit: Any, folder: Path, survivors: list[ProcessTarget], tmp_path: Path
) -> None:
    """slime#1731, verl#6958: shared segments leak, also when a receiver is killed."""
    with ProcessTarget("victim") as victim:
        targets = [survivors[0], victim, survivors[1]]
        with WeightSync(targets, SharedMemory(commit, folder=folder), CONFIG) as weight_sync:
            publisher = Publisher(weight_sync, *targets)
            assert publisher.publish().fenced == ()
            victim.generate_for_ever()
            victim.call(add_derived, StopsAt(step, tmp_path / "stopped")).result(30)
            killer = threading.Thread(target=_kill_when, args=(victim, (tmp_path / "stopped").exists))
            killer.start()
            report = publisher.publish()
            killer.join(30)
            assert report.fenced == ("victim",)
            assert "died" in report.failures["victim"]
            for target in survivors:
                assert weights_of(target) == bytes_of(publisher.trainer)
                assert generates(target)
            for _ in range(4):
                report = publisher.publish()
                assert report.fenced == ("victim",)
                assert {version_of(target) for target in survivors} == {report.version}
            assert len(list(folder.rglob("weights-*"))) <= 3
    assert files_below(folder) == []
    for target in survivors:
        maps = set(footprint_in(target, folder).maps)
        assert len(maps) == (1 if commit == "remap" else 0), maps


def _kill_when(victim: ProcessTarget, condition: Callable[[], bool]) -> None:
    wait_until(condition)
    victim.kill()


# --------------------------------------------------------------------------------------------------- killed senders


@pytest.mark.parametrize(
    ("step", "commit"),
    [("stage", "remap"), ("send", "remap"), ("send", "copy"), ("commit", "remap"), ("commit", "copy")],
)
def test_a_sender_that_is_killed_in_the_middle_has_a_successor_that_goes_on_above_it(
    step: str, commit: Any, folder: Path, survivors: list[ProcessTarget]
) -> None:
    targets = {target.worker_id: target for target in survivors}
    first = 1 + max(version_of(target) for target in survivors)
    with SenderProcess(targets, folder, commit) as sender:
        assert sender.publish(first).result(60).fenced == ()
        held = {"stage": "", "send": "accept", "commit": "commit"}[step]
        sender.is_held = lambda name, function: name == "b" and function in {held, "commit"}
        dying = sender.publish(first + 1, stop_after=3 if step == "stage" else None)
        until = ("", "staging") if step == "stage" else ("b", held)
        wait_until(lambda: until in sender.calls[-4:])
        if step != "stage":
            wait_until(lambda: version_of(targets["a"]) == first + 1)
        sender.kill()
        assert dying.exception(10) is not None
        left = files_below(folder)
        assert left, "a killed process cannot tidy up"
        with WeightSync(survivors, SharedMemory(commit, folder=folder), CONFIG) as successor:
            assert not set(left) & set(files_below(folder)), "its successor does"
            publisher = Publisher(successor, *survivors)
            report = publisher.publish()
            assert (report.version, report.fenced) == (first + (1 if step == "stage" else 2), ())
            sender.let_through()  # late, on the wire: the zombie's bytes are gone and its claim is old
            for target in survivors:
                assert version_of(target) == report.version
                assert weights_of(target) == bytes_of(publisher.trainer)
                assert generates(target)
            assert publisher.publish().fenced == ()
    assert files_below(folder) == []
    for target in survivors:
        assert len(footprint_in(target, folder).maps) == (1 if commit == "remap" else 0)


# --------------------------------------------------------------------------------------------- a commit that breaks off


class Failing:
    """Fails in the pause, after the parameters have been changed, so often."""

    def __init__(self, times: int) -> None:
        self.times = times

    def prepare(self, staged: Any) -> None:
        return

    def install(self, prepared: None) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("no kernel image")


@pytest.mark.parametrize("commit", MODES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_breaks_off_is_rolled_forward_or_fences_until_the_next_one(
    times: int, commit: Any, folder: Path
) -> None:
    with (
        GenerationEngine(marker_llama(), copy_weights=True) as engine,
        WeightSync(engine, SharedMemory(commit, folder=folder), CONFIG) as weight_sync,
    ):
        publisher = Publisher(weight_sync, engine)
        publisher.publish()
        engine.call(add_derived, Failing(times)).result(30)
        running = engine.submit([5, 17, 33], SamplingParams(max_new_tokens=200, stop_token_ids=()))
        if times == 1:
            assert publisher.publish().fenced == ()
        else:
            with pytest.raises(SyncError, match="no kernel image"):
                publisher.publish()
            assert (engine.version, engine.state) == (1, EngineState.FENCED)
            publisher.publish()
        assert (engine.version, engine.state) == (publisher.version, EngineState.RUNNING)
        assert bytes_of(engine.model) == bytes_of(publisher.trainer)
        rollout = running.result(30)
        assert rollout.token_ids == rollout.versions
    del engine, running, weight_sync, publisher
    gc.collect()
    assert footprint(folder).maps == ()


class FailsIn:
    """Fails in these steps, one after the other; then in none."""

    def __init__(self, *steps: str) -> None:
        self._steps = list(steps)

    def prepare(self, staged: Any) -> None:
        self._fail("prepare")

    def install(self, prepared: None) -> None:
        self._fail("install")

    def _fail(self, step: str) -> None:
        if self._steps and self._steps[0] == step:
            self._steps.pop(0)
            raise RuntimeError(f"{step} failed")


def test_a_file_that_a_fenced_engine_points_into_is_not_written_before_the_engine_has_left_it(folder: Path) -> None:
    """A remap broke off; the version after it is staged, and fails before its own."""
    with (
        GenerationEngine(marker_llama(), copy_weights=True) as engine,
        WeightSync(engine, SharedMemory("remap", folder=folder), CONFIG) as weight_sync,
    ):
        publisher = Publisher(weight_sync, engine)
        publisher.publish()
        engine.call(add_derived, FailsIn("install", "install", "prepare", "prepare", "prepare")).result(30)
        for why in ("install failed", "prepare failed"):
            with pytest.raises(SyncError, match=why):
                publisher.publish()
        assert engine.state == EngineState.FENCED
        fenced_on = bytes_of(engine.model)

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            mark(publisher.trainer, 9)
            yield from publisher.trainer.named_parameters()
            assert bytes_of(engine.model) == fenced_on

        publisher.version += 1
        assert weight_sync.publish(watched(), version=publisher.version).fenced == ()
        assert bytes_of(engine.model) == bytes_of(publisher.trainer)
        for _ in range(3):
            publisher.publish()
        assert len(list(folder.rglob("weights-*"))) <= 3


# --------------------------------------------------------------------------------------------------- limits and trust


def test_a_full_memory_file_system_is_a_clear_error_and_leaves_nothing(folder: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_publish_into_a_full_one, args=(folder, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(120)
    message = ours.recv()
    process.join(30)
    assert process.exitcode == 0
    assert f"staging needs 0.00 GiB in {folder}" in message
    assert "SharedMemory(folder=...)" in message


def _publish_into_a_full_one(folder: Path, connection: Any) -> None:
    target = FakeTarget("a")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with WeightSync(target, SharedMemory(folder=folder)) as weight_sync:
        weight_sync.publish(marked(1.0))
        fds = footprint(folder).fds
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
        try:
            weight_sync.publish(marked(2.0))
        except SyncError as error:
            connection.send(str(error))
        assert target.engine.version == 1
        assert footprint(folder).fds == fds
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert weight_sync.publish(marked(2.0)).fenced == ()
        check_fleet([target], {1: 1.0, 2: 2.0})


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(mode: int, folder: Path) -> None:
    home = folder / f"rollsync-{os.getuid()}"
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(SyncError, match=f"of this user alone .* mode {mode:o}"):
        SharedMemory(folder=folder)
    home.chmod(0o700)
    SharedMemory(folder=folder).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    home = folder / f"rollsync-{os.getuid()}"
    home.mkdir(mode=0o700)
    os.chown(home, 12345, 12345)
    with pytest.raises(SyncError, match="it has owner 12345"):
        SharedMemory(folder=folder)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / f"rollsync-{os.getuid()}").symlink_to(folder / "elsewhere")
    with pytest.raises(SyncError, match="of this user alone"):
        SharedMemory(folder=folder)


def test_files_and_folders_are_for_their_user_alone(folder: Path) -> None:
    target = FakeTarget("a")
    with WeightSync(target, SharedMemory(folder=folder), SyncConfig(bucket_bytes=BUCKET_BYTES)) as weight_sync:
        weight_sync.publish(marked(1.0))
        (file,) = folder.rglob("weights-*")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_living_senders_folder_is_not_swept(folder: Path) -> None:
    target = FakeTarget("a")
    with WeightSync(target, SharedMemory(folder=folder), SyncConfig(bucket_bytes=BUCKET_BYTES)) as weight_sync:
        weight_sync.publish(marked(1.0))
        before = files_below(folder)
        SharedMemory(folder=folder).close()
        assert files_below(folder) == before
        assert weight_sync.publish(marked(2.0)).fenced == ()


# --------------------------------------------------------------------------------------------- what somebody still maps


def test_run_folders_that_come_and_go_at_once_do_not_take_each_others_home_away(folder: Path) -> None:
    def come_and_go(_: int) -> None:
        for _ in range(300):
            RunFolder(folder).close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come_and_go, range(3)))
    assert list(folder.iterdir()) == []


def test_what_somebody_maps_is_never_written_again(folder: Path) -> None:
    targets = [FakeTarget("slow"), FakeTarget("quick")]
    transport = SharedMemory("copy", folder=folder)
    with WeightSync(targets, transport, SyncConfig(bucket_bytes=BUCKET_BYTES)) as weight_sync:
        weight_sync.publish(marked(1.0))
        (file,) = folder.rglob("weights-*")
        layout = Layout(Manifest.of(marked(0.0)), BUCKET_BYTES)
        mapped = MappedFile(path=str(file), inode=file.stat().st_ino).open(layout)
        before = mapped.run.clone()
        for version in range(2, 8):
            assert weight_sync.publish(marked(float(version))).fenced == ()
            assert torch.equal(mapped.run, before)
            assert len(list(folder.rglob("weights-*"))) <= 3
        assert not file.exists(), "it loses its name, and its memory goes with who maps it"
        mapped.close()
        check_fleet(targets, {version: float(version) for version in range(1, 8)})


def test_a_file_that_everybody_has_left_is_written_again(folder: Path) -> None:
    """Fresh pages cost several times as much as pages in use."""
    target = FakeTarget("a")
    with WeightSync(target, SharedMemory("copy", folder=folder), SyncConfig(bucket_bytes=BUCKET_BYTES)) as weight_sync:
        inodes = set()
        for version in range(1, 8):
            weight_sync.publish(marked(float(version)))
            inodes |= {file.stat().st_ino for file in folder.rglob("weights-*")}
    assert len(inodes) == 2


@pytest.mark.parametrize("commit", MODES)
def test_an_engine_that_stays_behind_runs_on_the_weights_that_it_has(
    commit: Any, folder: Path, survivors: list[ProcessTarget], tmp_path: Path
) -> None:
    slow, quick = survivors
    with WeightSync(survivors, SharedMemory(commit, folder=folder), CONFIG) as weight_sync:
        publisher = Publisher(weight_sync, *survivors)
        publisher.publish()
        held = bytes_of(publisher.trainer)
        with control_thread_held(slow, tmp_path):
            for _ in range(3):
                report = publisher.publish(timeout_s=1.0)
                assert report.fenced == ("a",)
                assert weights_of(quick) == bytes_of(publisher.trainer)
            assert len(list(folder.rglob("weights-*"))) <= 3
        assert weights_of(slow) == held
        assert generates(slow)
        assert publisher.publish().fenced == ()
        assert weights_of(slow) == weights_of(quick) == bytes_of(publisher.trainer)
        assert slow.faults() == quick.faults() == []


@contextmanager
def control_thread_held(target: ProcessTarget, tmp_path: Path) -> Iterator[None]:
    """The engine generates, but takes no call inside this block."""
    entered, leave = tmp_path / "entered", tmp_path / "leave"
    staying = target.call(_stay, entered, leave)
    wait_until(entered.exists)
    try:
        yield
    finally:
        leave.touch()
        staying.result(30)


def _stay(engine: GenerationEngine, entered: Path, leave: Path) -> None:
    entered.touch()
    wait_until(leave.exists)


def test_bytes_that_are_gone_or_replaced_are_refused(folder: Path) -> None:
    transport = SharedMemory("copy", folder=folder)
    target = FakeTarget("a")
    with WeightSync(target, transport, SyncConfig(bucket_bytes=BUCKET_BYTES)) as weight_sync:
        weight_sync.publish(marked(1.0))
        (file,) = folder.rglob("weights-*")
        layout = Layout(Manifest.of(marked(0.0)), BUCKET_BYTES)
        inode = file.stat().st_ino
        with pytest.raises(SyncError, match="not the file that was sent"):
            MappedFile(path=str(file), inode=inode + 1).open(layout)
        with pytest.raises(SyncError, match="staged weights are gone"):
            MappedFile(path=str(file) + "x", inode=inode).open(layout)
        fds = footprint(folder).fds
        transport._files[0].lock_if_unread()
        for _ in range(2):  # with a mapping that waits for the file, then with a new one
            with pytest.raises(SyncError, match="being written again"):
                MappedFile(path=str(file), inode=inode).open(layout)
        assert len(footprint(folder).fds) < len(fds)


# --------------------------------------------------------------------------------------------------------- leaks


@pytest.mark.parametrize("commit", MODES)
def test_publishing_leaves_no_fd_map_thread_or_file_behind(
    commit: Any, folder: Path, survivors: list[ProcessTarget]
) -> None:
    with WeightSync(survivors, SharedMemory(commit, folder=folder), CONFIG) as weight_sync:
        publisher = Publisher(weight_sync, *survivors)
        for _ in range(3):
            publisher.publish()
        before = [footprint_in(target, folder) for target in survivors], footprint(folder)
        for _ in range(10):
            publisher.publish()
        after = [footprint_in(target, folder) for target in survivors], footprint(folder)
        for old, new in zip([*before[0], before[1]], [*after[0], after[1]], strict=True):
            assert len(new.fds) == len(old.fds)
            assert new.threads == old.threads
            assert len(new.maps) == len(old.maps)
    assert footprint(folder).maps == ()
    assert files_below(folder) == []

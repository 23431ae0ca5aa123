"""Weights through a folder: what is written, who may read it, and what a killed writer leaves."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_writer import KEEP
from fakes import greedy_reference, tiny_llama, tiny_qwen2
from process_target import ProcessTarget
from safetensors.torch import load_file
from transport_helpers import (
    CLAIM,
    SpyLink,
    assert_same_weights,
    die_at_next_open,
    digests_of,
    digests_of_model,
    marker,
    num_fds,
    sealed,
    version_of,
)

from rollout import GenerationEngine, SamplingParams
from sync import ManifestError, SyncConfig, SyncError, SyncTimeoutError, WeightSync
from sync.layout import Layout
from sync.manifest import Manifest
from sync.place import MEMORY_FOLDER, Deadline
from sync.receiver import begin, commit
from sync.ticket import Claim, Package
from sync.transports import Disk
from sync.transports.stored_version import shard_names
from sync.transports.version_index import INDEX
from sync.transports.version_store import POINTER, VersionStore

SMALL = SyncConfig(bucket_bytes=20_000)
"""Several shards."""
PROMPT = [5, 17, 33, 8]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0, stop_token_ids=())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "versions"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 3 of `tiny_llama(seed=3)`; the trainer has ended."""
    path = tmp_path_factory.mktemp("published") / "versions"
    with own(tiny_llama()) as engine, WeightSync(engine, Disk(path), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=3), version=3)
    return path


@pytest.fixture(scope="module")
def worker(published: Path) -> Iterator[ProcessTarget]:
    """An engine of another process, that came up from disk."""
    with ProcessTarget("w0") as worker:
        assert Disk.bring_up(worker, published) == 3
        assert worker.call(digests_of).result(30) == digests_of_model(tiny_llama(seed=3))
        yield worker


@pytest.fixture
def copied(published: Path, folder: Path) -> Path:
    """`published`, to damage."""
    shutil.copytree(published, folder)
    return folder


def own(model: Any) -> GenerationEngine:
    return GenerationEngine(model, copy_weights=True)


def versions_in(folder: Path) -> list[int]:
    return sorted(int(entry.name.split("-")[1]) for entry in folder.iterdir() if entry.name.startswith("version-"))


def newest_folder(folder: Path) -> Path:
    return folder / json.loads((folder / POINTER).read_text())["folder"]


def shard_with(folder: Path, name: str) -> Path:
    return next(path for path in sorted(newest_folder(folder).glob("*.safetensors")) if name in load_file(path))


# --------------------------------------------------------------------------------------------------------- a publish


def test_engines_here_and_in_another_process_hold_what_was_published(folder: Path, worker: ProcessTarget) -> None:
    with (
        own(tiny_llama().bfloat16()) as engine,
        WeightSync([worker, engine], Disk(folder), SMALL) as weight_sync,
    ):
        before = worker.call(version_of).result(30)
        for seed in (1, 2):
            report = weight_sync.publish(tiny_llama(seed=seed))
            assert (report.version, report.transport, report.fenced) == (before + seed, "disk", ())
            assert worker.call(digests_of).result(30) == digests_of_model(tiny_llama(seed=seed))
            assert_same_weights(engine.model, tiny_llama(seed=seed).bfloat16())


def test_a_target_that_dies_while_reading_holds_up_nobody_and_the_next_publish_works(
    folder: Path, worker: ProcessTarget
) -> None:
    version = worker.call(version_of).result(30)
    with ProcessTarget("w1") as victim, WeightSync([worker, victim], Disk(folder), SMALL) as weight_sync:
        weight_sync.publish(marker(version + 1))
        worker.generate_for_ever()
        victim.call(die_at_next_open, "weights-00001").result(30)
        report = weight_sync.publish(marker(version + 2))
        assert report.fenced == ("w1",)
        assert "w1 has died" in report.failures["w1"]
        assert weight_sync.publish(marker(version + 3)).version == version + 3
        assert worker.call(version_of).result(30) == version + 3
        assert worker.faults() == []
    assert versions_in(folder) == [version + 2, version + 3]


def test_the_same_version_again_writes_nothing_and_is_harmless(folder: Path) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine, Disk(folder), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1), version=1)
        before = newest_folder(folder)
        assert weight_sync.publish(tiny_llama(seed=1), version=1).version == 1
    assert newest_folder(folder) == before


def test_nothing_grows_over_twenty_publishes(folder: Path) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine, Disk(folder, keep=3), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        before = num_fds()
        for _ in range(20):
            weight_sync.publish(tiny_llama(seed=1))
        assert num_fds() <= before
    assert versions_in(folder) == [19, 20, 21]
    assert {entry.name for entry in folder.iterdir() if not entry.name.startswith("version-")} == {POINTER, "writer"}


def test_a_shard_damaged_on_its_way_is_refused_and_nothing_is_committed(folder: Path) -> None:
    transport = Disk(folder)
    with own(tiny_llama()) as engine:
        layout = Layout(Manifest.of(engine.model), 20_000)
        package, run = sealed(transport, layout, tiny_llama(seed=1), 1)

        def damage(*_: Any) -> None:
            flip_last_byte(shard_with(folder, "lm_head.weight"))

        sent = transport.send(package, run, [SpyLink("w0", engine, damage)], Deadline.after(30))
        with pytest.raises(SyncError, match=r"safetensors is damaged: .* has other bytes"):
            sent["w0"].result(30)
        with pytest.raises(SyncError, match="nothing is"):
            engine.call(commit, package.ticket, "copy", Deadline.after(30), 30.0).result(30)
        assert_same_weights(engine.model, tiny_llama())


def test_what_was_sent_is_what_is_committed_not_what_lies_there(folder: Path) -> None:
    """A folder in which every digest is right, with other weights than the sender's."""
    transport = Disk(folder)
    with own(tiny_llama()) as engine:
        layout = Layout(Manifest.of(engine.model), 20_000)
        other, run = sealed(transport, layout, tiny_llama(seed=2), 1)
        transport.send(other, run, [], Deadline.after(30))
        swapped = newest_folder(folder)

        def swap(*_: Any) -> None:
            shutil.rmtree(newest_folder(folder))
            swapped.rename(newest_folder(folder))

        package, run = sealed(transport, layout, tiny_llama(seed=1), 2)
        sent = transport.send(package, run, [SpyLink("w0", engine, swap)], Deadline.after(30))
        with pytest.raises(SyncError, match="other bytes than were sent"):
            sent["w0"].result(30)


def test_a_write_that_cannot_work_is_a_clear_failure_of_each_target(folder: Path) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine, Disk(folder), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama())
        shutil.rmtree(folder)
        with pytest.raises(SyncError, match=r"version 2 \(0\.00 GiB\) cannot be written to .*versions"):
            weight_sync.publish(tiny_llama())
        assert engine.version == 1


def test_writing_ends_at_the_deadline(folder: Path) -> None:
    transport = Disk(folder)
    package, run = sealed(transport, Layout(Manifest.of(tiny_llama()), 20_000), tiny_llama(), 1)
    late = SpyLink("w0", None, lambda *_: None)
    sent = transport.send(package, run, [late], Deadline.after(0))
    with pytest.raises(SyncTimeoutError, match="writing version 1"):
        sent["w0"].result(0)
    assert not (folder / POINTER).exists()
    assert versions_in(folder) == []


# --------------------------------------------------------------------------------------------------------- the folder


def test_files_are_for_their_owner_alone(published: Path) -> None:
    everything = [published, *published.rglob("*")]
    assert {oct(stat.S_IMODE(entry.stat().st_mode)) for entry in everything if entry.is_dir()} == {"0o700"}
    assert {oct(stat.S_IMODE(entry.stat().st_mode)) for entry in everything if entry.is_file()} == {"0o600"}


def test_a_folder_that_others_can_enter_is_refused_by_writer_and_reader(copied: Path) -> None:
    copied.chmod(0o755)
    with pytest.raises(SyncError, match="mode 0700"):
        Disk(copied)
    with own(tiny_llama()) as engine, pytest.raises(SyncError, match="mode 0700"):
        Disk.bring_up(engine, copied)


def test_shards_hold_whole_tensors_and_are_plain_safetensors(published: Path) -> None:
    shards = sorted(newest_folder(published).glob("*.safetensors"))
    stored = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    trainer = tiny_llama(seed=3)
    assert stored.keys() == trainer.state_dict().keys()
    assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in stored.items())
    assert len(shards) > 1


def test_shards_are_cut_at_whole_tensors() -> None:
    module = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(size)) for name, size in zip("abcd", (2, 2, 9, 1), strict=True)}
    )
    assert shard_names(Manifest.of(module).slots, 16) == [["a", "b"], ["c"], ["d"]]
    assert shard_names((), 16) == []


def test_keep_must_be_a_positive_number(folder: Path) -> None:
    for keep in (0, True, 1.5):
        with pytest.raises(SyncError, match="keep must be at least 1"):
            Disk(folder, keep=keep)


def test_a_version_that_is_read_is_not_removed_until_nobody_reads_it(folder: Path) -> None:
    with own(tiny_llama()) as engine, WeightSync(engine, Disk(folder, keep=1), SMALL) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        with VersionStore(folder).open_newest(Deadline.after(30)) as stored:
            weight_sync.publish(tiny_llama(seed=2))
            weight_sync.publish(tiny_llama(seed=3))
            assert versions_in(folder) == [1, 3]
            assert torch.equal(dict(stored.tensors())["lm_head.weight"], tiny_llama(seed=1).lm_head.weight)
        weight_sync.publish(tiny_llama(seed=4))
    assert versions_in(folder) == [4]


def test_the_pointer_names_the_most_precise_layout_of_a_version(folder: Path) -> None:
    narrow, wide, joiner = own(tiny_llama().bfloat16()), own(tiny_llama()), own(tiny_llama())
    with narrow, wide, joiner, WeightSync([narrow, wide, own(tiny_llama().half())], Disk(folder)) as weight_sync:
        weight_sync.publish(tiny_llama(seed=1))
        Disk.bring_up(joiner, folder)
        assert_same_weights(joiner.model, tiny_llama(seed=1))


# ------------------------------------------------------------------------------------------------- whoever writes next


@pytest.fixture
def first(folder: Path) -> Package:
    """Epoch 1's version 5."""
    transport = Disk(folder)
    package, run = sealed(transport, Layout(Manifest.of(tiny_llama()), 20_000), tiny_llama(), 5)
    transport.send(package, run, [], Deadline.after(30))
    return package


@pytest.mark.parametrize(
    ("claim", "version", "message"),
    [
        (Claim(run_id="other", epoch=9, sender="b"), 6, "of run 'run', this is run 'other'"),
        (Claim(run_id="run", epoch=0, sender="b"), 6, "written by a newer trainer"),
        (Claim(run_id="run", epoch=1, sender="b"), 6, "written by a newer trainer"),
        (CLAIM, 4, "holds version 5, and versions only grow"),
    ],
)
def test_who_has_been_replaced_writes_nothing(
    folder: Path, first: Package, claim: Claim, version: int, message: str
) -> None:
    package = changed(first, claim=claim, version=version)
    before = newest_folder(folder)
    with pytest.raises(SyncError, match=message):
        VersionStore(folder).write(
            package, torch.zeros(package.layout.num_bytes, dtype=torch.uint8), Deadline.after(30), keep=2
        )
    assert newest_folder(folder) == before
    assert versions_in(folder) == [5]


def test_a_successor_goes_on(folder: Path, first: Package) -> None:
    successor = Claim(run_id="run", epoch=2, sender="b")
    package = changed(first, claim=successor, version=6)
    run = torch.zeros(package.layout.num_bytes, dtype=torch.uint8)
    VersionStore(folder).write(package, run, Deadline.after(30), keep=2)
    assert versions_in(folder) == [5, 6]


def test_two_processes_never_write_at_once(folder: Path, first: Package) -> None:
    run = torch.zeros(first.layout.num_bytes, dtype=torch.uint8)
    store = VersionStore(folder)
    with store._writing(), pytest.raises(SyncError, match="another process is writing"):
        VersionStore(folder).write(changed(first, claim=CLAIM, version=6), run, Deadline.after(30), keep=2)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What `disk_writer` found after each kill of a writer."""
    base = MEMORY_FOLDER if MEMORY_FOLDER.exists() else None
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        script = Path(__file__).with_name("disk_writer.py")
        ran = subprocess.run(
            [sys.executable, str(script), scratch], capture_output=True, text=True, timeout=200, check=False
        )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_writer_killed_at_any_step_leaves_the_last_whole_version(found: list[dict[str, Any]]) -> None:
    steps = [each for each in found if each["killed"]]
    after = [each["after"] for each in steps]
    assert after == sorted(after)
    assert set(after) == {2, 3}
    assert len(after) > 20
    for each in steps:
        assert each["next"] == 4
        assert [name.split("-")[0] for name in each["entries"]] == [POINTER, *["version"] * KEEP, "writer"]


def test_a_full_disk_leaves_the_last_whole_version_and_no_rest(found: list[dict[str, Any]]) -> None:
    (full,) = (each for each in found if not each["killed"])
    assert full["after"] == 2
    assert "File too large" in full["error"]
    assert [name.split("-")[0] for name in full["entries"]] == [POINTER, *["version"] * KEEP, "writer"]


# ----------------------------------------------------------------------------------------------------------- bring-up


def test_an_engine_comes_up_with_no_trainer_alive(published: Path) -> None:
    with own(tiny_llama()) as engine:
        assert Disk.bring_up(engine, published) == 3
        rollout = engine.generate([PROMPT], GREEDY)[0]
        assert rollout.token_ids == greedy_reference(tiny_llama(seed=3), PROMPT, 6)
        assert rollout.versions == [3] * 6
        assert Disk.bring_up(engine, published) == 3


def test_an_engine_comes_up_in_its_own_dtype_and_with_its_own_ties(folder: Path) -> None:
    trainer = tiny_qwen2(seed=3)
    with own(tiny_qwen2()) as engine, WeightSync(engine, Disk(folder), SMALL) as weight_sync:
        weight_sync.publish(trainer)
    index = json.loads((newest_folder(folder) / INDEX).read_text())
    assert index["aliases"] == {"model.embed_tokens.weight": ["lm_head.weight"]}
    with own(tiny_qwen2().bfloat16()) as engine:
        Disk.bring_up(engine, folder)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        assert_same_weights(engine.model, deepcopy(trainer).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_goes_on_with_an_engine_that_came_up_from_disk(folder: Path, dtype: torch.dtype) -> None:
    with own(tiny_llama()) as engine, own(tiny_llama().to(dtype)) as joiner:
        transport = Disk(folder)
        with WeightSync([engine, joiner], transport, SMALL) as weight_sync:
            with pytest.raises(SyncError, match="no version has been published"):
                Disk.bring_up(joiner, folder)
            weight_sync.publish(tiny_llama(seed=1))
            assert Disk.bring_up(joiner, folder) == 1
            weight_sync.publish(tiny_llama(seed=2))
            assert_same_weights(joiner.model, tiny_llama(seed=2).to(dtype))
        with WeightSync([engine, joiner], Disk(folder), SMALL) as restarted:
            assert restarted.publish(tiny_llama(seed=3)).version == 3


def test_the_version_from_disk_is_the_trainers_own_also_in_another_dtype(folder: Path) -> None:
    """What the trainer then sends of that version is nothing new."""
    transport = Disk(folder)
    with own(tiny_llama().bfloat16()) as engine:
        package, run = sealed(transport, Layout(Manifest.of(tiny_llama()), 20_000), tiny_llama(seed=1), 1)
        transport.send(package, run, [], Deadline.after(30))
        Disk.bring_up(engine, folder)
        layout = Layout(Manifest.of(engine.model), 20_000)
        own_package, _ = sealed(transport, layout, tiny_llama(seed=1).bfloat16(), 1)
        assert engine.call(begin, own_package).result(30) is False


def test_a_restarted_trainer_with_new_engines_goes_on_above_what_lies_there(published: Path, copied: Path) -> None:
    with own(tiny_llama()) as engine:
        Disk.bring_up(engine, copied)
        with WeightSync(engine, Disk(copied), SMALL) as weight_sync:
            assert weight_sync.publish(tiny_llama(seed=4)).version == 4
    assert versions_in(copied) == [3, 4]


def test_an_engine_with_something_newer_refuses(published: Path) -> None:
    with own(tiny_llama()) as engine:
        with engine.update(7):
            pass
        with pytest.raises(SyncError, match="version 3 is not newer than the engine's 7"):
            Disk.bring_up(engine, published)


def test_other_tensors_are_a_manifest_error(published: Path) -> None:
    with own(tiny_llama(num_hidden_layers=1)) as engine:
        with pytest.raises(ManifestError) as refused:
            Disk.bring_up(engine, published)
        assert (
            str(refused.value).count("unexpected: model.layers.1.") == 9
        )  # all of them at once, before a byte is read
        assert_same_weights(engine.model, tiny_llama(num_hidden_layers=1))
        assert engine.version == 0


def test_a_folder_without_a_version_says_so(folder: Path) -> None:
    with own(tiny_llama()) as engine:
        with pytest.raises(SyncError, match="no version has been published to"):
            Disk.bring_up(engine, folder)
        assert not folder.exists()
        Disk(folder)
        with pytest.raises(SyncError, match="no version has been published to"):
            Disk.bring_up(engine, folder)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def pickle_in_its_place(path: Path) -> None:
    torch.save({"x": torch.zeros(3)}, path)


def huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")


def fifo_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_in_its_place(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


DAMAGE: list[Callable[[Path], None]] = [
    *(flip_last_byte, cut, pickle_in_its_place, huge_header, fifo_in_its_place, link_in_its_place, Path.unlink)
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_and_nothing_changes(copied: Path, damage: Callable[[Path], None]) -> None:
    shard = shard_with(copied, "lm_head.weight")
    damage(shard)
    with own(tiny_llama()) as engine:
        with pytest.raises(SyncError, match=shard.name):
            Disk.bring_up(engine, copied)
        assert (engine.version, engine.state) == (0, "running")
        assert_same_weights(engine.model, tiny_llama())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2}', '{"folder": "../elsewhere"}', '{"folder": "version-9-x"}']
)
@pytest.mark.parametrize("which", [INDEX, POINTER])
def test_damaged_metadata_is_named(copied: Path, which: str, content: str) -> None:
    path = copied / POINTER if which == POINTER else newest_folder(copied) / INDEX
    path.write_text(content)
    with own(tiny_llama()) as engine, pytest.raises(SyncError, match=which):
        Disk.bring_up(engine, copied)
    with (
        own(tiny_llama()) as engine,
        WeightSync(engine, Disk(copied)) as weight_sync,
        pytest.raises(SyncError, match=which),
    ):
        weight_sync.publish(tiny_llama())


def test_an_index_that_names_files_elsewhere_is_refused(copied: Path) -> None:
    path = newest_folder(copied) / INDEX
    index = json.loads(path.read_text())
    index["shards"][0]["file"] = f"../{newest_folder(copied).name}/{index['shards'][0]['file']}"
    path.write_text(json.dumps(index))
    with own(tiny_llama()) as engine, pytest.raises(SyncError, match="is not the name of a file"):
        Disk.bring_up(engine, copied)


def test_bring_up_ends_at_its_limit(published: Path) -> None:
    with (
        own(tiny_llama()) as engine,
        pytest.raises(SyncTimeoutError, match="took longer than"),
        engine.update(1),  # its control thread is busy
    ):
        Disk.bring_up(engine, published, timeout_s=0.01)


def changed(package: Package, *, claim: Claim, version: int) -> Package:
    ticket = package.ticket
    return Package(
        ticket=type(ticket)(claim=claim, version=version, seal=f"{ticket.seal}-{version}"),
        layout=package.layout,
        digests=package.digests,
    )

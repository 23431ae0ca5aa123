"""examples/fleet_grpo.py on a tiny random model: over one engine, over Ray workers, and as a Ray job."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fleet_grpo
import pytest
import run_folder
from digit_model import TASK, save_digit_model

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "ray_job"
STEP = re.compile(r"step +(\d+) .*  version (\d+)  ")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_digit_model(tmp_path_factory.mktemp("tiny"))


def small(model: Path, out: Path, *extra: str) -> list[str]:
    """At this seed the first six groups, of which any three are the first batch, have unequal rewards as the model was."""
    return [
        *("--model", str(model), "--out", str(out), "--steps", "3", "--prompts-per-step", "3", "--group-size", "16"),
        *("--max-new-tokens", "32", "--lr", "1e-3", "--task", TASK, *extra),
    ]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(out: Path, *, steps: Sequence[int]) -> Counter[object]:
    """How often each prompt was trained on in these steps, by its number."""
    rows = [row for row in lines(out / "rollouts.jsonl") if row["sample_index"] == 0 and row["ending"] == "consumed"]
    return Counter(row["metadata"]["number"] for row in rows if row["step"] in steps)


def check_run(out: Path) -> None:
    """Three steps, of which each was published, and every rollout of every prompt once."""
    steps = lines(out / "metrics.jsonl")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(step["staleness"] <= 1 for step in steps)
    assert steps[0]["mixed_groups"] > 0, "nothing is trained, so this shows nothing"
    rollouts = lines(out / "rollouts.jsonl")
    assert len({rollout["rollout_id"] for rollout in rollouts}) == len(rollouts) == 3 * 3 * 16
    assert trained(out, steps=range(1, 4)) == Counter(range(9))
    page = (out / "report.html").read_text()
    assert all(f'data-id="{rollout["rollout_id"]}"' in page for rollout in rollouts)


def test_the_loop_runs_over_one_engine(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert fleet_grpo.main(small(model_folder, out, "--workers", "0")) == 0
    check_run(out)
    printed = capsys.readouterr().out
    assert "a version, by in_process" in printed
    assert "of 144 rollouts span an update" in printed
    assert [step for step, _ in STEP.findall(printed)] == ["1", "2", "3"]
    assert printed.splitlines()[-2:] == [f"report: {out / 'report.html'}", f"results: {out}"]


class Interrupted(run_folder.RunFolder):
    """Ctrl-C when the fourth step has been published."""

    def write_step(self, metrics: dict[str, object]) -> None:
        if metrics["step"] == 4:
            raise KeyboardInterrupt
        super().write_step(metrics)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_run_that_was_interrupted_goes_on_and_trains_on_each_prompt_once(
    workers: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if workers != "0":
        request.getfixturevalue("local_ray")
    first, second = tmp_path / "first", tmp_path / "second"
    folder = tmp_path / "checkpoint"
    settings = ("--workers", workers, "--steps", "4", "--checkpoint", str(folder), "--save-every", "2")
    with monkeypatch.context() as patch:
        patch.setattr(fleet_grpo, "RunFolder", Interrupted)
        assert fleet_grpo.main(small(model_folder, first, *settings)) == 130
    assert [path.name for path in folder.glob("step-*")] == ["step-2"]
    assert fleet_grpo.main(small(model_folder, second, *settings)) == 0
    assert trained(first, steps=(1, 2)) + trained(second, steps=(3, 4)) == Counter(range(12))
    assert [step["step"] for step in lines(second / "metrics.jsonl")] == [3, 4]
    consumed = [row["trained_version"] for row in lines(second / "rollouts.jsonl") if row["ending"] == "consumed"]
    assert min(consumed) > 3, "the name of weights that are lost"
    assert min(step["version"] for step in lines(second / "metrics.jsonl")) > 4
    assert [path.name for path in folder.glob("step-*")] == ["step-4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "-1"], "num_workers must be an integer of at least 0, got -1"),
        (["--group-size", "0"], "group_size must be an integer of at least 1, got 0"),
        (["--temperature", "nan"], "temperature must be finite, got nan"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--model", "/no/such/folder"], "there is no folder '/no/such/folder'"),
    ],
)
def test_bad_arguments_say_what_is_wrong(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        fleet_grpo.main(["--out", str(tmp_path / "run"), *arguments])
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_ray_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    with pytest.raises(SystemExit):
        fleet_grpo.main(["--out", str(tmp_path / "run")])
    assert "pip install 'ray[default]', or --workers 0" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
def test_two_ray_workers_take_every_version_through_shared_memory(
    local_ray: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert fleet_grpo.main(small(model_folder, out)) == 0
    check_run(out)
    assert "a version, by shared_memory" in capsys.readouterr().out
    workers = {rollout["worker_id"] for rollout in lines(out / "rollouts.jsonl")}
    assert len(workers) == 2
    updates = Counter((update["worker_id"], update["version"]) for update in lines(out / "updates.jsonl"))
    assert set(updates) >= {(worker, version) for worker in workers for version in (1, 2)}


# ------------------------------------------------------------------------------------------------------------ as a job


def command(beginning: str) -> list[str]:
    """The line of examples/ray_job/README.md that begins so, for this interpreter's own Ray."""
    (line,) = [line for line in (JOB / "README.md").read_text().splitlines() if line.startswith(beginning)]
    words = shlex.split(line)
    return [sys.executable, "-m", "ray.scripts.scripts", *words[1:]]


def free_ports(count: int) -> list[str]:
    with ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in taken]


@contextmanager
def ray_head(environment: dict[str, str]) -> Iterator[str]:
    """A cluster of its own beside whatever else runs here; where jobs are submitted to."""
    gcs, dashboard, client, agent = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # short, because the paths of sockets must be
        head = subprocess.Popen(
            [
                *command("ray start"),
                *("--block", "--temp-dir", folder, "--port", gcs, "--dashboard-port", dashboard),
                *("--ray-client-server-port", client, "--dashboard-agent-listen-port", agent),
                *("--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(200 << 20)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            await_line(head, "Ray runtime started", timeout_s=120)
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            head.send_signal(signal.SIGTERM)  # with --block it ends what it has started
            head.communicate(timeout=60)


def await_line(process: subprocess.Popen[str], words: str, *, timeout_s: float) -> None:
    """Reads what it prints up to a line with these words; a process that does not say them in time is killed."""
    deadline = threading.Timer(timeout_s, process.kill)
    deadline.start()
    printed: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if words in line:
                return
    finally:
        deadline.cancel()
    pytest.fail("".join(printed))


@pytest.mark.ray
@pytest.mark.slow
def test_the_job_runs_as_its_readme_says(model_folder: Path, tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # the packages travel with the job
    out = tmp_path / "run"
    with ray_head(environment) as address:
        submit = command("ray job submit")
        submit[submit.index("--address") + 1] = address
        arguments = submit[: submit.index("--out")] + small(model_folder, out)
        done = subprocess.run(
            arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a version, by shared_memory" in done.stdout
    assert [step for step, _ in STEP.findall(done.stdout)] == ["1", "2", "3"]
    check_run(out)

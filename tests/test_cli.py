"""`rollsync` as a user meets it: its answers, its files and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_llama
from packaging.requirements import Requirement
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from rollout import RunLog
from rollsync_cli.checks import Status
from rollsync_cli.demo_model import demo_model_folder
from rollsync_cli.doctor import check_shared_memory
from rollsync_cli.generate import Line, read_prompts
from rollsync_cli.interrupts import after_block
from rollsync_cli.main import app
from rollsync_cli.versions import check_version

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose words are w0 to w59; it ends at random."""
    return saved_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def model_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("plain"), None)


def saved_model(folder: Path, template: str | None) -> Path:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(3, 64))]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    return folder


def rollsync(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def a_file(folder: Path, *rows: object, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


SMALL = ("--max-new-tokens", 5, "--no-progress")

# ---------------------------------------------------------------------------------------------------------- generate


def test_each_prompt_has_its_line_in_order_also_when_some_are_refused(model: Path, tmp_path: Path) -> None:
    prompts = a_file(
        tmp_path,
        '"w5 w6"',
        "[7, 8]",
        '""',
        '{"prompt": "w9", "answer": 42}',
        "[9999]",
        "this is no JSON",
        '{"question": "w3"}',
        "",
        '[{"role": "user", "content": "w10"}]',
    )
    out = tmp_path / "rollouts.jsonl"
    done = rollsync("generate", prompts, "--model", model, "--out", out, *SMALL)
    assert done.exit_code == 1, done.output
    assert "rollouts with an error: 4;" in done.stderr
    lines = lines_of(out.read_text())
    assert [line["rollout_id"] for line in lines] == [f"p{number}-0" for number in range(8)]
    assert [line["prompt_ids"] for line in lines] == [[5, 6], [7, 8], [], [9], [], [], [], [10, 9]]
    assert [line["error"] is not None for line in lines] == [False, False, True, False, True, True, True, False]
    for number, words in ((2, "empty"), (4, "9999"), (5, "no JSON"), (6, '"prompt"')):
        assert words in lines[number]["error"]
        assert lines[number]["finish_reason"] == "error"
    assert lines[3]["metadata"] == {"answer": 42, "prompt": "w9"}
    assert lines[5]["metadata"] == {"prompt": "this is no JSON"}
    for line in lines:
        if line["error"] is None:
            assert 0 < len(line["token_ids"]) == len(line["logprobs"]) <= 5
            assert isinstance(line["text"], str)


def test_a_prompt_that_the_model_or_json_cannot_take_leaves_the_others(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, '"w5"', '"half \\ud83d"', "[" * 100_000, '[{"role": "user"}]', '"w6"')
    lines = lines_of(rollsync("generate", prompts, "--model", model, *SMALL).stdout)
    assert [line["error"] is not None for line in lines] == [False, True, True, False, False]
    assert "the tokenizer cannot encode" in lines[1]["error"]
    assert "nested too deeply" in lines[2]["error"]


@pytest.mark.parametrize(("name", "first"), [("p.jsonl", '"w5"'), ("p.JSONL", '"w5"'), ("p.txt", "w5")])
def test_a_mark_of_the_byte_order_and_the_case_of_a_suffix_are_nothing(tmp_path: Path, name: str, first: str) -> None:
    path = tmp_path / name
    path.write_text(f"\ufeff{first}\n", encoding="utf-8")
    assert read_prompts(path) == [Line(number=0, row="w5")]


def test_text_from_stdin_gives_rollouts_on_stdout_and_nothing_else_there(model: Path) -> None:
    done = rollsync("generate", "-", "--model", model, "--max-new-tokens", 3, stdin="w5\n\nw6 w7\n")
    assert done.exit_code == 0, done.output
    assert [line["prompt_ids"] for line in lines_of(done.stdout)] == [[5], [6, 7]]
    assert "rollouts: 100%" in done.stderr


def test_a_seed_draws_the_same_again_and_each_sample_and_prompt_its_own(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, '"w5"', '"w5"')
    options = ("--model", model, "-n", 3, "--seed", 7, "--max-new-tokens", 12, "--no-progress")
    first, second = (rollsync("generate", prompts, *options) for _ in range(2))
    assert first.exit_code == 0, first.output
    lines = lines_of(first.stdout)
    assert [(line["prompt_id"], line["sample_index"]) for line in lines] == [
        (prompt, index) for prompt in ("p0", "p1") for index in range(3)
    ]
    drawn = [line["token_ids"] for line in lines]
    assert drawn == [line["token_ids"] for line in lines_of(second.stdout)]
    assert len({str(ids) for ids in drawn}) == 6


def test_sampling_options_reach_the_engine(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, "w5", name="prompts.txt")
    greedy = [
        lines_of(rollsync("generate", prompts, "--model", model, *SMALL, *options).stdout)[0]["token_ids"]
        for options in (("--temperature", 0), ("--top-k", 1), ("--top-p", 1e-6))
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    word = f"w{greedy[0][0]}"
    (stopped,) = lines_of(rollsync("generate", prompts, "--model", model, *SMALL, "--top-k", 1, "--stop", word).stdout)
    assert (stopped["token_ids"], stopped["stop_string"]) == (greedy[0][:1], word)


def test_chat_applies_the_models_template_to_text(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, '"w5"', '{"prompt": "w6", "n": 1}', "[7]")
    done = rollsync("generate", prompts, "--model", model, "--chat", *SMALL)
    lines = lines_of(done.stdout)
    assert [line["prompt_ids"] for line in lines] == [[5, 9], [6, 9], [7]]
    assert [line["metadata"]["prompt"] for line in lines] == ["w5", "w6", [7]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.jsonl", "--model", "MODEL"), "missing.jsonl cannot be read: No such file or directory; give a file"),
        (("latin.txt", "--model", "MODEL"), "latin.txt are no UTF-8 text"),
        (("empty.txt", "--model", "MODEL"), "holds no prompts"),
        (("prompts.txt", "--model", "/no/such/folder"), "there is no folder '/no/such/folder'"),
        (("prompts.txt", "--model", "MODEL", "--out", "taken.jsonl"), "--force"),
        (("prompts.txt", "--model", "/no/such/model", "--out", "no/such/folder.jsonl"), "no folder no/such; make it"),
        (("prompts.txt", "--model", "MODEL", "--out", "prompts.txt", "--force"), "is the file of the prompts"),
        (("prompts.txt", "--model", "MODEL", "--out", "."), "--out . is a folder; give a file in it"),
        (("prompts.txt", "--model", "MODEL", "--out", "/proc/no.jsonl"), "--out /proc/no.jsonl cannot be written"),
        (("prompts.txt", "--model", "MODEL", "--timeout", "0"), "--timeout must be a number of seconds above 0, got 0"),
        (("prompts.txt", "--model", "MODEL", "--timeout", "-1"), "--timeout must be"),
        (("prompts.txt", "--model", "MODEL", "--timeout", "nan"), "--timeout must be"),
        (("prompts.txt", "--model", "MODEL", "--temperature", "-1"), "temperature must be at least 0"),
        (("prompts.txt", "--model", "MODEL", "--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        (("prompts.txt", "--model", "PLAIN", "--chat"), "no chat template"),
        (("prompts.txt", "--model", "MODEL", "--device", "gpu"), "--device gpu is none that torch knows; give cpu"),
        pytest.param(
            ("prompts.txt", "--model", "MODEL", "--device", "cuda"),
            "no CUDA device; see rollsync doctor",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_start_says_so_in_one_line_with_exit_code_2(
    model: Path,
    model_without_template: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("größer\n".encode("latin-1"))
    for name, text in (("prompts.txt", "w5\n"), ("empty.txt", "\n \n"), ("taken.jsonl", "mine")):
        Path(name).write_text(text)
    folders = {"MODEL": str(model), "PLAIN": str(model_without_template)}
    done = rollsync("generate", *(folders.get(argument, argument) for argument in arguments), "--no-progress")
    assert done.exit_code == 2
    complaint = done.stderr.splitlines()[-1]
    assert complaint.startswith("rollsync: error: ")
    assert words in complaint
    assert (Path("taken.jsonl").read_text(), Path("prompts.txt").read_text()) == ("mine", "w5\n")
    assert done.stdout == ""


def test_the_examples_model_goes_by_its_name_once_it_is_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = a_file(tmp_path, "w5", name="prompts.txt")
    before = rollsync("generate", prompts, "--model", "smollm2", *SMALL)
    assert before.exit_code == 2
    assert before.stderr.startswith("rollsync: error: smollm2 is the model of the examples")
    assert "run one of them first (in a clone: make demo), or give --model" in before.stderr
    demo_model_folder().parent.mkdir()
    demo_model_folder().symlink_to(model)
    done = rollsync("generate", prompts, "--model", "smollm2", *SMALL)
    assert done.exit_code == 0, done.output
    assert len(lines_of(done.stdout)) == 1


def test_force_replaces_the_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    out.write_text("old\n")
    prompts = a_file(tmp_path, "w5", name="prompts.txt")
    assert rollsync("generate", prompts, "--model", model, "--out", out, "--force", *SMALL).exit_code == 0
    assert len(lines_of(out.read_text())) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_an_output_that_takes_no_more_is_one_line_with_exit_code_1(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, "w5", name="prompts.txt")
    done = rollsync("generate", prompts, "--model", model, "--out", "/dev/full", "--force", *SMALL)
    assert done.exit_code == 1
    says = "rollsync: error: /dev/full takes no more: No space left on device; make room, or give another --out"
    assert done.stderr.splitlines()[-1] == says


def environment(*folders: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it, as a job of a script's shell does
from rollsync_cli.main import main
main()
"""


def test_ctrl_c_leaves_whole_lines_and_exit_code_130(model: Path, tmp_path: Path) -> None:
    prompts = a_file(tmp_path, *["w5 w6"] * 5000, name="prompts.txt")
    command = ("generate", str(prompts), "--model", str(model), "--max-new-tokens", "200", "--no-progress")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(120, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)  # while it waits for room in the pipe, or writes
        rest, complaints = process.communicate()
    finally:
        deadline.cancel()
        process.kill()
    assert process.returncode == 130, complaints
    assert complaints.splitlines()[-1] == "interrupted"
    assert "Traceback" not in complaints
    lines = lines_of(first + rest)
    assert [line["rollout_id"] for line in lines] == [f"p{number}-0" for number in range(len(lines))]
    assert 1 <= len(lines) < 5000


def test_ctrl_c_waits_for_the_end_of_a_line_and_a_second_one_does_not() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a script's shell ignores it
    events: list[str] = []

    def write(num_interrupts: int) -> None:
        with after_block():
            for _ in range(num_interrupts):
                signal.raise_signal(signal.SIGINT)
            events.append("written")

    with pytest.raises(KeyboardInterrupt):
        write(1)
    assert events == ["written"]
    with pytest.raises(KeyboardInterrupt):
        write(2)
    assert events == ["written"]
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


# ------------------------------------------------------------------------------------------------------------ doctor


def test_a_machine_on_which_it_works_is_told_so_with_exit_code_0() -> None:
    done = rollsync("doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == (0, True), done.stdout
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert {
        name: status[name] for name in ("torch", "transformers", "cpu", "packages", "Ray", "generation", "log-probs")
    } == dict.fromkeys(("torch", "transformers", "cpu", "packages", "Ray", "generation", "log-probs"), "ok")
    assert status["tensor parallel"] == "off"
    assert all(check["detail"] for check in report["checks"])


def test_a_transformers_that_does_not_fit_fails_with_its_remedy_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.0.0'\n")
    done = subprocess.run(
        [sys.executable, "-m", "rollsync_cli.main", "doctor"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "FAIL  packages" in done.stdout
    assert "-> install the versions above" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 failed; see FAIL above"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_doctor_starts_a_ray_and_leaves_none_behind() -> None:
    command = [sys.executable, "-m", "rollsync_cli.main", "doctor", "--ray", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["Ray"]["status"] == "ok", checks["Ray"]
    assert checks["Ray"]["detail"].startswith("started here and ran a task")


def test_a_folder_for_shared_memory_that_others_can_read_fails_with_its_remedy(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path).status in (Status.OK, Status.OFF)
    assert check_shared_memory(tmp_path / "none").status is Status.OFF
    assert list(tmp_path.iterdir()) == [], "it left something behind"
    home = tmp_path / f"rollsync-{os.getuid()}"
    home.mkdir()
    home.chmod(0o755)
    check = check_shared_memory(tmp_path)
    assert check.status is Status.FAIL
    assert "0700" in check.detail
    assert "SharedMemory(folder=...)" in str(check.remedy)


@pytest.mark.parametrize(
    ("extra", "installed", "status", "remedy"),
    [
        (None, "5.24.1", Status.OK, None),
        (None, "5.23.0", Status.FAIL, "pip install 'thing<5.25,>=5.24'"),
        (None, None, Status.FAIL, "pip install 'thing<5.25,>=5.24'"),
        ("trl", None, Status.OFF, "pip install 'rollsync[trl]'"),
        ("trl", "6.0", Status.OFF, "pip install 'thing<5.25,>=5.24'"),
    ],
)
def test_a_version_is_judged_by_what_is_asked_for(
    extra: str | None, installed: str | None, status: Status, remedy: str | None
) -> None:
    check = check_version(Requirement("thing>=5.24,<5.25"), extra, installed)
    assert (check.status, check.remedy) == (status, remedy)


# -------------------------------------------------------------------------------------------------- report, and help


def test_report_prints_where_the_page_is(tmp_path: Path) -> None:
    RunLog(tmp_path / "run")
    done = rollsync("report", tmp_path / "run")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'run' / 'report.html'}\n")
    assert Path(done.stdout.strip()).read_text().startswith("<!doctype html>")


def test_a_report_on_nothing_is_one_line_with_exit_code_2(tmp_path: Path) -> None:
    for arguments in ((tmp_path / "none",), (tmp_path,), (a_file(tmp_path, "no JSON"),)):
        done = rollsync("report", *arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("rollsync: error: ")
        assert done.stderr.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_line_that_names_it(tmp_path: Path) -> None:
    RunLog(tmp_path / "run")
    done = rollsync("report", tmp_path / "run", "--out", tmp_path / "none" / "page.html")
    assert done.exit_code == 2
    says = (
        f"the page {tmp_path / 'none' / 'page.html'} cannot be written: No such file or directory; give another --out"
    )
    assert done.stderr == f"rollsync: error: {says}\n"


def test_a_reader_who_has_had_enough_is_not_complained_to(tmp_path: Path) -> None:
    RunLog(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "rollsync_cli.main", "report", str(tmp_path / "run")],
            env=environment(),
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["doctor", "generate", "report"])
def test_help_says_what_goes_in_what_comes_out_and_the_exit_codes(command: str) -> None:
    done = rollsync(command, "--help")
    assert done.exit_code == 0
    assert "Exit code: 0" in done.output
    assert "..." not in rollsync("--help").output.partition("Commands:")[2], "a line of the overview is cut"


def test_the_version_is_that_of_the_project() -> None:
    done = rollsync("--version")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert done.exit_code == 0
    assert re.fullmatch(rf"rollsync {re.escape(version)}( \(not installed: run from its source tree\))?\n", done.output)


def test_help_and_report_answer_without_torch(tmp_path: Path) -> None:
    RunLog(tmp_path / "run")
    code = (
        "import sys; from typer.testing import CliRunner; from rollsync_cli.main import app\n"
        "for args in (['--help'], ['--version'], ['generate', '--help'], ['report', sys.argv[1]]):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0, args\n"
        "print(sorted({'torch', 'transformers', 'ray', 'rollout'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr

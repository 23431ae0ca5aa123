"""What a run leaves behind is the same whoever writes it, and enough for a report."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import mark, marker_llama
from simulated_fleets import PROMPTS, a_config, a_fleet, check_books

from rollout import EngineConfig, GenerationEngine, RolloutConfig, RolloutController, RunLog, SamplingParams
from rollout.batches.records import rollout_from_json, rollout_to_json
from rollout.simulate import SimulatedTrainer
from rollsync_cli.run_files import read_run
from rollsync_cli.timeline import timeline

SAMPLING = SamplingParams(max_new_tokens=12, stop_token_ids=())


class Digits:
    """A tokenizer whose text is the ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_loop_of_ones_own_writes_rollouts_updates_and_metrics(tmp_path: Path) -> None:
    model = marker_llama()
    log = RunLog(tmp_path / "run", tokenizer=Digits())
    with GenerationEngine(model, EngineConfig(num_blocks=64, page_size=16)) as engine:
        log.write_update(engine.last_update)  # none yet: no line
        before = engine.submit_group([1, 2], SAMPLING, size=2, group_id="g", metadata={"answer": 5})
        rollouts = [future.result(60) for future in before]
        with engine.update():
            mark(model, 1)
        record = engine.last_update
        log.write_rollouts(rollouts, step=1, trained_version=1)
        log.write_update(record)
        log.write_metrics({"step": 1, "loss": 0.5})
    assert record is not None
    lines = lines_of(log.path / "rollouts.jsonl")
    for line, rollout in zip(lines, rollouts, strict=True):
        assert (line["step"], line["trained_version"], line["ending"]) == (1, 1, None)
        assert line["text"] == " ".join(["0"] * 12)
        saved = {name: line[name] for name in rollout_to_json(rollout)}
        assert rollout_from_json(saved, line["metadata"]) == rollout
    (update,) = lines_of(log.path / "updates.jsonl")
    assert (update["version"], update["held_s"], update["finished_at"]) == (1, record.held_s, record.finished_at)
    assert all(rollout.timings and rollout.timings.finished_at <= record.finished_at for rollout in rollouts)
    assert lines_of(log.path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


class Counting(Digits):
    """Counts what it decodes."""

    def __init__(self) -> None:
        self.decoded: list[list[int]] = []

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded.append(list(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_prompt_is_decoded_once_for_all_samples_of_it(tmp_path: Path) -> None:
    tokenizer = Counting()
    a_run(tmp_path / "rollouts.jsonl", {}, tokenizer)
    lines = lines_of(tmp_path / "rollouts.jsonl")
    assert len(lines) == 32
    assert [line["prompt"] for line in lines] == [" ".join(map(str, line["prompt_ids"])) for line in lines]
    assert sum(tokenizer.decoded.count(list(prompt)) for prompt in PROMPTS[:8]) == 8


def test_an_update_is_finished_after_it_was_asked_for_and_before_what_starts_after_it() -> None:
    model = marker_llama()
    with GenerationEngine(model, EngineConfig(num_blocks=64, page_size=16)) as engine:
        first = engine.submit([1, 2], SAMPLING).result(60)
        with engine.update():
            mark(model, 1)
        second = engine.submit([1, 2], SAMPLING).result(60)
        record = engine.last_update
    assert record is not None
    assert first.timings is not None
    assert second.timings is not None
    assert second.timings.started_at is not None
    assert first.timings.finished_at <= record.finished_at - record.held_s
    assert record.finished_at <= second.timings.started_at


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunLog(tmp_path)
    with pytest.raises(FileExistsError, match="holds a run already; give another folder"):
        RunLog(tmp_path)


def test_a_controller_writes_the_same_by_itself(tmp_path: Path) -> None:
    model = marker_llama()
    config = RolloutConfig(
        group_size=2, prompts_per_step=3, sampling=SAMPLING, rollouts_jsonl=tmp_path / "run" / "rollouts.jsonl"
    )
    prompts = [{"prompt": [2 + n, 3, 4], "answer": n} for n in range(12)]
    with RolloutController(
        model, prompts, tokenizer=Digits(), engine=EngineConfig(num_blocks=64, page_size=16), config=config
    ) as controller:
        for step in range(1, 5):
            with controller.next_batch(timeout_s=60):
                pass
            with controller.update() as engine_model:
                mark(engine_model, step)
        controller.status()  # what the last lease and update left to do has been done
    lines = lines_of(tmp_path / "run" / "rollouts.jsonl")
    assert [line["step"] for line in lines] == [step for step in range(1, 5) for _ in range(6)]
    for line in lines:
        assert line["trained_version"] == line["step"] - 1
        assert 0 <= line["trained_version"] - line["version_spans"][0][1] <= 1
        assert (line["ending"], line["text"]) == ("consumed", " ".join(map(str, line["token_ids"])))
        assert line["metadata"]["answer"] == line["prompt_ids"][0] - 2
        assert line["prompt"] == " ".join(map(str, line["prompt_ids"]))
    updates = lines_of(tmp_path / "run" / "updates.jsonl")
    assert [update["version"] for update in updates] == [1, 2, 3, 4]
    assert {update["worker_id"] for update in updates} == {line["worker_id"] for line in lines}
    picture = timeline(read_run(tmp_path / "run"))
    assert (picture.num_drawn, picture.num_updates) == (24, 4)


def a_run(path: Path, columns: dict[str, Any], tokenizer: Digits | None = None) -> None:
    fleet = a_fleet()
    rows = [{"prompt": prompt, **columns} for prompt in PROMPTS[:8]]
    config = a_config(rollouts_jsonl=path)
    with RolloutController.over(fleet, rows, tokenizer=tokenizer, config=config, loop=fleet.loop) as controller:
        assert sum(len(record.group_ids) for record in SimulatedTrainer(controller, fleet, step_s=1.0).run(10)) == 8
        check_books(controller)


class Mute(Digits):
    """It cannot say some of its ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise OverflowError("no such id")


def test_columns_that_json_cannot_say_are_written_as_they_print(tmp_path: Path) -> None:
    itself: dict[str, Any] = {}
    itself["me"] = itself
    a_run(tmp_path / "rollouts.jsonl", {"pair": {(1, 2): 3}, "itself": itself, "set": {1}, "answer": 4})
    lines = lines_of(tmp_path / "rollouts.jsonl")
    assert len(lines) == 32
    assert lines[0]["metadata"] == {"pair": "{(1, 2): 3}", "itself": "{'me': {...}}", "set": "{1}", "answer": 4}


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a_run(tmp_path / "mute.jsonl", {}, Mute())
    assert "group g0 is not in" in caplog.text
    full = tmp_path / "full" / "rollouts.jsonl"
    full.parent.mkdir()
    full.symlink_to("/dev/full")
    a_run(full, {})
    assert caplog.text.count("the run goes on without it") == 1

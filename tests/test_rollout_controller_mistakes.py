"""What a first run does wrong is said once, in full, with the reason and the remedy."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet, reward

from rollout import PromptsExhaustedError, Rollout, RolloutStalledError
from rollout.batches.reward_warnings import RewardWarnings
from rollout.batches.rewards import REMEDIES, REWARD_ERRORS, RewardError, as_error
from rollout.simulate import SimulatedTrainer


def broken(rollout: Rollout, text: str) -> float:
    return float({"answer": 1}["anwser"])


def nothing(rollout: Rollout, text: str) -> None:
    return None


@pytest.mark.parametrize(
    ("prompts", "functions", "reason", "cause"),
    [
        (["hello"], {"reward_fn": reward}, "a prompt of text needs a tokenizer", None),
        ([{"question": "hello"}], {"reward_fn": reward}, 'a dict needs a "prompt"', None),
        (PROMPTS[:2], {"reward_fn": broken}, "raised KeyError: 'anwser'", KeyError),
        (PROMPTS[:2], {"reward_fn": nothing}, "a finite number, got None", None),
        (PROMPTS[:2], {"group_reward_fn": lambda group: [1.0]}, "a list of 4 rewards, got 1", None),
    ],
)
def test_prompts_that_all_failed_end_with_the_reason_and_another_epoch_is_not_offered(
    prompts: list[Any], functions: dict[str, Callable[..., Any]], reason: str, cause: type[BaseException] | None
) -> None:
    fleet = a_fleet(1)
    with (
        fleet.controller(prompts, config=a_config(), **functions) as controller,
        pytest.raises(PromptsExhaustedError) as caught,
    ):
        controller.next_batch(timeout_s=1000)
    assert f"all prompts have ended: {len(prompts)} failed; the last failure: " in str(caught.value)
    assert reason in str(caught.value)
    assert "num_epochs" not in str(caught.value)
    assert type(caught.value.__cause__) is (cause or type(None))


def test_more_epochs_are_offered_where_there_could_be_more() -> None:
    def ending(prompts: object, num_epochs: int | None) -> str:
        fleet = a_fleet(1)
        with fleet.controller(prompts, reward, config=a_config(num_epochs=num_epochs)) as controller:  # type: ignore[arg-type]
            SimulatedTrainer(controller, fleet, step_s=1.0).run(10)
            with pytest.raises(PromptsExhaustedError) as caught:
                controller.next_batch(timeout_s=1000)
        return str(caught.value)

    assert ending(PROMPTS[:4], 1) == (
        "all prompts have ended: 4 consumed; for more, RolloutConfig(num_epochs=...), or None for no end"
    )
    assert ending(iter(PROMPTS[:4]), None) == "all prompts have ended: 4 consumed"


def test_a_run_without_output_ends_with_what_the_reward_function_raised_as_its_cause() -> None:
    fleet = a_fleet()
    config = a_config(max_groups_without_output=4)
    with (
        fleet.controller(PROMPTS, broken, config=config) as controller,
        pytest.raises(RolloutStalledError, match="zero output") as caught,
    ):
        controller.next_batch(timeout_s=1000)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_stall_of_another_kind_has_no_reward_error_as_its_cause() -> None:
    fleet = a_fleet(1)
    config = a_config(max_groups_without_output=10_000, pause_stall_s=50.0)
    with fleet.controller(PROMPTS, broken, config=config) as controller:
        fleet.loop.advance(10.0)
        assert controller.status()["last_failure"] is not None
        fleet.workers["w0"].require_version(1)
        with pytest.raises(RolloutStalledError, match="pause stall") as caught:
            controller.next_batch(timeout_s=1000)
        assert caught.value.__cause__ is None


def test_the_first_failed_reward_is_told_with_its_traceback_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = a_fleet(1)
    with (
        caplog.at_level(logging.WARNING, "rollsync"),
        fleet.controller(PROMPTS[:3], broken, config=a_config()) as controller,
        pytest.raises(PromptsExhaustedError),
    ):
        controller.next_batch(timeout_s=1000)
    first, tenth = caplog.records
    assert first.exc_info
    assert "reward function broken: the reward function raised KeyError: 'anwser'" in first.getMessage()
    assert "reward/errors_raised" in first.getMessage()
    assert '["anwser"]' in caplog.text, "the line of the user's function"
    assert tenth.getMessage() == "reward function broken has failed 10 times in this way (KeyError)"


def test_each_kind_of_error_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RewardWarnings(broken, "It is drawn again")
    for error in (KeyError("a"), ValueError("b"), KeyError("c"), ValueError("d")):
        warnings.note(as_error(error))
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [KeyError, ValueError]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("kind", REWARD_ERRORS)
def test_every_kind_of_error_is_told_with_its_remedy(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    RewardWarnings(broken, "It is drawn again").note(RewardError("there is none", kind))
    assert f"there is none. It is drawn again; {REMEDIES[kind]}." in caplog.text
    assert f"reward/errors_{kind}" in caplog.text


def test_what_is_no_reward_is_told_once_with_its_value_what_becomes_of_the_sample_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = a_fleet(1)
    with (
        fleet.controller(PROMPTS[:4], nothing, config=a_config()) as controller,
        pytest.raises(PromptsExhaustedError),
    ):
        controller.next_batch(timeout_s=1000)
    message = caplog.records[0].getMessage()
    for says in (
        "reward function nothing: ",
        "finite number, got None",
        "drawn again (max_data_retries)",
        "return a finite number",
    ):
        assert says in message
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "reward function nothing has failed 10 times in this way (invalid)"
    ]

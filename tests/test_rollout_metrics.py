"""What a run says about itself in numbers."""

import re
from pathlib import Path

import pytest
from simulated_fleets import PROMPTS, a_config, a_fleet

from rollout import RewardResult, Rollout, UpdateRecord
from rollout.batches.metrics import RolloutMetrics

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"


def test_each_metric_is_explained_and_each_that_is_explained_exists() -> None:
    def with_bonus(rollout: Rollout, text: str) -> RewardResult:
        return RewardResult(reward=1.0, metrics={"bonus": 2.0})

    fleet = a_fleet()
    with fleet.controller(PROMPTS, with_bonus, config=a_config()) as controller:
        before = set(controller.metrics())
        controller.next_batch(timeout_s=500).acknowledge()
        metrics = controller.metrics()
    assert metrics.pop("reward/bonus") == 2.0
    explained = re.findall(r"^\| `(\w+/\w+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert sorted(metrics) == sorted(explained)
    assert set(metrics) == before, "none comes later"


def test_the_updates_of_all_engines_are_counted_with_what_they_cost() -> None:
    metrics = RolloutMetrics(now=0.0)
    for wait_s, held_s, straddlers in ((0.1, 0.02, 3), (0.3, 0.06, 4)):
        metrics.updated(UpdateRecord(version=1, wait_s=wait_s, held_s=held_s, straddlers=straddlers))
    values = metrics.as_dict(now=1.0)
    assert (values["sync/updates"], values["sync/straddlers"]) == (2, 7)
    assert values["sync/pause_wait_s_mean"] == pytest.approx(0.2)
    assert values["sync/pause_wait_s_max"] == 0.3
    assert values["sync/commit_s_mean"] == pytest.approx(0.04)
    assert values["sync/commit_s_max"] == 0.06

"""A target that comes back gets the version of the others."""

import pytest
from fakes import wait_until
from fakes_sync import marked
from protocol_fleet import CALLS, IN_UPDATE, fault, fleet_of


@pytest.mark.parametrize("point", CALLS)
def test_a_target_that_comes_back_in_the_middle_of_a_publish_ends_on_the_version_of_the_others(point: str) -> None:
    """miles#1724: a recovered engine serves its base checkpoint. (What serves nothing until then: test_sync_workers.)"""
    with fleet_of(num_targets=3) as fleet:
        fleet.publish()
        joining, slow, _ = fleet.targets
        joining.kill()
        fault(slow, point, "stall")
        delivering = fleet.weight_sync.publish(marked(2.0), wait=False)
        fleet.published[2] = fleet.next_mark()
        wait_until(lambda: slow.is_stalled)
        joining.revive()
        slow.resume()
        assert delivering.result(10).fenced == ("a",)
        wait_until(lambda: joining.engine.version == 2)
        fleet.check()
        fleet.check_that_the_next_publish_works()


@pytest.mark.parametrize("point", [*CALLS, *IN_UPDATE])
def test_a_target_that_dies_again_while_it_is_brought_up_is_brought_up_when_it_comes_back(point: str) -> None:
    with fleet_of() as fleet:
        fleet.publish()
        joining = fleet.targets[0]
        joining.kill()
        with joining.standing_still():
            joining.revive()
            fault(joining, point, "kill")
        wait_until(lambda: joining.is_dead)
        joining.revive()
        wait_until(lambda: joining.engine.version == 1)
        fleet.check()
        fleet.check_that_the_next_publish_works()


def test_a_target_that_comes_back_before_anything_was_published_is_left_alone() -> None:
    with fleet_of() as fleet:
        fleet.targets[0].kill()
        fleet.targets[0].revive()
        fleet.check_that_the_next_publish_works()
        assert fleet.targets[0].calls.count("begin") == 1


def test_bringing_up_is_overtaken_by_a_publish() -> None:
    with fleet_of() as fleet:
        fleet.publish()
        joining = fleet.targets[0]
        joining.kill()
        with joining.standing_still():
            joining.revive()
            fault(joining, "commit", "stall")
        wait_until(lambda: "begin" in joining.calls[-6:] and joining.is_stalled)
        newer = fleet.weight_sync.publish(marked(2.0), wait=False)
        fleet.published[2] = fleet.next_mark()
        joining.resume()
        assert newer.result(10).fenced == ()
        assert joining.engine.version == 2
        fleet.check()
        fleet.check_that_the_next_publish_works()

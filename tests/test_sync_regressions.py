"""What once broke in `WeightSync`: each test is the smallest form of it."""

import threading

from fakes import tiny_llama

from rollout import GenerationEngine
from sync import WeightSync


def test_a_publish_that_is_cancelled_before_its_commit_holds_up_nobody() -> None:
    model = tiny_llama()
    with GenerationEngine(model, copy_weights=True) as engine, WeightSync(engine) as weight_sync:
        busy = threading.Event()
        weight_sync._committer.submit(busy.wait, 30)  # the thread that commits has not come to it yet
        assert weight_sync.publish(model, wait=False).cancel()
        busy.set()
        assert weight_sync.publish(model, timeout_s=10).version == 2
        assert engine.version == 2

"""A training run that saves its weights together with its controller's state, and kills itself where it is told to.

    python tests/killed_driver.py FOLDER POINT:N     # POINT: started, handed_out, trained, acknowledged, half_saved, saved, published

The weights are, for what counts here, how often each prompt was trained on.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from fakes import tiny_llama

from rollout import EngineConfig, PromptsExhaustedError, RolloutConfig, RolloutController, SamplingParams

NUM_PROMPTS = 30


class Death:
    """Comes without warning when a point is reached for the n-th time."""

    def __init__(self, where: str) -> None:
        point, times = where.split(":")
        self._point, self._left = point, int(times)

    def at(self, point: str) -> None:
        self._left -= point == self._point
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, death: Death) -> None:
    checkpoint = folder / "checkpoint.json"
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    trained = Counter(saved["trained"] if saved else {})
    controller = RolloutController(
        tiny_llama(),
        [[2 + n, 3, 4] for n in range(NUM_PROMPTS)],
        lambda rollout, text: float(rollout.token_ids[0]),
        engine=EngineConfig(num_blocks=64, page_size=16),
        config=RolloutConfig(
            group_size=2,
            prompts_per_step=3,
            max_staleness=2,
            versions_file=folder / "versions.json",
            sampling=SamplingParams(max_new_tokens=60, stop_token_ids=()),
        ),
    )
    if saved:
        controller.load_state_dict(saved["state"])
    with controller:
        death.at("started")
        published = controller.version
        while True:
            try:
                lease = controller.next_batch(timeout_s=60)
            except PromptsExhaustedError:
                break
            death.at("handed_out")
            assert lease.version >= published, "a label of before is never used again"
            with lease:
                trained.update(group.prompt_id for group in lease.groups)
                death.at("trained")
            death.at("acknowledged")
            state = controller.state_dict()
            beside = checkpoint.with_suffix(".new")
            beside.write_text(json.dumps({"trained": trained, "state": state}))
            death.at("half_saved")
            os.replace(beside, checkpoint)
            death.at("saved")
            with controller.update():
                pass
            published = controller.engine.version
            death.at("published")
    highest = json.loads((folder / "versions.json").read_text())["highest_version"]
    print(json.dumps({"trained": trained, "highest_version": highest}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Death(sys.argv[2]))

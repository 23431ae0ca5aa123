"""What a run needs to go on elsewhere: its state as JSON, and the highest version that it ever published."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.fleet.coordinator import Coordinator

STATE_FORMAT = 2
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
"""What the rollouts that a checkpoint holds are drawn by: one that goes on by another is drawn from no distribution."""


class HighestVersion:
    """The highest version ever published, kept in a file if there is one: a checkpoint knows only of those before it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.value: int | None = None
        """None: none was."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            try:
                self.value = int(json.loads(path.read_text())["highest_version"])
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidRequestError(f"versions_file={str(path)!r} is no file of versions: {error!r}") from None

    @property
    def next(self) -> int:
        """What the weights of a run that begins now are called."""
        return 0 if self.value is None else self.value + 1

    def saw(self, version: int) -> None:
        """A version is there. The first weights' own, 0, never was published."""
        if version <= (self.value or 0):
            return
        self.value = version
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(json.dumps({"highest_version": version}))
            os.replace(beside, self._path)


def save(coordinator: Coordinator, highest: HighestVersion) -> dict[str, Any]:
    """JSON-safe. On the loop."""
    # a batch has been trained on, and its publish is to come: the weights saved now are those of the next version
    owed = coordinator.handout.trained_version == coordinator.version
    return {
        "format": STATE_FORMAT,
        "config": fingerprint(coordinator),
        "cursor": coordinator.prompts.cursor,
        "policy_version": coordinator.version + int(owed),
        "highest_version": highest.value,
        "num_trained": coordinator.handout.num_trained,
        "works": coordinator.collection.state_dict(),
    }


def check(coordinator: Coordinator, state: Mapping[str, Any]) -> None:
    """InvalidRequestError for a state that this controller cannot go on from."""
    if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
        raise InvalidRequestError(f"this is no state of a RolloutController, or of another release: {state!r:.60}")
    missing = sorted({"config", "cursor", "policy_version", "highest_version", "num_trained", "works"} - set(state))
    if missing:
        raise InvalidRequestError(f"the state of a RolloutController is not whole: it has no {', '.join(missing)}")
    mine, saved = fingerprint(coordinator), state["config"]
    differing = [f"{n}: {saved.get(n)!r} then, {mine[n]!r} now" for n in mine if mine[n] != saved.get(n)]
    if differing:
        raise InvalidRequestError(f"the checkpoint is of another configuration ({'; '.join(differing)})")


def load(coordinator: Coordinator, state: Mapping[str, Any], highest: HighestVersion) -> int:
    """Before the start. Returns what the checkpoint's weights are called from now on: above the highest ever published,
    also when they were trained on and not published yet."""
    numbers = [work["number"] for work in state["works"]["works"]]
    prompts = coordinator.prompts.rewind(state["cursor"], numbers)
    num_trained = int(state["num_trained"])
    coordinator.collection.load_state_dict(state["works"], prompts, now=coordinator.loop.now())
    coordinator.handout.num_trained = num_trained
    if state["highest_version"] is not None:
        highest.saw(state["highest_version"])
    name = max(highest.next, int(state["policy_version"]))
    coordinator.collection.rewind(state["policy_version"], name)
    coordinator.rescore()
    return name


def fingerprint(coordinator: Coordinator) -> dict[str, Any]:
    """What must be the same for prompts, seeds and groups to mean the same."""
    config = coordinator.config
    return {
        "seed": config.seed,
        "shuffle": config.shuffle,
        "group_size": config.group_size,
        "num_prompts": coordinator.prompts.length,
        **{f"sampling.{name}": getattr(config.sampling, name) for name in SAMPLING},
    }

"""What the tests of transports share. Other processes import this module, too."""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fakes import marker_llama, tiny_llama
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout import GenerationEngine
from sync.layout import Layout, digest, seal
from sync.link import Link
from sync.manifest import held_tensors
from sync.place import Deadline
from sync.ticket import Claim, Package, Ticket
from sync.transports.base import Transport
from sync.transports.broadcast_group import BroadcastGroup

CLAIM = Claim(run_id="run", epoch=1, sender="test")


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {held.names[0]: held.tensor.detach().clone() for held in held_tensors(module)}


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def digests_of(engine: GenerationEngine) -> dict[str, str]:
    """One for each tensor, to compare the weights of another process."""
    return {
        name: digest(tensor.contiguous().view(-1).view(torch.uint8)) for name, tensor in weights(engine.model).items()
    }


def digests_of_model(module: nn.Module) -> dict[str, str]:
    return {name: digest(tensor.contiguous().view(-1).view(torch.uint8)) for name, tensor in weights(module).items()}


def version_of(engine: GenerationEngine) -> int:
    return engine.version


def marker(version: int) -> PreTrainedModel:
    """Says token `version`; every weight tells of it."""
    model = marker_llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.gate" in name or "mlp.up" in name:
                parameter.fill_(version)  # what follows is multiplied by zero
        model.lm_head.weight.zero_()
        model.lm_head.weight[version].fill_(1.0)
    return model


def wide_llama(seed: int = 0) -> PreTrainedModel:
    """1.6 MB: buckets of it are large enough for Ray's object store."""
    return tiny_llama(seed=seed, hidden_size=128, intermediate_size=256)


def num_fds(_: Any = None) -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads(_: Any = None) -> int:
    return len(os.listdir("/proc/self/task"))


def num_gloo_threads(_: Any = None) -> int:
    tasks = Path("/proc/self/task")
    count = 0
    for task in tasks.iterdir():
        with suppress(FileNotFoundError):  # it ended meanwhile
            count += "gloo" in (task / "comm").read_text()
    return count


def die_at_next_open(_: GenerationEngine, part: str) -> None:
    """kill -9 of this process as soon as it opens a file whose path contains `part`."""

    def kill(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and part in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)


def sealed(
    transport: Transport, layout: Layout, module: nn.Module, version: int, claim: Claim = CLAIM
) -> tuple[Package, Tensor]:
    """A version as WeightSync would have it, in the transport's memory."""
    run = transport.run(layout)
    for view, held in zip(layout.views(run), held_tensors(module), strict=True):
        view.copy_(held.tensor.detach())
    digests = layout.digests(run)
    ticket = Ticket(claim=claim, version=version, seal=seal(digests))
    return Package(ticket=ticket, layout=layout, digests=digests), run


class SpyLink(Link):
    """Tells `before` of each call that a transport makes."""

    def __init__(self, name: str, target: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__(name, target)
        self._before = before

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        self._before(fn.__name__, args)
        return super().call(fn, *args)


class SpyTarget:
    """A target that tells `before` of each call that reaches it."""

    def __init__(self, target: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.worker_id = target.worker_id
        self._target = target
        self._before = before

    def call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        self._before(fn.__name__, args)
        return self._target.call(fn, *args)


class At:
    """Does something once, before the `count`th call of the function `name`."""

    def __init__(self, name: str, count: int, act: Callable[[], object]) -> None:
        self._name = name
        self._left = count
        self._act = act

    def __call__(self, name: str, _: tuple[Any, ...]) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                self._act()


def signal_in_broadcast(_: Any, count: int, which: signal.Signals) -> None:
    """This process gets a signal before its `count`th broadcast from now on."""
    broadcast = BroadcastGroup.broadcast
    numbers = itertools.count(1)

    def signalled(group: BroadcastGroup, part: Tensor, deadline: Deadline) -> None:
        if next(numbers) == count:
            # Sent to the process, it would stop another thread first, and this one might go on to the end meanwhile.
            signal.pthread_kill(threading.get_ident(), which)
        broadcast(group, part, deadline)

    BroadcastGroup.broadcast = signalled  # type: ignore[method-assign]


def flip_in_broadcast(_: Any, count: int) -> None:
    """In this process the `count`th broadcast from now on arrives with other bytes."""
    broadcast = BroadcastGroup.broadcast
    numbers = itertools.count(1)

    def flipped(group: BroadcastGroup, part: Tensor, deadline: Deadline) -> None:
        broadcast(group, part, deadline)
        if next(numbers) == count:
            part[0] ^= 1

    BroadcastGroup.broadcast = flipped  # type: ignore[method-assign]

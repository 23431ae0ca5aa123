"""The probe tells of writes that move no version counter, and no step waits for it."""

from collections.abc import Callable

import pytest
import torch
from fakes import tiny_llama

from rollout.model.probe import OnSideStream, Probe, at_once
from rollout.model.shell import WeightWatch


class Slow:
    """Comparisons as of a device: each is made when it is let through, and may be asked for its result only then."""

    def __init__(self) -> None:
        self.started = 0
        self._compare: Callable[[], torch.Tensor] | None = None
        self._result: bool | None = None

    def __call__(self, compare: Callable[[], torch.Tensor]) -> "Slow":
        self.started += 1
        self._compare, self._result = compare, None
        return self

    def finish(self) -> None:
        self._result = bool(self._compare())

    def is_done(self) -> bool:
        return self._result is not None

    def result(self) -> bool:
        assert self._result is not None, "somebody waits for a comparison that has not come to an end"
        return self._result


def weights() -> list[torch.Tensor]:
    """Of several dtypes and shapes; one is empty, one is not dense."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.bool, torch.float64)
    return [torch.ones(3, 2 + n).to(dtype) for n, dtype in enumerate(dtypes)] + [
        torch.ones(0),
        torch.ones(4, 4).t()[1:],
    ]


@pytest.mark.parametrize("number", range(7))
def test_each_weight_is_compared_bit_by_bit(number: int) -> None:
    tensors = weights()
    tensors[0][1, 1] = float("nan")  # the middle one
    probe = Probe(tensors, at_once)
    assert not probe.differs()
    element = tensors[number].view(-1)[tensors[number].numel() // 2]
    element.zero_()
    assert probe.differs()
    probe.record()
    assert not probe.differs()


def test_nothing_to_compare_never_differs() -> None:
    assert not Probe([torch.ones(0)], at_once).differs()


def test_no_call_waits_for_a_comparison_and_one_runs_at_a_time() -> None:
    tensors, slow = weights(), Slow()
    probe = Probe(tensors, slow)
    for _ in range(3):
        assert not probe.differs()
    assert slow.started == 1
    slow.finish()
    assert not probe.differs()
    assert slow.started == 2, "the next one starts as soon as one is done"
    tensors[0].fill_(5.0)
    slow.finish()
    assert probe.differs()


def test_what_was_recorded_since_is_not_compared_with_what_was_right_before() -> None:
    tensors, slow = weights(), Slow()
    probe = Probe(tensors, slow)
    assert not probe.differs()
    tensors[0].fill_(5.0)
    slow.finish()
    probe.record()  # an update
    assert not probe.differs(), "the update itself was taken for a change outside of it"
    slow.finish()
    assert not probe.differs()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_step_waits_and_a_write_through_data_is_seen() -> None:
    model = tiny_llama().to("cuda")
    watch = WeightWatch(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a batch that runs
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert watch.changed() is None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query(), "it waited for the batch"
    model.lm_head.weight.data.mul_(1.5)
    seen = []
    for _ in range(2):
        torch.cuda.synchronize()
        seen.append(watch.changed())
    assert seen[-1] is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_comparison_on_a_side_stream_comes_to_the_right_result() -> None:
    for different in (True, False):
        comparison = OnSideStream(torch.device("cuda"))(lambda d=different: torch.tensor([d], device="cuda").any())
        torch.cuda.synchronize()
        assert comparison.is_done()
        assert comparison.result() == different

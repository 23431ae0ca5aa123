"""What a model in training offers to an engine."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from fakes import tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sync import SyncError, WeightSource
from sync.sources.exports import Export
from sync.sources.lora import MergedLora
from trainer_adapters import AdapterError, PolicyView
from trainer_adapters.gather import split


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[2].weight = nn.Parameter(torch.randn(3, 4))
    return model


def test_offers_parameters_and_persistent_buffers_under_the_modules_names() -> None:
    model = small()
    view = PolicyView(model)
    assert isinstance(view, WeightSource)
    assert set(view.specs()) == set(model.state_dict())
    assert dict(view.tensors()).keys() == view.specs().keys()


def test_tied_weight_is_offered_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert list(PolicyView(model).specs()) == ["0.weight"]


def test_prefix_of_a_compiled_model_or_layer_is_stripped() -> None:
    model = small()
    names = set(PolicyView(model).specs())
    assert set(PolicyView(torch.compile(model)).specs()) == names
    model[0] = torch.compile(model[0])
    assert set(PolicyView(model).specs()) == names


def test_dtype_casts_floats_on_the_way_and_leaves_integers() -> None:
    model = small()
    view = PolicyView(model, dtype=torch.bfloat16)
    tensors = dict(view.tensors())
    assert tensors["0.weight"].dtype == view.specs()["0.weight"].dtype == torch.bfloat16
    counter = "1.num_batches_tracked"
    assert tensors[counter].dtype == view.specs()[counter].dtype == torch.int64


def test_model_is_not_altered_by_being_read() -> None:
    model = small().train()
    before = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in model.state_dict().items()}
    for _ in range(2):
        list(PolicyView(model, dtype=torch.bfloat16).tensors())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict(keep_vars=True).items():
        old, values, counter = before[name]
        assert tensor.data_ptr() == old.data_ptr()
        assert tensor._version == counter
        assert torch.equal(tensor, values)


def test_parameter_replaced_after_construction_is_the_one_offered() -> None:
    model = small()
    view = PolicyView(model)
    list(view.tensors())
    model[0].weight = nn.Parameter(torch.full((4, 3), 7.0))
    assert torch.equal(dict(view.tensors())["0.weight"], torch.full((4, 3), 7.0))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "fsdp2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_model_offers_what_the_bare_one_does(wrapper: str) -> None:
    bare = dict(PolicyView(small()).tensors())
    view = PolicyView(WRAPPERS[wrapper](small()))
    assert list(view.specs()) == list(bare)
    assert all(torch.equal(tensor, bare[name]) for name, tensor in view.tensors())


@pytest.mark.usefixtures("one_rank")
def test_view_of_a_ddp_model_hands_out_the_parameters_own_memory() -> None:
    model = small()
    offered = dict(PolicyView(DistributedDataParallel(model)).tensors())
    assert all(offered[name].data_ptr() == tensor.data_ptr() for name, tensor in model.state_dict().items())
    assert not any(tensor.requires_grad for tensor in offered.values())


def test_accelerator_takes_off_what_it_put_around_the_model() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.engine = inner

    class FakeAccelerator:
        def unwrap_model(self, model: Any, *, keep_torch_compile: bool) -> nn.Module:
            assert not keep_torch_compile  # accelerate writes to the compiled model if it is kept
            return model.engine

    model = small()
    assert list(PolicyView(Around(model), FakeAccelerator()).specs()) == list(PolicyView(model).specs())
    prepared = Accelerator(cpu=True).prepare(model)
    assert list(PolicyView(prepared, Accelerator(cpu=True)).specs()) == list(PolicyView(model).specs())


def test_adapters_are_merged_and_one_can_be_named() -> None:
    def with_lora() -> Any:
        model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
        return model

    model = with_lora()
    view = PolicyView(model, dtype=torch.bfloat16)
    assert view.specs().keys() == tiny_llama().state_dict().keys()
    for name, tensor in view.tensors():
        assert torch.equal(tensor, dict(MergedLora(model).tensors())[name].bfloat16())
    named = dict(PolicyView(model, adapter="other").tensors())
    assert all(torch.equal(named[name], tensor) for name, tensor in MergedLora(model, adapter="other").tensors())


def test_model_with_offloaded_weights_is_refused() -> None:
    with torch.device("meta"):
        model = small()
    with pytest.raises(AdapterError, match=r"0\.weight is on the meta device"):
        PolicyView(model)


# ------------------------------------------------------------------------------------------------------------- ZeRO-3


class FakeZero3:
    """DeepSpeed's contract: parameters are empty, with their shape in `ds_shape`, except inside `gathered`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_open = False
        self.gathered_bytes: list[int] = []
        self.on_gather: Callable[[], None] = lambda: None
        self._whole = {id(parameter): parameter.data for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.ds_shape = parameter.shape
            parameter.data = torch.empty(0)

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        self.on_gather()
        self.gathered_bytes.append(sum(self._whole[id(parameter)].nbytes for parameter in parameters))
        self.is_open = True
        for parameter in parameters:
            parameter.data = self._whole[id(parameter)].clone()
        yield
        for parameter in parameters:
            parameter.data.fill_(float("nan"))  # the memory of the gathered ones is used again
            parameter.data = torch.empty(0)
        self.is_open = False


def test_partitioned_model_is_gathered_bucket_by_bucket_each_complete_before_it_is_handed_out() -> None:
    expected = {name: tensor.clone() for name, tensor in tiny_llama().state_dict().items()}
    zero3 = FakeZero3(tiny_llama())
    bucket_bytes = 20_000
    view = PolicyView(zero3.model, bucket_bytes=bucket_bytes, gather=zero3.gathered)
    assert {name: spec.shape for name, spec in view.specs().items()} == {n: tuple(t.shape) for n, t in expected.items()}
    assert zero3.gathered_bytes == []
    num_seen = 0
    for name, tensor in view.tensors():
        assert not zero3.is_open
        assert torch.equal(tensor, expected[name])
        num_seen += 1
    assert num_seen == len(expected)
    assert max(zero3.gathered_bytes) <= bucket_bytes
    assert len(zero3.gathered_bytes) < len(expected) / 2


def test_bucket_in_hand_is_all_that_is_left_when_the_next_is_gathered() -> None:
    zero3 = FakeZero3(tiny_llama())
    view = PolicyView(zero3.model, bucket_bytes=20_000, gather=zero3.gathered)
    handed_out: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    zero3.on_gather = lambda: left.append(sum(tensor() is not None for tensor in handed_out))
    for _, tensor in view.tensors():
        handed_out.append(weakref.ref(tensor))
    assert max(left) <= 1  # the loop's own variable


def test_adapters_of_a_partitioned_model_are_merged() -> None:
    def with_lora() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    zero3 = FakeZero3(with_lora())
    got = dict(PolicyView(zero3.model, gather=zero3.gathered).tensors())
    assert all(torch.equal(got[name], tensor) for name, tensor in MergedLora(with_lora()).tensors())
    assert got.keys() == tiny_llama().state_dict().keys()
    with pytest.raises(SyncError, match=r"sharded; publish .*PolicyView"):
        MergedLora(zero3.model)


# ------------------------------------------------------------------------------------------------------------- buckets


def num_bytes(exports: list[Export]) -> int:
    return sum(export.base.nbytes for export in exports)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 40))
def test_buckets_keep_the_order_and_exceed_the_limit_for_one_tensor_only(sizes: list[int], max_bytes: int) -> None:
    exports = [Export(name=str(at), base=torch.empty(size)) for at, size in enumerate(sizes)]
    buckets = split(exports, max_bytes)
    assert [export for bucket in buckets for export in bucket] == exports
    assert all(bucket and (num_bytes(bucket) <= max_bytes or len(bucket) == 1) for bucket in buckets)
    # none begins while the one before it has room
    assert all(num_bytes([*left, right[0]]) > max_bytes for left, right in pairwise(buckets))


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_bucket_must_hold_something(bucket_bytes: int) -> None:
    with pytest.raises(AdapterError, match=f"bucket_bytes must be at least 1, got {bucket_bytes}"):
        PolicyView(small(), bucket_bytes=bucket_bytes)


def test_dtype_must_be_a_float() -> None:
    with pytest.raises(AdapterError, match=r"torch\.int8"):
        PolicyView(small(), dtype=torch.int8)

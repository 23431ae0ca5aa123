"""What a model in training offers to an engine."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from sync import WeightSource
from trainer_adapters import AdapterError, PolicyView


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


@pytest.mark.usefixtures("one_rank")
def test_ddp_model_is_refused_and_the_module_inside_it_is_not() -> None:
    ddp = DistributedDataParallel(small())
    with pytest.raises(AdapterError, match=r"got a DistributedDataParallel; pass the module inside it .*ddp\.module"):
        PolicyView(ddp)
    assert PolicyView(ddp.module).specs().keys() == small().state_dict().keys()


@pytest.mark.usefixtures("one_rank")
def test_fsdp_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(AdapterError, match="got a FSDPLinear"):
        PolicyView(nn.Sequential(fully_shard(model[0], mesh=init_device_mesh("cpu", (1,))), model[1]))


@pytest.mark.usefixtures("one_rank")
def test_sharded_parameter_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
    with pytest.raises(AdapterError, match=r"weight is sharded .*full_tensor\(\)"):
        PolicyView(model)


@pytest.mark.parametrize("package", ["peft.tuners.lora.layer", "deepspeed.runtime.engine"])
def test_module_of_a_package_that_composes_weights_elsewhere_is_refused_at_any_depth(package: str) -> None:
    layer = type("Layer", (nn.Linear,), {"__module__": package})
    with pytest.raises(AdapterError, match="got a Layer"):
        PolicyView(nn.Sequential(nn.Linear(2, 2), layer(2, 2)))


def test_dtype_must_be_a_float() -> None:
    with pytest.raises(AdapterError, match=r"torch\.int8"):
        PolicyView(small(), dtype=torch.int8)

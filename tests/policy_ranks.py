"""One of two ranks that read the policy out of models sharded in every way; `test_trainer_adapters_ranks` starts both.

    python policy_ranks.py RANK FOLDER

writes FOLDER/RANK.pt: for each case, what this rank saw. Rank 1 is slow: it takes each tensor only after rank 0 has begun
to wait for it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout import GenerationEngine
from sync import WeightSync
from trainer_adapters import AdapterError, PolicyView
from trainer_adapters.rank_group import RankGroup

TIMEOUT = timedelta(seconds=60)
BUCKET_BYTES = 10_000  # a layer of the model has 32 KB


def bare_model(**changes: Any) -> Any:
    model = tiny_llama(**changes).train()
    model.model.layers[0].register_buffer("kept", torch.arange(3.0))
    model.model.layers[0].register_buffer("passing", torch.arange(5.0), persistent=False)
    return model


def lora_model() -> Any:
    model = get_peft_model(bare_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def fsdp1(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def fsdp2(model: Any, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp1_inside() -> nn.Module:
    """FSDP1 on a part of the model only."""
    torch.manual_seed(0)
    return nn.ModuleDict({"policy": fsdp1(bare_model()), "rest": nn.Linear(2, 2)})


def fsdp2_with_plain_tensors() -> nn.Module:
    model = bare_model()
    plain = {model.model.norm.weight, model.lm_head.weight}
    for parameter in plain:
        parameter.requires_grad_(False)  # or the ranks, whose data differ, would train them apart
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=plain)


LOW_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
CASES: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(bare_model()),
    "fsdp1": lambda: fsdp1(bare_model()),
    "fsdp1 original parameters": lambda: fsdp1(bare_model(), use_orig_params=True),
    "fsdp1 inside": fsdp1_inside,
    "fsdp1 lora": lambda: fsdp1(lora_model(), use_orig_params=True),
    "fsdp2": lambda: fsdp2(bare_model()),
    "fsdp2 tied": lambda: fsdp2(bare_model(tie_word_embeddings=True)),
    "fsdp2 low precision": lambda: fsdp2(bare_model(), mp_policy=LOW_PRECISION),
    "fsdp2 offloaded": lambda: fsdp2(bare_model(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 with plain tensors": fsdp2_with_plain_tensors,
    "fsdp2 lora": lambda: fsdp2(lora_model()),
}
PUBLISHED: dict[str, Callable[[Any], nn.Module]] = {"fsdp1": fsdp1, "fsdp2": fsdp2}


def train_step(model: nn.Module, rank: int, backward: bool = True) -> float:
    """A step on this rank's own data; the gradients of both are averaged."""
    policy = model["policy"] if isinstance(model, nn.ModuleDict) else model
    prompt = torch.tensor([[5, 17, 33, 8 + rank]])
    loss = policy(input_ids=prompt, labels=prompt).loss
    if backward:
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(parameter.grad, alpha=-0.5)
                parameter.grad = None
    return float(loss.detach())


def expected_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a wrapped model, by other means than the package's."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def local_bytes(model: nn.Module) -> list[Tensor]:
    """What this rank itself holds of the model."""
    every = [*model.parameters(), *model.buffers()]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in every]


def paced(tensors: Iterator[tuple[str, Tensor]], store: dist.Store, rank: int, what: str) -> dict[str, Tensor]:
    """All that the iterator gives; rank 1 asks for each only after rank 0 has."""
    taken: dict[str, Tensor] = {}
    while True:
        turn = f"{what}: tensor {len(taken)}"
        if rank == 0:
            store.set(turn, "asked for")
        else:
            store.wait([turn], TIMEOUT)
        item = next(tensors, None)
        if item is None:
            return taken
        assert type(item[1]) is Tensor or isinstance(item[1], nn.Parameter), type(item[1])  # complete, not pending
        taken[item[0]] = item[1].clone()


def run(case: str, store: dist.Store, rank: int) -> dict[str, Any]:
    model = CASES[case]()
    train_step(model, rank)
    train_step(model, rank, backward=False)  # FSDP2 leaves the outermost unit whole, in the forward's precision
    view = PolicyView(model, dtype=None, bucket_bytes=BUCKET_BYTES)
    before = local_bytes(model)
    tensors = paced(view.tensors(), store, rank, case)
    again = paced(view.tensors(), store, rank, f"{case}, again")
    after = local_bytes(model)
    result = {
        "names": list(tensors),
        "specs": {name: (tuple(spec.shape), spec.dtype) for name, spec in view.specs().items()},
        "tensors": tensors,
        "repeats": all(torch.equal(again[name], tensor) for name, tensor in tensors.items()),
        "untouched": all(torch.equal(left, right) for left, right in zip(before, after, strict=True)),
        "low": dict(PolicyView(model, dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES).tensors()),
        "expected": expected_weights(model),
    }
    result["loss_after"] = train_step(model, rank)
    return result


def published(wrap: Callable[[Any], nn.Module], rank: int) -> dict[str, Any]:
    """Two steps, each published from both ranks to an engine on the first."""
    model = wrap(tiny_llama().train())
    with ExitStack() as open_things:
        engine = open_things.enter_context(GenerationEngine(tiny_llama(), copy_weights=True)) if rank == 0 else None
        weight_sync = open_things.enter_context(WeightSync([engine] if engine is not None else []))
        versions = []
        for _ in range(2):
            train_step(model, rank)
            versions.append(weight_sync.publish(PolicyView(model, bucket_bytes=BUCKET_BYTES)).version)
        held = {} if engine is None else {n: t.detach().clone() for n, t in engine.model.state_dict().items()}
        return {"versions": versions, "engine": held, "expected": expected_weights(model)}


def dealt(rank: int, store: dist.Store) -> dict[str, Any]:
    """What each rank has of deals that the first one takes too long for, with a result or an error, and of one that it is
    interrupted in; and of the trainer's own group afterwards."""

    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    def late() -> list[str]:
        store.wait(["the second rank has given up"], TIMEOUT)
        return ["first", "second"]

    def late_failure() -> list[str]:
        raise KeyError("too late")

    dist.barrier()  # the limit of a group is also that of making it, which a rank that comes late would miss
    short, long = RankGroup(timeout_s=10.0), RankGroup()
    seen: dict[str, Any] = {}
    for name, make, ranks in (
        ("late", late, short),
        ("late failure", late_failure, short),  # to a rank that has left the group
        ("interrupted", interrupted, long),
    ):
        try:
            seen[name] = ranks.deal(make)
        except (KeyboardInterrupt, AdapterError, KeyError) as error:
            seen[name] = f"{type(error).__name__}: {error} caused by {error.__cause__!r}"
        if name == "late" and rank == 1:
            store.set("the second rank has given up", "")
    total = torch.ones(1)
    dist.all_reduce(total)
    return {**seen, "total": total.item()}


def refused() -> str:
    model = lora_model()
    layer = layers_of(model)[0].self_attn.q_proj
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    layer.lora_A["default"] = FullyShardedDataParallel(layer.lora_A["default"], **options)
    try:
        PolicyView(FullyShardedDataParallel(model, **options))
    except AdapterError as error:
        return str(error)
    return "accepted"


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    results: dict[str, Any] = {case: run(case, store, rank) for case in CASES}
    for case, wrap in PUBLISHED.items():
        results[f"published {case}"] = published(wrap, rank)
    results["refused"] = refused()
    results["dealt"] = dealt(rank, store)
    torch.save(deepcopy(results), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""What the ranks of a Ray Train run do in `test_trainer_adapters_ray_train`. They import this module."""

import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from fakes import tiny_llama
from ray.util import get_current_placement_group

from rollout import (
    EngineConfig,
    GenerationEngine,
    PromptsExhaustedError,
    Rollout,
    RolloutConfig,
    RolloutController,
    SamplingParams,
)
from rollout.worker import WorkerConfig
from trainer_adapters import AdapterError, PolicyView, RankFleet, grpo_loss, pad_rollouts, token_logprobs

NUM_PROMPTS = 12
PROMPTS_PER_STEP = 4
SMALL = EngineConfig(num_blocks=32, page_size=16)


def rollout_config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(
        **{
            "group_size": 2,
            "prompts_per_step": PROMPTS_PER_STEP,
            "sampling": SamplingParams(max_new_tokens=6, stop_token_ids=()),
            **changes,
        }
    )


def prompts() -> list[list[int]]:
    return [[3 + n, 4, 5] for n in range(NUM_PROMPTS)]


def share_of_even_tokens(rollout: Rollout, text: str | None) -> float:
    return sum(token % 2 == 0 for token in rollout.token_ids) / len(rollout.token_ids)


def make_fleet(config: dict[str, Any]) -> RolloutController:
    return RolloutController(
        config["model"],
        prompts(),
        share_of_even_tokens,
        engine=SMALL,
        config=rollout_config(num_workers=1, placement="PACK"),
        workers=WorkerConfig(model=config["model"], num_cpus=0.5),
    )


def placement(_: GenerationEngine | None = None) -> str:
    """Of this process."""
    group = get_current_placement_group()
    return "none" if group is None else group.id.hex()


def train(fleet: RankFleet, config: dict[str, Any]) -> None:
    """Notes what each rank sees, a line an event. The second rank fails once, after the first step's checkpoint."""
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    folder = Path(config["folder"])
    checkpoint = ray.train.get_checkpoint()
    bare = tiny_llama()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            bare.load_state_dict(torch.load(Path(saved) / "model.pt", weights_only=True))
    model = ray.train.torch.prepare_model(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PolicyView(model)

    def note(**event: Any) -> None:
        with (folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    note(published=fleet.publish(policy).version, resumed=checkpoint is not None, placement=placement())
    if fleet.controller is not None:
        note(fleet=[worker.call(placement).result(60) for worker in fleet.controller.workers()])
    try:
        while True:
            with fleet.next_batch(timeout_s=120) as groups:
                batch = pad_rollouts(groups, 0)
                logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
                logprobs = token_logprobs(logits[:, :-1], batch.targets)
                loss, _ = grpo_loss(
                    logprobs,
                    batch.old_logprobs,
                    batch.rewards - 0.5,
                    batch.loss_mask,
                    proximal_logprobs=logprobs.detach(),
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            trained = [group.prompt_id for group in groups]
            with tempfile.TemporaryDirectory() as made:
                fleet.save(made)
                if rank == 0:
                    torch.save(bare.state_dict(), Path(made) / "model.pt")
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(made))
                else:
                    ray.train.report({})
            note(
                trained=trained,
                versions=sorted({v for group in groups for rollout in group for v in rollout.versions}),
                weights=sum(parameter.double().sum().item() for parameter in bare.parameters()),
            )
            note(published=fleet.publish(policy).version)
            if rank == 1 and checkpoint is None:
                raise OSError("this rank is lost")
    except (PromptsExhaustedError, AdapterError) as error:
        note(ended=str(error))

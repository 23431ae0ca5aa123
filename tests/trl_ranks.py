"""One rank of two runs of GRPO on two ranks, over gloo: `python trl_ranks.py FOLDER`, with the usual
variables set. The second fails, since the engine refuses all its prompts. Writes what it saw to FOLDER/RANK.json."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from fakes import tiny_llama
from fakes_trl import Logs, even_share, number_tokenizer, prompts, settings
from trl import GRPOConfig

from rollout import EngineConfig, GenerationEngine
from trainer_adapters import AdapterError
from trainer_adapters.trl import EngineGRPOTrainer
from trainer_adapters.trl.async_grpo import EngineWeightTransfer

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
seen: dict[str, Any] = {"calls": []}


def reward(policy_version: list[int], completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
    seen["calls"].append({"versions": policy_version, "prompts": prompts})
    return even_share(completion_ids)


def train(engine: GenerationEngine | None, data: Dataset) -> list[dict[str, float]]:
    logs = Logs()
    EngineGRPOTrainer(
        tiny_llama(),
        reward,
        args=GRPOConfig(**settings(folder / "out", per_device_train_batch_size=4, ddp_backend="gloo")),
        train_dataset=data,
        processing_class=number_tokenizer(),
        callbacks=[logs],
        engine=engine,
    ).train()
    return logs.steps


with ExitStack() as stack:
    engine = None
    if rank == 0:
        config = EngineConfig(num_blocks=16, page_size=16)
        engine = stack.enter_context(GenerationEngine(tiny_llama(seed=9), config, copy_weights=True))
    seen["steps"] = train(engine, prompts(12))
    try:
        train(engine, Dataset.from_dict({"prompt": [" ".join(["w9"] * 600)] * 4}))
    except AdapterError as error:
        seen["error"] = str(error)
    if engine is not None:
        try:
            EngineWeightTransfer(engine).init_weight_transfer()
        except AdapterError as error:
            seen["async"] = str(error)
(folder / f"{rank}.json").write_text(json.dumps(seen))

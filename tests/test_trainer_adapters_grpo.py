"""The whole loop on a real engine: sample, score, train, publish."""

from dataclasses import replace

import pytest
import torch
from fakes import EOS_ID, random_prompts, tiny_llama

from rollout import GenerationEngine, SamplingParams
from sync import WeightSync
from trainer_adapters import PolicyView, SyncOnStep, group_advantages, grpo_loss, pad_rollouts, token_logprobs

GROUP_SIZE = 4


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_trainers_logprobs_of_fresh_rollouts_are_the_engines_after_every_step(temperature: float) -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompts = [prompt for prompt in random_prompts([3, 6]) for _ in range(GROUP_SIZE)]
    params = SamplingParams(max_new_tokens=10, temperature=temperature, stop_token_ids=[EOS_ID, 7, 8, 9])
    with (
        GenerationEngine(tiny_llama(seed=9), copy_weights=True) as engine,  # until the loop begins
        WeightSync(engine) as weight_sync,
        SyncOnStep(weight_sync, PolicyView(model), optimizer) as sync_on_step,
    ):
        for number in range(4):
            rollouts = [
                replace(rollout, reward=float(len(set(rollout.token_ids))))
                for rollout in engine.generate(prompts, params)
            ]
            batch = pad_rollouts([rollouts[:GROUP_SIZE], rollouts[GROUP_SIZE:]], pad_id=EOS_ID)
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
            loss, metrics = grpo_loss(
                token_logprobs(logits, batch.targets, temperature),
                batch.old_logprobs,
                group_advantages(batch.rewards, batch.group_index),
                batch.loss_mask,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert (metrics.ratio_mean, metrics.ratio_max) == pytest.approx((1.0, 1.0), abs=1e-4)
            assert metrics.num_tokens == sum(len(rollout.token_ids) for rollout in rollouts)
            assert set(batch.versions[batch.response_mask].tolist()) == {number + 1}
            assert sync_on_step.last_report is not None
            assert sync_on_step.last_report.version == engine.version == number + 2

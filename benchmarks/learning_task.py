"""What benchmarks/learning.py learns: digits in, the same digits sorted out, by a Llama that starts from random weights."""

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BEGIN, END, EQUALS = 10, 11, 12
"""Token ids; 0 to 9 are the digits."""
VOCAB_SIZE = 16
NUM_DIGITS = 3
ANSWER_TOKENS = NUM_DIGITS + 1
NUM_HELD_OUT = 200

_EVERY = list(itertools.product(range(10), repeat=NUM_DIGITS))
random.Random(0).shuffle(_EVERY)
HELD_OUT, TRAINING = _EVERY[:NUM_HELD_OUT], _EVERY[NUM_HELD_OUT:]
"""The digits of prompts that no run trains on, and of those that all do."""


def small_model() -> PreTrainedModel:
    """100,000 parameters, from torch's generator."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config)


def prompt_ids(digits: Sequence[int]) -> list[int]:
    return [BEGIN, *digits, EQUALS]


def reward(prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """The share of right positions, the end token's included."""
    answer = [*sorted(prompt[1:-1]), END]
    return sum(a == b for a, b in zip(answer, token_ids, strict=False)) / len(answer)


def position_rewards(input_ids: Tensor, mask: Tensor) -> Tensor:
    """[B, T-1] of `pad_rollouts`'s [B, T] ids: each right position's part of the reward, at its token. Sums to `reward`."""
    digits = input_ids[:, 1 : 1 + NUM_DIGITS].sort(dim=1).values
    answers = torch.cat([digits, torch.full((len(digits), 1), END)], dim=1)
    targets = input_ids[:, 1:]
    right = torch.zeros(targets.shape)
    start = NUM_DIGITS + 1
    width = targets.shape[1] - start
    right[:, start:] = (targets[:, start:] == answers[:, :width]) / ANSWER_TOKENS
    return right * mask


@torch.no_grad()
def held_out_reward(model: PreTrainedModel) -> float:
    """The mean over all held-out prompts, greedy; by plain forwards, which no engine has a part in."""
    prompts = [prompt_ids(digits) for digits in HELD_OUT]
    ids = torch.tensor(prompts)
    for _ in range(ANSWER_TOKENS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    answers = [until_end(row) for row in ids[:, len(prompts[0]) :].tolist()]
    return sum(map(reward, prompts, answers)) / len(prompts)


def until_end(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(END) + 1] if END in token_ids else token_ids

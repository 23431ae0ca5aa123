"""What becomes of prompts: samples, groups, rewards, batches, and the books of them."""

from rollout.batches.prompts import tokenized

__all__ = ["tokenized"]

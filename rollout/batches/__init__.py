"""What becomes of prompts: samples, groups, rewards, batches, and the books of them."""

"""Settings of the whole suite."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Tiny models gain nothing from threads, and two pools of them on few cores wait for each other most of the time.
torch.set_num_threads(1)

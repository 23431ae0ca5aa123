"""Settings of the whole suite."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when Ray is first imported. Without a token of the session's own, Ray writes one into the home folder.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import pytest
import torch

# Tiny models gain nothing from threads, and two pools of them on few cores wait for each other most of the time.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[str]:
    """One small Ray for the whole session; its address. Workers on it book no CPUs (`num_cpus=0`) and import `tests/`."""
    import ray

    tests = Path(__file__).resolve().parent
    # for workers, and for drivers in processes of their own
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    context = ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()

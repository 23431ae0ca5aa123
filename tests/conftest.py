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
# so that the asserts of helpers say what they compared; before any of them is imported
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "conftest"))

LEAVING_S = 15.0
"""What a thread or process that has been told to end may take."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """What a module leaves running takes time and memory from all that come after it, which then fail by chance."""
    from fakes import wait_until
    from leftovers import held

    before = held().keys()
    yield

    def left() -> list[str]:
        return sorted(name for thing, name in held().items() if thing not in before)

    try:
        wait_until(lambda: not left(), LEAVING_S)
    except AssertionError:
        pytest.fail(f"these tests have left behind: {', '.join(left())}", pytrace=False)


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

"""The continuous-batching manager of transformers, hardened: the only package that touches its private attributes.

`RolloutManager` is a `ContinuousBatchingManager` (all that upstream documents works on it) that in addition
- delivers finished, failed and cancelled requests to a listener, on the loop's thread;
- samples each request by its own parameters, without touching the process's random state;
- checks the requests of upstream's own methods as the engine checks its own, and gives each reader its own results;
- can be held: the loop idles, answering pauses and stops, and runs no forward;
- tells at a pause how many tokens of each request have been sampled, and forgets KV of older weights for new requests.
"""

from rollout.manager.contract import TESTED_TRANSFORMERS, check_upstream
from rollout.manager.hosting import host
from rollout.manager.manager import RolloutManager

__all__ = ["TESTED_TRANSFORMERS", "RolloutManager", "check_upstream", "host"]

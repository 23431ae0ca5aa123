"""How many threads torch computes on, for one thread of ours."""

import threading

import torch

RESTORE_LIMIT_S = 10.0


def use_threads(number: int) -> None:
    """Torch computes on `number` threads for the calling thread, and for nobody else."""
    default = torch.get_num_threads()
    torch.set_num_threads(number)
    # Torch gives threads that are new the number that was set last, wherever: every engine made from now on, and the
    # trainer's loaders, would compute on ours.
    restorer = threading.Thread(target=torch.set_num_threads, args=(default,), name="rollsync-threads", daemon=True)
    restorer.start()
    restorer.join(RESTORE_LIMIT_S)

"""Whose turn it is to use the staging of a weight sync."""

from threading import Lock

from sync.delivery import Delivery
from sync.errors import SyncTimeoutError


class Turns:
    """One at a time, from the start of a stage until its delivery has ended: both use the staging. Whoever comes with a newer
    version overtakes what goes before it."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._order = Lock()  # for the two below
        self._delivery: Delivery | None = None
        self._num_coming = 0

    def take(self, timeout_s: float, what: str) -> None:
        """Until `give_back`. SyncTimeoutError, which begins with `what`."""
        if not self._turn.acquire(timeout=timeout_s):
            raise SyncTimeoutError(f"{what} took longer than {timeout_s:g} s")

    def overtake(self, timeout_s: float, what: str) -> None:
        """The same, and the turn before it ends as soon as it can."""
        with self._order:
            self._num_coming += 1
            if self._delivery is not None:
                self._delivery.overtake()
        try:
            self.take(timeout_s, what)
        finally:
            with self._order:
                self._num_coming -= 1

    def give_back(self) -> None:
        self._turn.release()

    def is_one_coming(self) -> bool:
        """Whether a newer version waits for this turn to end."""
        with self._order:
            return self._num_coming > 0

    def delivers(self, delivery: Delivery) -> Delivery:
        """This one, in the turn that is taken, is overtaken by whoever comes, or has come while it was staged."""
        with self._order:
            self._delivery = delivery
            if self._num_coming:
                delivery.overtake()
        return delivery

    def close(self) -> None:
        """Let go of the last delivery, and the staging with it."""
        self._delivery = None

"""The states of an engine: what each event makes of them, and what is refused in which."""

from rollout.errors import EngineDeadError, EngineFencedError, EngineStateError
from rollout.status import EngineState, Fence


class Lifecycle:
    """Where one engine is in its life, and why. It changes under the engine's lock; it only notes, and does nothing to the
    loop or the requests.
    """

    def __init__(self) -> None:
        self._state = EngineState.CREATED
        self._fence: Fence | None = None  # kept through a death, and between two sessions
        self._death: BaseException | None = None

    @property
    def state(self) -> EngineState:
        """Now."""
        return self._state

    @property
    def is_serving(self) -> bool:
        """Whether its loop runs, on hold or not."""
        return self._state in (EngineState.RUNNING, EngineState.FENCED)

    @property
    def is_fenced(self) -> bool:
        """Whether an update must succeed before anything is run."""
        return self._fence is not None

    @property
    def fenced_for(self) -> Fence | None:
        """Why."""
        return self._fence

    @property
    def death(self) -> BaseException | None:
        """What the loop died of first, while it is dead."""
        return self._death

    def check(self, *allowed: EngineState) -> None:
        """Raises what fits the state, unless it is one of `allowed`."""
        if self._state in allowed:
            return
        match self._state:
            case EngineState.CREATED:
                raise EngineStateError("the engine is not started; use `with engine:` or engine.start()")
            case EngineState.RUNNING:
                raise EngineStateError("the engine is running already")
            case EngineState.FENCED:
                assert self._fence is not None
                raise EngineFencedError(f"the engine is fenced: {self._fence.reason}")
            case EngineState.DEAD:
                raise EngineDeadError(
                    f"the generation loop died: {self._death!r}; engine.restart() brings it back"
                ) from self._death
            case EngineState.STOPPED:
                raise EngineStateError("the engine is stopped; make a new one")

    def start(self) -> None:
        """The loop runs, for the first time or again."""
        self._state = EngineState.FENCED if self.is_fenced else EngineState.RUNNING
        self._death = None

    def end_session(self, *, again: bool) -> None:
        """The loop was told to end. `again`: it may be started once more."""
        if self.is_serving:
            self._state = EngineState.CREATED if again else EngineState.STOPPED
        elif self._state == EngineState.CREATED and not again:
            self._state = EngineState.STOPPED

    def stop(self) -> None:
        """For good, whatever it was."""
        self._state = EngineState.STOPPED

    def die(self, error: BaseException | None) -> None:
        """The loop has ended or is about to; `error` is what killed it, None after a stop."""
        kept = self._state == EngineState.CREATED and error is None  # for another session
        if not kept and self._state not in (EngineState.STOPPED, EngineState.DEAD):
            self._state, self._death = EngineState.DEAD, error

    def fence(self, reason: str, *, is_outside_change: bool = False) -> None:
        """Nothing vouches for the weights."""
        if self._state == EngineState.RUNNING:
            self._state = EngineState.FENCED
        says = f"{reason}. It serves nothing until an update succeeds: with engine.update(): ..."
        self._fence = Fence(reason=says, is_outside_change=is_outside_change)

    def unfence(self) -> bool:
        """An update has succeeded. False if the loop does not run: the fence then stays."""
        if self.is_serving:
            self._state, self._fence = EngineState.RUNNING, None
        return self.is_serving

"""Which way the bytes go to which target."""

from collections.abc import Iterable
from dataclasses import dataclass

from sync.layout import Layout
from sync.link import Link
from sync.place import here
from sync.ticket import TargetStatus
from sync.transports.base import Transport
from sync.transports.in_process import InProcess


@dataclass
class Route:
    """Targets that hold the same tensors and are reached the same way: they share one staging."""

    transport: Transport
    layout: Layout
    links: list[Link]


class Router:
    """Uses the transport that it is given, or chooses for each target by where that lives: in this process, on this
    machine, elsewhere."""

    def __init__(self, transport: Transport | None, bucket_bytes: int) -> None:
        self._given = transport
        self._chosen: dict[type[Transport], Transport] = {}
        self._bucket_bytes = bucket_bytes

    def routes(self, links: Iterable[Link]) -> list[Route]:
        """Raises SyncError for a target that the given transport cannot serve. The links must have answered."""
        routes: dict[tuple[int, Layout], Route] = {}
        for link in links:
            assert link.status is not None
            transport = self._transport_for(link.status)
            transport.commit_mode(link.status)
            layout = Layout(link.status.manifest, self._bucket_bytes)
            route = routes.setdefault((id(transport), layout), Route(transport, layout, []))
            route.links.append(link)
        return list(routes.values())

    def close(self) -> None:
        for transport in [*self._chosen.values(), *([self._given] if self._given is not None else [])]:
            transport.close()

    def _transport_for(self, status: TargetStatus) -> Transport:
        if self._given is not None:
            return self._given
        place = here()
        if status.place == place:
            return self._choose(InProcess)
        if status.place.machine == place.machine:
            from sync.transports.shared_memory import SharedMemory

            return self._choose(SharedMemory)
        from sync.transports.object_store import ObjectStore

        return self._choose(ObjectStore)

    def _choose(self, kind: type[Transport]) -> Transport:
        if kind not in self._chosen:
            self._chosen[kind] = kind()
        return self._chosen[kind]

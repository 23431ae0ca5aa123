"""The newest sealed version, kept for targets that come late, and the stagings that the next one goes into."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sync.delivery import Shipment
from sync.layout import Layout, seal
from sync.link import Link
from sync.routes import Route
from sync.staging import Staging
from sync.ticket import Claim, Package, Ticket

logger = logging.getLogger(__name__)

Key = tuple[int, Layout]
"""Of a route: its transport and its layout. One staging serves all targets behind it."""


@dataclass(frozen=True)
class _Sealed:
    staging: Staging
    package: Package


class Kept:
    """One sealed version, in as many layouts as there are kinds of engine."""

    def __init__(self) -> None:
        self.version: int | None = None
        """None before the first, and after a staging that failed in the very memory of what was kept."""
        self._sealed: dict[Key, _Sealed] = {}
        self._last_seals: dict[Key, str] = {}

    def stagings(self, routes: Sequence[Route], again: bool, *, spare: bool) -> dict[Key, Staging]:
        """Where each route's tensors go: beside what is kept, or, for the same version once more, in its place, where
        only equal values are accepted. `spare`: what is kept stays whole until the next is sealed, also where that costs
        memory for another version."""
        stagings: dict[Key, Staging] = {}
        for route in routes:
            sealed = self._sealed.get(_key(route))
            if again and sealed is not None:
                stagings[_key(route)] = sealed.staging
                continue
            spared = sealed.staging.run if spare and sealed is not None else None
            stagings[_key(route)] = Staging(route.layout, route.transport.run(route.layout, spared))
        if not again:
            written = {id(staging.run) for staging in stagings.values()}
            self._sealed = {
                key: sealed for key, sealed in self._sealed.items() if id(sealed.staging.run) not in written
            }
            if not self._sealed:
                self.version = None
        return stagings

    def seal(self, stagings: Mapping[Key, Staging], claim: Claim, version: int) -> None:
        """From here on these are the newest weights, and what was kept before may go. Warns of a version with the very
        bytes of the one before it."""
        for staging in stagings.values():
            staging.seal()
        before, self._sealed, self.version = self._sealed, {}, version
        for key, staging in stagings.items():
            known = before.get(key)
            if known is not None and known.staging is staging:
                self._sealed[key] = known
                continue
            sealed = self._sealed[key] = _Sealed(staging, _package(staging, claim, version))
            if self._last_seals.get(key) == sealed.package.ticket.seal:
                logger.warning(
                    "version %d has the very bytes of the one before it: was the right model published, and did the "
                    "optimizer step?",
                    version,
                )
        self._last_seals = {key: sealed.package.ticket.seal for key, sealed in self._sealed.items()}

    def shipment(self, route: Route, links: Sequence[Link]) -> Shipment | None:
        """What these targets of a route get; None if they hold other tensors than what was published."""
        sealed = self._sealed.get(_key(route))
        return Shipment(sealed.package, sealed.staging.run, route.transport, links) if sealed is not None else None

    def clear(self) -> None:
        self._sealed.clear()
        self.version = None


def _key(route: Route) -> Key:
    return id(route.transport), route.layout


def _package(staging: Staging, claim: Claim, version: int) -> Package:
    digests = staging.layout.digests(staging.run) if staging.run.device.type == "cpu" else None
    name = seal(digests) if digests is not None else uuid.uuid4().hex
    return Package(ticket=Ticket(claim=claim, version=version, seal=name), layout=staging.layout, digests=digests)

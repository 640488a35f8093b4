"""Port of the inputs that end the process which computes them, shared by the whole fleet.

An input is named by the digest of the version and a fingerprint (``core.poison``). Entries end by
themselves. Implementations: ``adapters/quarantine/store.py``, ``adapters/memory/quarantine.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One input, refused on one version. ``deaths``: how many processes it ended alone; 0: it only raised."""

    version_digest: str
    fingerprint: str
    model: str
    deaths: int
    until_unix_s: float


class Quarantine(Protocol):
    """Bounded in the fleet: an entry beyond the limit replaces the oldest one, first of its version."""

    def find(self, version_digest: str, fingerprint: str) -> Quarantined | None:
        """Return the entry, from a local view: no call of a store."""

    def holds(self, version_digest: str) -> bool:
        """Whether any input is refused on the version; cheap, so that a caller may skip the fingerprint."""

    def count(self, version_digest: str) -> int:
        """Return how many inputs are refused on the version: the evidence against it."""

    async def add(self, version_digest: str, fingerprint: str, *, model: str, deaths: int) -> None:
        """Refuse the input from now on, here at once and elsewhere as soon as the store allows it.

        Raises StoreUnavailable when the fleet could not be notified; the entry holds here.
        """

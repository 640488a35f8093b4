"""A quarantine in this process, for a single gateway and for tests."""

from __future__ import annotations

from services.adapters.quarantine.entries import QuarantineLimits, displaced, in_force
from services.ports.clock import Clock
from services.ports.poison.quarantine import Quarantined


class MemoryQuarantine:
    """Implements ``Quarantine``. Entries past their time are removed when another is added."""

    def __init__(self, clock: Clock, limits: QuarantineLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits if limits is not None else QuarantineLimits()
        self._entries: dict[tuple[str, str], Quarantined] = {}

    def find(self, version_digest: str, fingerprint: str) -> Quarantined | None:
        """See ``Quarantine``."""
        return in_force(self._entries.get((version_digest, fingerprint)), self._clock.unix_s())

    def holds(self, version_digest: str) -> bool:
        """See ``Quarantine``."""
        return bool(self._entries) and self.count(version_digest) > 0

    def count(self, version_digest: str) -> int:
        """See ``Quarantine``."""
        now_s = self._clock.unix_s()
        return sum(
            digest == version_digest and now_s < entry.until_unix_s
            for (digest, _), entry in self._entries.items()
        )

    async def add(self, version_digest: str, fingerprint: str, *, model: str, deaths: int) -> None:
        """See ``Quarantine``."""
        self.put(version_digest, fingerprint, model=model, deaths=deaths)

    def put(self, version_digest: str, fingerprint: str, *, model: str, deaths: int) -> Quarantined:
        """Add an entry and return it."""
        now_s = self._clock.unix_s()
        self._entries = {key: entry for key, entry in self._entries.items() if in_force(entry, now_s)}
        added = Quarantined(version_digest, fingerprint, model, deaths, now_s + self._limits.ttl_s)
        for entry in displaced(self._entries.values(), added, self._limits):
            del self._entries[entry.version_digest, entry.fingerprint]
        self._entries[version_digest, fingerprint] = added
        return added

    def entries(self, version_digest: str) -> tuple[Quarantined, ...]:
        """Return the entries of a version, also those past their time."""
        return tuple(entry for entry in self._entries.values() if entry.version_digest == version_digest)

    def drop(self, version_digest: str, fingerprint: str) -> None:
        """Remove an entry, if there is one."""
        self._entries.pop((version_digest, fingerprint), None)

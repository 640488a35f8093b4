"""The fleet's quarantine in the strongly consistent store: a key per input under a lease, a view per gateway.

An input is refused here before the store has the entry, and everywhere once the watches deliver it. Two
gateways that add at the same time may exceed the limits by one entry each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from services.core.records import dump, quarantine_key
from services.ports.clock import Clock
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Committed, Delete, Put, Store
from services.runtime.fleet_state.informer import RecordView, Versioned

TTL_S: Final = 3600


@dataclass(frozen=True, slots=True)
class QuarantineLimits:
    """``ttl_s`` is how long an input is refused. The other limits are the most entries of a version, and of
    all."""

    ttl_s: int = TTL_S
    max_of_version: int = 256
    max_entries: int = 4096


def in_force(entry: Quarantined | None, now_unix_s: float) -> Quarantined | None:
    return entry if entry is not None and now_unix_s < entry.until_unix_s else None


def displaced(
    entries: Iterable[Quarantined], added: Quarantined, limits: QuarantineLimits
) -> tuple[Quarantined, ...]:
    """Return the entries that ``added`` replaces: the oldest of its version, then the oldest of all."""
    key = added.version_digest, added.fingerprint
    others = sorted(
        (entry for entry in entries if (entry.version_digest, entry.fingerprint) != key),
        key=lambda entry: (entry.until_unix_s, entry.version_digest, entry.fingerprint),
    )
    same = [entry for entry in others if entry.version_digest == added.version_digest]
    out = same[: max(0, len(same) + 1 - limits.max_of_version)]
    left = [entry for entry in others if entry not in out]
    return (*out, *left[: max(0, len(left) + 1 - limits.max_entries)])


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


_UNWRITTEN: Final = 2**63  # above any revision of a store
_MAX_REMOVED: Final = 64  # most entries that one addition removes, since a commit is bounded


class EntryView(RecordView[Quarantined], Protocol):
    """An ``Informer`` of the entries."""

    @property
    def revision(self) -> int:
        """The store revision of the view."""


class StoreQuarantine:
    """Implements ``Quarantine``. ``records``: the entries under ``QUARANTINE``, kept by an informer."""

    def __init__(
        self,
        store: Store,
        records: EntryView,
        clock: Clock,
        limits: QuarantineLimits | None = None,
    ) -> None:
        self._store = store
        self._records = records
        self._clock = clock
        self._limits = limits if limits is not None else QuarantineLimits()
        self._own = MemoryQuarantine(clock, self._limits)  # added here, until the view includes the write
        self._written: dict[tuple[str, str], int] = {}  # revisions of what is in ``_own``
        self._indexed: Mapping[str, Versioned[Quarantined]] | None = None
        self._by_version: dict[str, dict[str, Quarantined]] = {}

    def find(self, version_digest: str, fingerprint: str) -> Quarantined | None:
        """See ``Quarantine``."""
        found = self._of(version_digest).get(fingerprint)
        return self._own.find(version_digest, fingerprint) or in_force(found, self._clock.unix_s())

    def holds(self, version_digest: str) -> bool:
        """See ``Quarantine``."""
        return bool(self._of(version_digest)) or self._own.holds(version_digest)

    def count(self, version_digest: str) -> int:
        """See ``Quarantine``."""
        now_s = self._clock.unix_s()
        entries = [*self._of(version_digest).values(), *self._own.entries(version_digest)]
        return len({entry.fingerprint for entry in entries if in_force(entry, now_s)})

    async def add(self, version_digest: str, fingerprint: str, *, model: str, deaths: int) -> None:
        """See ``Quarantine``."""
        self._of(version_digest)  # what the view has meanwhile is no longer ours
        entries = [
            *(versioned.record for versioned in self._records.view.values()),
            *self._own.entries(version_digest),
        ]
        key = version_digest, fingerprint
        added = self._own.put(version_digest, fingerprint, model=model, deaths=deaths)
        self._written[key] = _UNWRITTEN
        removed = [
            Delete(quarantine_key(entry.version_digest, entry.fingerprint))
            for entry in displaced(entries, added, self._limits)[:_MAX_REMOVED]
        ]
        try:
            lease_id = await self._store.grant_lease(self._limits.ttl_s)
            put = Put(quarantine_key(version_digest, fingerprint), dump(added), lease_id)
            done = await self._store.commit([put, *removed])
        finally:
            self._written.pop(key, None)
        if isinstance(done, Committed):
            self._written = {each: one for each, one in self._written.items() if self._own.find(*each)}
            self._written[key] = done.revision
            self._indexed = None  # the view may include the write already, and also its removal

    def _of(self, version_digest: str) -> dict[str, Quarantined]:
        """Return the entries of a version in the view, by fingerprint."""
        view = self._records.view
        if view is not self._indexed:
            self._indexed, self._by_version = view, {}
            for versioned in view.values():
                entry = versioned.record
                self._by_version.setdefault(entry.version_digest, {})[entry.fingerprint] = entry
                key = entry.version_digest, entry.fingerprint
                if versioned.mod_revision >= self._written.get(key, 0):  # not an earlier entry of the input
                    self._own.drop(*key)
            seen = [key for key, revision in self._written.items() if revision <= self._records.revision]
            for key in seen:
                del self._written[key]
                self._own.drop(*key)
        return self._by_version.get(version_digest, {})

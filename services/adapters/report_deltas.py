"""What a worker told of in reports that no leader answered yet. Pure; ``Reporter`` drives it.

Snapshots hand deltas over: from then on they are here until an answer confirms the report that carried them.
When the stream breaks, the unconfirmed ones go into the first reports of the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from services.core.fleet import ReportSnapshot, TenantTokens

MAX_SEEN: Final = 65536
MAX_TENANTS: Final = 4096


@dataclass(slots=True)
class Deltas:
    """Grants seen of one epoch, tokens (prefill, output) by tenant and version."""

    epoch: int = 0
    seen: dict[int, None] = field(default_factory=dict)
    tokens: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(snapshot: ReportSnapshot) -> Deltas:
        found = Deltas(snapshot.epoch, dict.fromkeys(snapshot.grants_seen))
        for use in snapshot.tenants:
            found.add_tokens((use.tenant, use.digest), use.prefill, use.output)
        return found

    def add_tokens(self, key: tuple[str, str], prefill: int, output: int) -> None:
        had = self.tokens.get(key, (0, 0))
        self.tokens[key] = had[0] + prefill, had[1] + output

    def add(self, other: Deltas) -> None:
        """Take the other's along. Grants of the older epoch are dropped: that leader is gone."""
        if other.epoch > self.epoch:
            self.epoch, self.seen = other.epoch, {}
        if other.epoch == self.epoch:
            self.seen.update(other.seen)
        for key, tokens in other.tokens.items():
            self.add_tokens(key, *tokens)

    def split(self, max_seen: int, max_tenants: int) -> Deltas:
        """Take out what fits into one report."""
        fits = Deltas(self.epoch)
        for number in list(self.seen)[:max_seen]:
            fits.seen[number] = self.seen.pop(number)
        for key in list(self.tokens)[:max_tenants]:
            fits.tokens[key] = self.tokens.pop(key)
        return fits


class DeltaKeeper:
    """One owner. ``reports`` in flight are bounded by the owner, which waits for answers."""

    def __init__(self, *, max_seen: int = MAX_SEEN, max_tenants: int = MAX_TENANTS) -> None:
        self._max_seen = max_seen
        self._max_tenants = max_tenants
        self._unconfirmed: deque[tuple[int, Deltas]] = deque()
        self._carried = Deltas()
        self._number = 0

    @property
    def unconfirmed(self) -> int:
        """Reports of this stream without an answer."""
        return len(self._unconfirmed)

    def stream_opened(self) -> None:
        """Nothing was sent on the new stream; what the last one left unanswered goes first."""
        for _, deltas in self._unconfirmed:
            self._carried.add(deltas)
        self._unconfirmed.clear()
        self._number = 0

    def keep(self, snapshot: ReportSnapshot) -> None:
        """Keep the deltas of a snapshot that is not sent."""
        self._carried.add(Deltas.of(snapshot))

    def next_report(self, snapshot: ReportSnapshot) -> tuple[int, ReportSnapshot]:
        """Return the number of the next report and the snapshot with the deltas that it is to carry."""
        self._number += 1
        self._carried.add(Deltas.of(snapshot))
        deltas = self._carried.split(self._max_seen, self._max_tenants)
        self._unconfirmed.append((self._number, deltas))
        tenants = tuple(TenantTokens(*key, *tokens) for key, tokens in deltas.tokens.items())
        return self._number, replace(snapshot, grants_seen=tuple(deltas.seen), tenants=tenants)

    def confirm(self, number: int) -> bool:
        """Forget what reports up to ``number`` carried; whether there was any."""
        before = len(self._unconfirmed)
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            self._unconfirmed.popleft()
        return len(self._unconfirmed) < before

"""What is kept of a request under its idempotency key, so that a retry finds it on any gateway.

A record has a fingerprint of the request's body, an owner under a lease, an epoch, and a log of chunks whose
content is its owner's business. Every change of owner raises the epoch, and every write compares owner and
epoch: who was frozen and is not the owner any more writes nothing and settles nothing.

A record ends as a log that can be replayed, later as a tombstone without one: for as long as the tombstone
stands, the key never runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.core.generation import Usage
from services.ports.limiter import Reservation


@dataclass(frozen=True, slots=True)
class RecordKey:
    """``digest`` is a hash of the client's key, in hex: its own bytes are never part of a name."""

    tenant_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Times in seconds. A body is kept ``body_s`` after its last chunk, its tombstone ``tombstone_s``."""

    lease_s: float = 5.0
    body_s: float = 3600.0
    tombstone_s: float = 86_400.0
    max_record_bytes: int = 4 * 1024**2
    max_tenant_bytes: int = 256 * 1024**2
    max_tenant_keys: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Hold:
    """The right to write to a record, until another takes it."""

    key: RecordKey
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Owned:
    """The caller runs it. ``chunks``: how many an earlier owner left to go on from."""

    hold: Hold
    chunks: int


@dataclass(frozen=True, slots=True)
class Running:
    """Somebody else runs it, and its lease has not lapsed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """It ran to its end; the log has all of it."""


@dataclass(frozen=True, slots=True)
class Expired:
    """It ran, and its log is gone or was too large to keep."""


@dataclass(frozen=True, slots=True)
class OtherBody:
    """The key belongs to a request with another fingerprint."""


Claim = Owned | Running | Ended | Expired | OtherBody


class Written(StrEnum):
    """What became of a write. WATCHED is KEPT, and somebody follows the record from elsewhere."""

    KEPT = "kept"
    WATCHED = "watched"
    TOO_LARGE = "too_large"
    FENCED = "fenced"
    GONE = "gone"


class RecordState(StrEnum):
    """FREE: nobody runs it, so whoever wants its result may claim it."""

    RUNNING = "running"
    FREE = "free"
    ENDED = "ended"
    EXPIRED = "expired"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Addition:
    """One chunk for the log of a record that is held; an empty one only renews the lease."""

    hold: Hold
    chunk: bytes = b""


@dataclass(frozen=True, slots=True)
class Tail:
    """A part of a log. ``more``: there are further chunks already."""

    state: RecordState
    chunks: tuple[bytes, ...] = ()
    more: bool = False


class IdempotencyStore(Protocol):
    """Raises StoreUnavailable, within a bounded time, when the shared state cannot be reached."""

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        """Take the record if it is new or has no live owner; say otherwise what it is.

        Raises IdempotencyKeysExceeded, with ``retry_after_s``, for a new key of a tenant that has its most.
        """

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        """Add chunks and renew the leases of many records; one answer for each, in order.

        A record that outgrows its bound, or its tenant's, loses its log and answers TOO_LARGE from then on.
        So does one of whose log a part lapsed under its owner: a log with a hole is never replayed.
        """

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        """End the record for good with a last chunk, give the slot back and charge: all or nothing.

        What was charged by a release before is not charged again.
        """

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        """Let go of a record that did not end: FREE with what its log has, or gone if it has nothing.

        Gives the slot back and charges as ``finish`` does, where there is a reservation.
        """

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> Tail:
        """Return chunks from number ``start`` on, a bounded number at once.

        ``watch`` tells the owner, for about two seconds, that somebody follows.
        """

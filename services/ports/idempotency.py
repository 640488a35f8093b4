"""Port of the idempotency store: records of requests by idempotency key, which a retry finds on any gateway.

A record has a fingerprint of the request's body, an owner under a lease, an epoch, and a log of chunks in a
format of its owner. Every change of owner increases the epoch, and every write compares owner and epoch: a
former owner that was frozen cannot write or settle anything.

A finished record keeps a log that can be replayed, and later only a tombstone without a log. While the
tombstone exists, the key never runs again.
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
    """Key of a record. ``digest`` is a keyed hash of the client's key, in hex; the client's bytes never
    appear in a name."""

    tenant_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Limits in bytes, keys and seconds. A body is stored for ``body_s`` after its last chunk, its tombstone
    for ``tombstone_s``."""

    lease_s: float = 5.0
    body_s: float = 3600.0
    tombstone_s: float = 86_400.0
    max_record_bytes: int = 4 * 1024**2
    max_tenant_bytes: int = 256 * 1024**2
    max_tenant_keys: int = 1_000_000
    # For so long after its last chunk a record without an end keeps its log: it makes no room for others, a
    # chunk without room is refused alone, and its end is bounded by max_record_bytes alone. 0: it may lose
    # its log at once, as one that has ended.
    open_s: float = 0.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Hold:
    """The right to write to a record, until another owner claims it."""

    key: RecordKey
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Owned:
    """The caller runs the request. ``chunks``: chunks of an earlier owner, from which the caller
    continues."""

    hold: Hold
    chunks: int


@dataclass(frozen=True, slots=True)
class Running:
    """Another owner runs it, and its lease has not expired."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has finished; the log is complete."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The request has run, and its log has expired or was too large to store."""


@dataclass(frozen=True, slots=True)
class OtherBody:
    """The key belongs to a request with another fingerprint."""


Claim = Owned | Running | Ended | Expired | OtherBody


class Written(StrEnum):
    """Result of a write. WATCHED is KEPT while another gateway reads the record."""

    KEPT = "kept"
    WATCHED = "watched"
    TOO_LARGE = "too_large"
    FENCED = "fenced"
    GONE = "gone"


class RecordState(StrEnum):
    """State of a record. FREE: no owner runs it, so a caller may claim it."""

    RUNNING = "running"
    FREE = "free"
    ENDED = "ended"
    EXPIRED = "expired"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Addition:
    """One chunk for the log of a held record; an empty one only renews the lease."""

    hold: Hold
    chunk: bytes = b""


@dataclass(frozen=True, slots=True)
class LogTail:
    """A part of a log. ``more``: further chunks are available already."""

    state: RecordState
    chunks: tuple[bytes, ...] = ()
    more: bool = False


class IdempotencyStore(Protocol):
    """Raises StoreUnavailable, within a bounded time, when the shared state cannot be reached."""

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        """Claim the record if it is new or has no live owner; otherwise return its state.

        Raises IdempotencyKeysExceeded, with ``retry_after_s``, for a new key of a tenant at its limit of
        keys.
        """

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        """Add chunks and renew the leases of many records; return one result for each, in order.

        A record that exceeds its own or its tenant's limit loses its log and returns TOO_LARGE from then on,
        unless the limits have ``open_s``.
        The same holds for a record that lost a part of its log while it had an owner: an incomplete log is
        never replayed.
        """

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        """Finish the record with a last chunk, release the slot and charge the usage: all or nothing.

        Usage that an earlier release charged is not charged again. With ``open_s`` in the limits a record
        whose last chunk is TOO_LARGE is released instead.
        """

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        """Release a record that is not finished: FREE with its log, or deleted if the log is empty.

        Releases the slot and charges the usage like ``finish``, where there is a reservation.
        """

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        """Return chunks from number ``start`` on, a bounded number at once.

        ``watch`` signals the owner, for about two seconds, that a reader follows the record.
        """

    async def delete(self, key: RecordKey) -> bool:
        """Delete the record in any state, with its log; return whether there was one.

        Its key may run again, and a present owner's writes return GONE.
        """

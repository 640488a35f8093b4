"""API keys and placement tickets. The two purposes never share key material or a hash.

An API key has the form ``fw_<name>_<secret>``: the name identifies the record, the secret is compared by its
sha256. The secret has 256 random bits, so a plain hash resists guessing.

A ticket proves to the scheduler that a gateway admitted a request: a version byte, an HMAC-SHA256 under a key
derived only for tickets, and the payload.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from functools import lru_cache
from typing import Final

import msgspec

from services.core.errors import PermissionDenied, TicketExpired, Unauthenticated

SECRET_BYTES: Final = 32
MAX_KEY_CHARS: Final = 256
MAX_TICKET_BYTES: Final = 512
TICKET_LEEWAY_S: Final = 60.0  # most that the clocks of a gateway and a scheduler may differ
_KEY: Final = re.compile(r"fw_([a-z0-9](?:[a-z0-9.-]{0,126}[a-z0-9])?)_([A-Za-z0-9_-]{16,128})")
_TICKET_VERSION: Final = b"\x01"
_TICKET_PURPOSE: Final = b"fairway ticket v1"
_MAC_BYTES: Final = 32
_PREFIX_PURPOSE: Final = b"fairway prefix v1"
_EVENTS_PURPOSE: Final = b"fairway event ids v1"
_RECORDS_PURPOSE: Final = b"fairway record names v1"
_QUARANTINE_PURPOSE: Final = b"fairway quarantine v1"


def new_secret() -> bytes:
    """Return 32 bytes from the system's random source."""
    return secrets.token_bytes(SECRET_BYTES)


def new_key(name: str, rng_bytes: bytes) -> tuple[str, str]:
    """Return the text of a key, to be shown once, and the hash to store.

    ``rng_bytes`` are 32 random bytes (``new_secret()``); the text is ``fw_<name>_<52 characters>``.
    """
    if len(rng_bytes) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(rng_bytes)}")
    secret = base64.b32encode(rng_bytes).decode().rstrip("=").lower()
    return f"fw_{name}_{secret}", secret_hash(secret)


def secret_hash(secret: str) -> str:
    """Return the hex sha256 of the secret part of a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


def parse_key(text: str) -> tuple[str, str]:
    """Return (name, secret). Raises Unauthenticated, whose text contains nothing of the input."""
    found = _KEY.fullmatch(text) if len(text) <= MAX_KEY_CHARS else None
    if found is None:
        raise Unauthenticated("the API key is malformed")
    return found[1], found[2]


def claimed_key(credentials: str | None) -> str:
    """Return the name in a key's text, which proves nothing; empty without one."""
    found = _KEY.search(credentials) if credentials and len(credentials) <= MAX_KEY_CHARS else None
    return "" if found is None else found[1]


def verify(secret: str, stored_hash: str) -> bool:
    """Return whether the secret has the stored hash, in constant time."""
    return hmac.compare_digest(secret_hash(secret).encode(), stored_hash.encode())


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request that passed admission, and what it reserved.

    ``expire_unix_s`` by the gateway's clock. ``reserved_tokens``: prompt and most output of each of its
    ``choices``.
    """

    tenant_id: str
    request_id: str
    expire_unix_s: int
    reserved_tokens: int
    choices: int


_tickets: Final = msgspec.msgpack.Decoder(Ticket)


def prefix_secret(key: bytes) -> bytes:
    """Return the secret for naming prefixes, derived from the installation's ticket key."""
    return hmac.digest(key, _PREFIX_PURPOSE, "sha256")


def record_names_secret(key: bytes) -> bytes:
    """Return the secret for naming idempotency records, derived from the installation's ticket key."""
    return hmac.digest(key, _RECORDS_PURPOSE, "sha256")


def quarantine_secret(key: bytes) -> bytes:
    """Return the secret of the fingerprints in the quarantine, derived from the installation's ticket key."""
    return hmac.digest(key, _QUARANTINE_PURPOSE, "sha256")


def event_ids_secret(key: bytes) -> bytes:
    """Return the secret for ids of streamed events, derived from the installation's ticket key."""
    return hmac.digest(key, _EVENTS_PURPOSE, "sha256")


def issue_ticket(key: bytes, ticket: Ticket) -> bytes:
    """Return the signed ticket, at most ``MAX_TICKET_BYTES`` for ids within their bounds."""
    return sign_ticket(key, msgspec.msgpack.encode(ticket))


def check_ticket(key: bytes, signed: bytes, now_unix_s: float) -> Ticket:
    """Return the ticket. Raises PermissionDenied for another key or a changed byte. Raises TicketExpired when
    it expired more than ``TICKET_LEEWAY_S`` ago: the client is not at fault, and another gateway may succeed.
    """
    try:
        ticket = _tickets.decode(verify_ticket(key, signed))
    except msgspec.DecodeError as exc:
        raise PermissionDenied("the placement ticket is malformed") from exc
    expired_s = now_unix_s - ticket.expire_unix_s
    if expired_s >= TICKET_LEEWAY_S:
        raise TicketExpired(
            f"the placement ticket expired {expired_s:.0f} s ago by the scheduler's clock: the clocks of the "
            "gateway and of the scheduler differ; set both from one time source",
            retry_after_s=1.0,
            expired_s=round(expired_s),
        )
    return ticket


def sign_ticket(key: bytes, payload: bytes) -> bytes:
    """Return version, HMAC and payload. ``key`` is the installation's secret, 16 bytes or more."""
    return _TICKET_VERSION + _ticket_mac(key, payload) + payload


def verify_ticket(key: bytes, signed: bytes) -> bytes:
    """Return the payload. Raises PermissionDenied when this key did not sign exactly these bytes."""
    version, mac, payload = signed[:1], signed[1 : 1 + _MAC_BYTES], signed[1 + _MAC_BYTES :]
    if len(signed) > MAX_TICKET_BYTES or version != _TICKET_VERSION:
        raise PermissionDenied("the placement ticket is malformed")
    if not hmac.compare_digest(mac, _ticket_mac(key, payload)):
        raise PermissionDenied("the placement ticket is not signed by this installation")
    return payload


def _ticket_mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(_ticket_key(key), payload, "sha256")


@lru_cache(maxsize=8)
def _ticket_key(key: bytes) -> bytes:
    """Return the key for tickets, derived from the installation's secret."""
    if len(key) < 16:
        raise ValueError("a ticket key has at least 16 bytes")
    return hmac.digest(key, _TICKET_PURPOSE, "sha256")

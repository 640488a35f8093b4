"""Keys and arguments of a reservation in Redis scripts; see ``lua/reservation.lua``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from services.adapters.quotas.quota import encode_claims, most
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Scope
from services.ports.limiter import Reservation

# The files that the scripts of reservations begin with.
RESERVATION: Final = ("common", "meters", "reservation")
_DIGEST_CHARS: Final = 32


def key(tenant_id: str, *parts: str) -> str:
    """Return a key under the tenant's hash tag, so that all keys of a tenant are on one node of a cluster."""
    return f"fw:{{{tenant_id}}}:" + ":".join(parts)


def slots_key(tenant_id: str) -> str:
    return key(tenant_id, "slots")


def record_key(tenant_id: str, request_id: str) -> str:
    return key(tenant_id, "request", request_id)


def limit_key(tenant_id: str, limit: Limit) -> str:
    """Return the key of what the limit counts. An end user's name is not stored, only its digest."""
    what = "slots" if limit.kind is LimitKind.CONCURRENCY else limit.kind.value
    match limit.scope:
        case Scope.TENANT:
            return key(tenant_id, limit.name or what)  # WORK has a bucket of its own
        case Scope.KEY:
            return key(tenant_id, what, "key", limit.name)
        case Scope.USER:
            digest = hashlib.sha256(limit.name.encode()).hexdigest()[:_DIGEST_CHARS]
            return key(tenant_id, what, "user", digest)


def keys_of(reservation: Reservation, claims: Sequence[Claim]) -> list[str]:
    tenant_id = reservation.tenant_id
    return [
        record_key(tenant_id, reservation.request_id),
        *(limit_key(tenant_id, claim.limit) for claim in claims),
    ]


def arguments_of(reservation: Reservation, usage: Usage, claims: Sequence[Claim]) -> list[str | int | bytes]:
    """``claims`` are those of the reservation, and those that end with the call, as requests per minute."""
    price = reservation.price
    arguments: list[str | int | bytes] = [
        reservation.request_id,
        reservation.admitted_us,
        encode_claims(reservation),
        len(claims),
        price.input_micros,
        price.cached_micros,
        price.output_micros,
        usage.prompt_tokens,
        usage.output_tokens,
        usage.cached_tokens,
    ]
    for claim in claims:
        arguments += [claim.limit.kind.value, most(claim.limit), claim.amount]
    return arguments

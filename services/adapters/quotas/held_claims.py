"""The claims and the price of a reservation as bytes, in Redis and in the spool of settlements."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.ports.limiter import Reservation


class HeldClaims(msgspec.Struct, array_like=True, frozen=True):
    """Prices of input, cached and output tokens; kind, number, scope, name and amount of each claim."""

    price: tuple[int, int, int]
    claims: tuple[tuple[LimitKind, int, Scope, str, int], ...]


_DECODER: Final = msgspec.json.Decoder(HeldClaims)


def held_by(reservation: Reservation) -> HeldClaims:
    price = reservation.price
    claims = tuple(
        (claim.limit.kind, claim.limit.limit, claim.limit.scope, claim.limit.name, claim.amount)
        for claim in reservation.claims
    )
    return HeldClaims((price.input_micros, price.cached_micros, price.output_micros), claims)


def with_held(reservation: Reservation, held: HeldClaims) -> Reservation:
    """Return the reservation with these claims."""
    claims = tuple(
        Claim(Limit(kind, number, scope, name), amount) for kind, number, scope, name, amount in held.claims
    )
    return replace(reservation, claims=claims, price=Price(*held.price))


def encode(reservation: Reservation) -> bytes:
    return msgspec.json.encode(held_by(reservation))


def decoded(reservation: Reservation, encoded: bytes) -> Reservation:
    """Return the reservation with the claims of its record."""
    return with_held(reservation, _DECODER.decode(encoded))

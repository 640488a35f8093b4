"""Arithmetic, rejections and encoded claims: what the shared store and a gateway's own decisions have in
common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from services.core.errors import (
    BudgetExceeded,
    ConcurrencyExceeded,
    OverQuota,
    RequestRateExceeded,
    TokenRateExceeded,
    retry_in,
)
from services.core.generation import Usage
from services.core.limits import BUDGETS, TOKEN_RATES, WORK, Claim, Limit, LimitKind, Price, RateState, Scope
from services.ports.limiter import Reservation

# What one request and one token weigh in a bucket, which drains by its limit per microsecond or millisecond.
REQUEST_UNITS: Final = 60_000_000
TOKEN_UNITS: Final = 60_000
# A higher limit counts as this: integers up to 2^53 in Lua.
MOST: Final = {
    LimitKind.REQUESTS: 100_000_000,
    LimitKind.CONCURRENCY: 1_000_000_000,
    LimitKind.MONTH_MICROS: 10**15,
    LimitKind.DAY_MICROS: 10**15,
}
MAX_TOKENS_PER_MINUTE: Final = 100_000_000_000
SETTLED_KEEP_S: Final = 600  # for how long a confirmed settlement is stored
LAPSED_AT_ONCE: Final = 8  # lapsed reservations that one admission settles
LAPSED_BATCH: Final = 64  # and one call of ``settle_lapsed``
_CONCURRENCY_RETRY_S: Final = 1.0
_WHOSE: Final = {Scope.TENANT: "the", Scope.KEY: "this key's", Scope.USER: "this end user's"}


def most(limit: Limit) -> int:
    """Return the limit that applies; 0: none."""
    return max(0, min(limit.limit, MOST.get(limit.kind, MAX_TOKENS_PER_MINUTE)))


def on_limits(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims on a limit, since a limit of 0 or less is none."""
    return tuple(claim for claim in claims if claim.limit.limit > 0)


def limited(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims on a limit. Raises what ``too_large`` returns for a claim that never fits."""
    found = on_limits(claims)
    for claim in found:
        if claim.amount > most(claim.limit):
            raise too_large(claim)
    return found


def fitting(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return the claims on a limit; none of them if one never fits."""
    try:
        return limited(claims)
    except OverQuota:
        return ()


def unclaimed(reservation: Reservation, claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims on limits that the reservation, admitted again while it runs, does not claim yet."""
    claimed = {(held.limit.kind, held.limit.scope, held.limit.name) for held in reservation.claims}
    return [one for one in claims if (one.limit.kind, one.limit.scope, one.limit.name) not in claimed]


def used_of(kind: LimitKind, usage: Usage, price: Price) -> int:
    """Return what a request's usage counts of a limit: tokens, or its cost."""
    match kind:
        case LimitKind.TOKENS:
            return usage.prompt_tokens + usage.output_tokens
        case LimitKind.INPUT_TOKENS:
            return usage.prompt_tokens
        case LimitKind.OUTPUT_TOKENS:
            return usage.output_tokens
        case LimitKind.MONTH_MICROS | LimitKind.DAY_MICROS:
            return price.cost_micros(usage)
        case _:
            return 0


def rejection(claim: Claim, wait_s: float, rates: Sequence[tuple[Limit, RateState]] = ()) -> OverQuota:
    """Return the error for a limit that has no room for a claim. ``rates``: those that were checked with it,
    which the error states unless they are of other work than requests.

    The wait for a rate or a budget is exact if no other request takes its place. The end of a running request
    is unknown, so the wait for a slot is a second, or less when a slot lapses earlier.
    """
    error = _rejection(claim, wait_s)
    if claim.limit.name == WORK and claim.limit.scope is Scope.TENANT:
        return error
    error.request_rate = _stated(claim, rates, (LimitKind.REQUESTS,))
    error.token_rate = _stated(claim, rates, TOKEN_RATES)
    return error


def _rejection(claim: Claim, wait_s: float) -> OverQuota:
    limit, kind, whose = most(claim.limit), claim.limit.kind, _WHOSE[claim.limit.scope]
    if kind is LimitKind.REQUESTS:
        text = f"{whose} limit of {limit} requests per minute is reached; {retry_in(wait_s)}"
        return _about(RequestRateExceeded(text, retry_after_s=wait_s), claim)
    if kind is LimitKind.CONCURRENCY:
        wait_s = min(max(wait_s, 0.0), _CONCURRENCY_RETRY_S)
        text = f"{whose} limit of {limit} requests at once is reached; {retry_in(wait_s)}"
        return _about(ConcurrencyExceeded(text, retry_after_s=wait_s), claim)
    if kind in TOKEN_RATES:
        text = (
            f"{whose} limit of {limit} {_tokens(kind)} per minute has no room for {claim.amount}; "
            f"{retry_in(wait_s)}"
        )
        return _about(TokenRateExceeded(text, retry_after_s=wait_s, tokens=claim.amount), claim)
    text = (
        f"{whose} budget of {limit} micro-dollars per {_period(kind)} has no room for {claim.amount}, the "
        f"most that the request may cost; {retry_in(wait_s)}"
    )
    return _about(BudgetExceeded(text, retry_after_s=wait_s, micros=claim.amount), claim)


def too_large(claim: Claim) -> OverQuota:
    """Return the error for a claim above its whole limit."""
    limit, kind, whose = most(claim.limit), claim.limit.kind, _WHOSE[claim.limit.scope]
    if kind in BUDGETS:
        text = (
            f"the request may cost {claim.amount} micro-dollars, more than {whose} budget of {limit} per "
            f"{_period(kind)}; allow fewer output tokens"
        )
        return _about(BudgetExceeded(text, micros=claim.amount), claim)
    text = (
        f"the request needs {claim.amount} {_tokens(kind)}, more than {whose} limit of {limit} per minute; "
        "shorten its prompt"
    )
    return _about(TokenRateExceeded(text, tokens=claim.amount), claim)


def rate_state(limit: Limit, used: int) -> RateState:
    """Return the state of a rate whose bucket contains ``used`` units."""
    unit = REQUEST_UNITS if limit.kind is LimitKind.REQUESTS else TOKEN_UNITS
    rate = most(limit)
    return RateState(rate, max(0, rate - -(-used // unit)), used * 60 / (unit * rate))


def tightest(states: Iterable[RateState]) -> RateState | None:
    """Return the rate with the least room."""
    return min(states, key=lambda state: state.remaining, default=None)


def _stated(
    claim: Claim, rates: Sequence[tuple[Limit, RateState]], kinds: Collection[LimitKind]
) -> RateState | None:
    """Return the rate that rejects the claim, else the one with the least room."""
    own = [state for limit, state in rates if limit == claim.limit and limit.kind in kinds]
    return own[0] if own else tightest(state for limit, state in rates if limit.kind in kinds)


def _about(error: OverQuota, claim: Claim) -> OverQuota:
    limit = claim.limit
    error.metadata |= {"limit": str(most(limit)), "scope": limit.scope.value, "kind": limit.kind.value}
    return error


def _tokens(kind: LimitKind) -> str:
    return kind.value.replace("_", " ")


def _period(kind: LimitKind) -> str:
    return "day" if kind is LimitKind.DAY_MICROS else "month"


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


def encode_claims(reservation: Reservation) -> bytes:
    return msgspec.json.encode(held_by(reservation))


def decode_claims(reservation: Reservation, encoded: bytes) -> Reservation:
    """Return the reservation with the claims of its record."""
    return with_held(reservation, _DECODER.decode(encoded))

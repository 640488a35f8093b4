"""Limits of tenants, keys and end users, what a request claims of them, list prices, and shares of a bound.

Amounts are whole requests, slots, tokens or micro-dollars (millionths of the currency unit).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:  # records, which generations use, contain these types
    from services.core.generation import Usage

PRICED_TOKENS: Final = 1_000_000  # prices are per this many tokens
MICROS: Final = 1_000_000  # micros of a currency unit


WORK: Final = "work"  # the name of a tenant's rate of calls that are no requests, such as counting tokens


class Scope(StrEnum):
    """Who shares a limit: all requests of a tenant, of one of its keys, or of one of its end users."""

    TENANT = "tenant"
    KEY = "key"
    USER = "user"


class LimitKind(StrEnum):
    """What a limit counts. Rates are per minute, budgets per calendar month or day (UTC)."""

    REQUESTS = "requests"
    CONCURRENCY = "concurrency"
    TOKENS = "tokens"  # prompt and output
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    MONTH_MICROS = "month_micros"
    DAY_MICROS = "day_micros"


TOKEN_RATES: Final = (LimitKind.TOKENS, LimitKind.INPUT_TOKENS, LimitKind.OUTPUT_TOKENS)
BUDGETS: Final = (LimitKind.MONTH_MICROS, LimitKind.DAY_MICROS)


class Limit(Struct, frozen=True, gc=False):
    """A limit of one scope of a tenant. ``name``: the key's id, the end user, or of a tenant '' or WORK."""

    kind: LimitKind
    limit: int
    scope: Scope = Scope.TENANT
    name: str = ""


class Claim(Struct, frozen=True, gc=False):
    """What one request takes of a limit: 1 request, 1 slot, its tokens, or its worst-case cost."""

    limit: Limit
    amount: int = 1


@dataclass(frozen=True, slots=True)
class RateState:
    """A rate right after a request was counted against it, or when one was rejected."""

    # Per minute.
    limit: int
    # How many more it has room for at once.
    remaining: int
    # The time until it has room for a whole minute's again.
    reset_s: float

    def later(self, elapsed_s: float) -> RateState:
        """Return the state after a time in which nothing was counted."""
        drained = int(self.limit * elapsed_s / 60)
        return RateState(
            self.limit, min(self.limit, self.remaining + drained), max(0.0, self.reset_s - elapsed_s)
        )


@dataclass(frozen=True, slots=True)
class Price:
    """List price in micro-dollars per million tokens. ``cached``: prompt tokens from the prefix cache."""

    input_micros: int = 0
    cached_micros: int = 0
    output_micros: int = 0

    def times(self, ratio: float) -> Price:
        """Return the price at a share of this one, each rounded to a micro-dollar."""
        return Price(
            *(round(micros * ratio) for micros in (self.input_micros, self.cached_micros, self.output_micros))
        )

    def cost_micros(self, usage: Usage) -> int:
        """Return the cost of a request's tokens, rounded up once, so that no request is free."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        total = (
            (usage.prompt_tokens - cached) * self.input_micros
            + cached * self.cached_micros
            + usage.output_tokens * self.output_micros
        )
        return -(-total // PRICED_TOKENS)


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """The limits of a key, or of each end user of a tenant, as operators set them. 0: no limit."""

    requests_per_minute: int = 0
    max_concurrency: int = 0
    tokens_per_minute: int = 0
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    max_context_tokens: int = 0  # prompt and most output of one request
    max_output_tokens: int = 0  # most output of one choice
    max_timeout_s: float = 0.0

    def within(self, other: UsageLimits) -> bool:
        """Return whether no limit permits more than the same one of ``other``."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(not most or 0 < mine <= most for mine, most in pairs)


def share_of(bound: int) -> int:
    """Return half of the bound, at least 1: the maximum for one tenant or one source."""
    return max(1, bound // 2)

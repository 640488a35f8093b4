"""What a request claims: from its tenant, key, end user and their budgets to limits and claims. Pure.

Rates of tokens are claimed by prediction: renewals and the settlement correct them. Budgets are claimed by
the worst case, so that no use of the request exceeds its claim: the whole prompt at the higher of its two
prices, and the most output of every choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.generation import GenerationSpec
from services.core.limits import PRICED_TOKENS, Claim, Limit, LimitKind, Price, Scope, UsageLimits
from services.core.records import EACH_USER, ApiKey, Budget, Tenant

_Scopes = Sequence[tuple[Scope, str, UsageLimits]]  # each scope with its name and its limits


@dataclass(frozen=True, slots=True)
class RequestBound:
    """The lowest of the limits of all scopes, for one request. 0: none. ``name`` is its name in messages."""

    value: float = 0
    name: str = ""

    def exceeded(self, value: float) -> bool:
        return 0 < self.value < value

    def cap(self, value: int) -> int:
        """Return the value, or the limit if that is lower."""
        return int(self.value) if self.exceeded(value) else value


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of one request: prompt and most output of a choice, most output of a choice, its time."""

    context_tokens: RequestBound = RequestBound()
    output_tokens: RequestBound = RequestBound()
    timeout_s: RequestBound = RequestBound()


NO_BOUNDS: Final = RequestBounds()


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose limits and budgets apply to a request.

    ``user``: the client's name of its end user; empty: none, so that no limits of end users apply.
    ``budgets`` are the tenant's.
    """

    tenant: Tenant
    key: ApiKey
    user: str = ""
    budgets: Sequence[Budget] = ()
    # Limits on requests and slots of all scopes, and on slots alone.
    on_requests: tuple[Limit, ...] = field(init=False, compare=False)
    on_slots: tuple[Limit, ...] = field(init=False, compare=False)
    # Rates of tokens of all scopes.
    token_rates: tuple[Limit, ...] = field(init=False, compare=False)
    # What a request is validated against.
    bounds: RequestBounds = field(init=False, compare=False)

    def __post_init__(self) -> None:
        own = (Scope.TENANT, "", self.tenant.limits), (Scope.KEY, self.key.meta.name, self.key.limits)
        users = ((Scope.USER, self.user, self.tenant.user_limits),) if self.user else ()
        scopes = own + users
        admission = tuple(_admission_limits(scopes))
        object.__setattr__(self, "on_requests", admission)
        on_slots = tuple(limit for limit in admission if limit.kind is LimitKind.CONCURRENCY)
        object.__setattr__(self, "on_slots", on_slots)
        object.__setattr__(self, "token_rates", tuple(_token_rates(scopes)))
        object.__setattr__(self, "bounds", _bounds_of(scopes))


def _admission_limits(scopes: _Scopes) -> Iterator[Limit]:
    for scope, name, limits in scopes:
        if limits.requests_per_minute:
            yield Limit(LimitKind.REQUESTS, limits.requests_per_minute, scope, name)
        if limits.max_concurrency:
            yield Limit(LimitKind.CONCURRENCY, limits.max_concurrency, scope, name)


def _token_rates(scopes: _Scopes) -> Iterator[Limit]:
    for scope, name, limits in scopes:
        for kind, rate in (
            (LimitKind.TOKENS, limits.tokens_per_minute),
            (LimitKind.INPUT_TOKENS, limits.input_tokens_per_minute),
            (LimitKind.OUTPUT_TOKENS, limits.output_tokens_per_minute),
        ):
            if rate:
                yield Limit(kind, rate, scope, name)


def _bounds_of(scopes: _Scopes) -> RequestBounds:
    limits = [(scope, found) for scope, _, found in scopes]
    if not any(
        found.max_context_tokens or found.max_output_tokens or found.max_timeout_s for _, found in limits
    ):
        return NO_BOUNDS
    return RequestBounds(
        _lowest("max_context_tokens", ((scope, found.max_context_tokens) for scope, found in limits)),
        _lowest("max_output_tokens", ((scope, found.max_output_tokens) for scope, found in limits)),
        _lowest("max_timeout", ((scope, found.max_timeout_s) for scope, found in limits)),
    )


def admission_limits(payer: Payer, *, anew: bool) -> tuple[Limit, ...]:
    """Return the limits on requests and slots. ``anew``: it was not counted against the rates before."""
    return payer.on_requests if anew else payer.on_slots


def usage_claims(
    payer: Payer, spec: GenerationSpec, price: Price, predicted_tokens: int
) -> tuple[Claim, ...]:
    """Return the claims on token rates and budgets. ``predicted_tokens`` is a choice's output without its
    limit."""
    prompt_tokens = len(spec.prompt.ids)
    predicted = spec.choices * min(spec.limits.max_tokens, predicted_tokens)
    return claims_of(payer, price, prompt_tokens, predicted, spec.choices * spec.limits.max_tokens)


def claims_of(
    payer: Payer, price: Price, prompt_tokens: int, predicted: int = 0, most: int = 0
) -> tuple[Claim, ...]:
    """Return the claims of a request with so many input tokens, predicted and most output tokens."""
    found: list[Claim] = []
    for limit in payer.token_rates:
        prompt = prompt_tokens if limit.kind is not LimitKind.OUTPUT_TOKENS else 0
        output = predicted if limit.kind is not LimitKind.INPUT_TOKENS else 0
        # A prediction above what a minute admits after the prompt must not reject the request.
        found.append(Claim(limit, max(prompt, min(prompt + output, limit.limit))))
    worst_micros = most_micros(price, prompt_tokens, most)
    if worst_micros:
        found += [Claim(limit, worst_micros) for limit in budget_limits(payer)]
    return tuple(found)


def most_micros(price: Price, prompt_tokens: int, output_tokens: int) -> int:
    """Return the most that a request with up to so many tokens costs, however much of it is cached."""
    prompt_price = max(price.input_micros, price.cached_micros)
    return -(-(prompt_tokens * prompt_price + output_tokens * price.output_micros) // PRICED_TOKENS)


def budget_limits(payer: Payer) -> tuple[Limit, ...]:
    """Return the limits of the budgets that cover a request; of several of one scope the lowest."""
    own_user = any(budget.user == payer.user for budget in payer.budgets)
    lowest: dict[tuple[LimitKind, Scope], Limit] = {}
    for budget in payer.budgets:
        if not _covers(budget, payer, own_user=own_user):
            continue
        for limit in budget.limits(payer.user if budget.user else ""):
            held = lowest.get((limit.kind, limit.scope))
            if held is None or limit.limit < held.limit:
                lowest[limit.kind, limit.scope] = limit
    return tuple(lowest.values())


def _covers(budget: Budget, payer: Payer, *, own_user: bool) -> bool:
    if budget.key:
        return budget.key == payer.key.meta.name
    if not budget.user:
        return True
    return bool(payer.user) and (budget.user == payer.user or (budget.user == EACH_USER and not own_user))


def _lowest(name: str, values: Iterator[tuple[Scope, float]]) -> RequestBound:
    found = min(((value, scope) for scope, value in values if value), default=None)
    return RequestBound() if found is None else RequestBound(found[0], f"{name} of the {found[1].value}")

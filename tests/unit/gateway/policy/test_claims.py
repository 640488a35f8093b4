"""Claims of a request: complete over its scopes, and never below what the request can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.generation import GenerationSpec, OutputLimits, Prompt, Sampling, Usage
from services.core.limits import BUDGETS, Claim, Limit, LimitKind, Price, Scope, UsageLimits
from services.core.records import EACH_USER, ApiKey, Budget, KeyRole, Meta, Tenant
from services.gateway.policy.claims import (
    Payer,
    RequestBound,
    admission_limits,
    budget_limits,
    usage_claims,
)

PRICE = Price(input_micros=500_000, cached_micros=50_000, output_micros=1_500_000)


NONE = UsageLimits()


def payer(
    tenant: UsageLimits = NONE,
    key: UsageLimits = NONE,
    user: UsageLimits = NONE,
    *,
    name: str = "bob",
    budgets: Sequence[Budget] = (),
) -> Payer:
    of_tenant = Tenant(
        Meta("acme"),
        requests_per_minute=tenant.requests_per_minute,
        max_concurrency=tenant.max_concurrency,
        tokens_per_minute=tenant.tokens_per_minute,
        input_tokens_per_minute=tenant.input_tokens_per_minute,
        output_tokens_per_minute=tenant.output_tokens_per_minute,
        max_context_tokens=tenant.max_context_tokens,
        max_output_tokens=tenant.max_output_tokens,
        max_timeout_s=tenant.max_timeout_s,
        user_limits=user,
    )
    return Payer(of_tenant, ApiKey(Meta("ci"), KeyRole.TENANT, "h", "acme", limits=key), name, budgets)


def spec(prompt_tokens: int = 10, max_tokens: int = 100, choices: int = 1) -> GenerationSpec:
    return GenerationSpec(
        "req_1", "chat", "d", 1, Prompt(range(prompt_tokens)), Sampling(7), OutputLimits(max_tokens), choices
    )


def budget(tenant: str = "acme", **fields: object) -> Budget:
    return Budget(Meta("b"), tenant, **{"limit_micros": 1000, **fields})  # type: ignore[arg-type]


def test_requests_and_slots_are_limited_in_every_scope() -> None:
    rates = UsageLimits(requests_per_minute=60, max_concurrency=4)
    found = admission_limits(payer(rates, replace(rates, max_concurrency=2), rates), anew=True)
    assert found == (
        Limit(LimitKind.REQUESTS, 60),
        Limit(LimitKind.CONCURRENCY, 4),
        Limit(LimitKind.REQUESTS, 60, Scope.KEY, "ci"),
        Limit(LimitKind.CONCURRENCY, 2, Scope.KEY, "ci"),
        Limit(LimitKind.REQUESTS, 60, Scope.USER, "bob"),
        Limit(LimitKind.CONCURRENCY, 4, Scope.USER, "bob"),
    )
    resumed = admission_limits(payer(rates, rates, rates), anew=False)
    assert {limit.kind for limit in resumed} == {LimitKind.CONCURRENCY}
    nameless = admission_limits(payer(rates, rates, rates, name=""), anew=True)
    assert Scope.USER not in {limit.scope for limit in nameless}


def test_rates_claim_the_prediction_and_yield_to_what_a_minute_admits() -> None:
    limits = UsageLimits(tokens_per_minute=1000, input_tokens_per_minute=500, output_tokens_per_minute=300)

    def amounts(asked: GenerationSpec, predicted: int) -> list[int]:
        return [claim.amount for claim in usage_claims(payer(limits), asked, PRICE, predicted)]

    assert amounts(spec(10, 100), 40) == [50, 10, 40]
    assert amounts(spec(10, 30, choices=2), 40) == [70, 10, 60]
    assert amounts(spec(10, 2000), 1500) == [1000, 10, 300]
    assert amounts(spec(1200, 10), 40) == [1200, 1200, 10], "a prompt is claimed whole, and then rejected"


def test_a_budget_claims_the_worst_case() -> None:
    claims = usage_claims(payer(budgets=[budget(day_limit_micros=100)]), spec(10, 100, choices=2), PRICE, 1)
    assert claims == (
        Claim(Limit(LimitKind.MONTH_MICROS, 1000), 305),
        Claim(Limit(LimitKind.DAY_MICROS, 100), 305),
    )
    assert usage_claims(payer(budgets=[budget()]), spec(), Price(), 1) == ()


@given(
    price=st.builds(Price, *[st.integers(0, 10**12)] * 3),
    prompt=st.integers(1, 5000),
    longest=st.integers(1, 10_000),
    choices=st.integers(1, 16),
    predicted=st.integers(1, 20_000),
    data=st.data(),
)
def test_no_use_of_a_request_costs_more_than_its_claim(
    price: Price, prompt: int, longest: int, choices: int, predicted: int, data: st.DataObject
) -> None:
    output = data.draw(st.integers(0, longest * choices))
    cached = data.draw(st.integers(0, prompt))
    cost = price.cost_micros(Usage(prompt, output, cached))
    scopes = [budget(), budget(key="ci"), budget(user="bob"), budget(user=EACH_USER, limit_micros=1)]
    claims = usage_claims(payer(budgets=scopes), spec(prompt, longest, choices), price, predicted)
    assert {claim.limit.kind for claim in claims} <= set(BUDGETS)
    assert all(claim.amount >= cost for claim in claims)
    assert len(claims) == 3 or cost == 0


def test_budgets_cover_their_scope_only() -> None:
    others = [budget(key="other"), budget(user="eve")]
    assert budget_limits(payer(budgets=others)) == ()
    assert budget_limits(payer(name="", budgets=[budget(user=EACH_USER)])) == ()
    assert budget_limits(payer(budgets=[budget(user=EACH_USER)])) == (
        Limit(LimitKind.MONTH_MICROS, 1000, Scope.USER, "bob"),
    )
    own = [budget(user=EACH_USER, limit_micros=5), budget(user="bob", limit_micros=2000)]
    assert budget_limits(payer(budgets=own)) == (Limit(LimitKind.MONTH_MICROS, 2000, Scope.USER, "bob"),)


def test_the_lowest_budget_of_a_scope_holds() -> None:
    found = budget_limits(payer(budgets=[budget(limit_micros=7), budget(limit_micros=5), budget(key="ci")]))
    assert [(limit.scope, limit.limit) for limit in found] == [(Scope.TENANT, 5), (Scope.KEY, 1000)]


@pytest.mark.parametrize(
    ("tenant", "key", "user", "expected"),
    [
        (0, 0, 0, RequestBound()),
        (100, 0, 0, RequestBound(100, "max_output_tokens of the tenant")),
        (100, 50, 70, RequestBound(50, "max_output_tokens of the key")),
        (100, 50, 20, RequestBound(20, "max_output_tokens of the user")),
    ],
)
def test_the_lowest_bound_holds_and_is_named(
    tenant: int, key: int, user: int, expected: RequestBound
) -> None:
    found = payer(*(UsageLimits(max_output_tokens=most) for most in (tenant, key, user))).bounds
    assert found.output_tokens == expected
    assert found.context_tokens == found.timeout_s == RequestBound()

"""Each kind of limit without the shared store: open to the gateway's share, or closed."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from services.adapters.quotas.gateway_limiter import GatewayLimiter, LimiterTelemetry
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, TokenRateExceeded, Unavailable
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Scope
from services.ports.limiter import NO_PRICE
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics

CLOCK = SystemClock()
TOKENS = Limit(LimitKind.TOKENS, 1000)
MONTH = Limit(LimitKind.MONTH_MICROS, 1000)


class Cut:
    """A gateway of four that cannot reach its Redis, and what its limits decided."""

    def __init__(self, closed: Collection[LimitKind] = ()) -> None:
        self._metrics = Metrics()
        self.shared = RedisLimiter("redis://127.0.0.1:1/0", CLOCK)
        self.limiter = GatewayLimiter(
            self.shared,
            CLOCK,
            gateways=lambda: 4,
            closed=closed,
            telemetry=LimiterTelemetry(self._metrics),
        )

    @property
    def decided(self) -> dict[tuple[LimitKind, bool], int]:
        """How many limits of a kind were decided without Redis, by whether they were open."""
        samples = (sample for metric in self._metrics.collect() for sample in metric.samples)
        return {
            (LimitKind(sample.labels["kind"]), sample.labels["policy"] == "open"): int(sample.value)
            for sample in samples
            if sample.name == "fairway_limiter_outage_decisions_total"
        }


async def test_rates_and_slots_are_open_to_a_share() -> None:
    cut = Cut()
    slots = [Limit(LimitKind.CONCURRENCY, 8, Scope.KEY, "k"), Limit(LimitKind.REQUESTS, 100)]
    held = [await cut.limiter.admit("t", f"r{number}", slots) for number in range(2)]
    with pytest.raises(ConcurrencyExceeded):
        await cut.limiter.admit("t", "r2", slots)
    assert [await cut.limiter.reserve(held[0], [Claim(TOKENS, 200)], NO_PRICE)] == held[:1]
    with pytest.raises(TokenRateExceeded):
        await cut.limiter.reserve(held[1], [Claim(TOKENS, 100)], NO_PRICE)
    for each in held:
        await cut.limiter.settle(each, Usage(1, 1))
    assert (await cut.limiter.admit("t", "r3", slots)).local, "the slots are free"
    assert cut.decided == {
        (LimitKind.CONCURRENCY, True): 4,
        (LimitKind.REQUESTS, True): 4,
        (LimitKind.TOKENS, True): 2,
    }
    await cut.shared.close()


async def test_a_long_prompt_is_not_refused_for_good_by_a_share() -> None:
    cut = Cut()
    held = await cut.limiter.admit("t", "r", ())
    await cut.limiter.reserve(held, [Claim(TOKENS, 900)], NO_PRICE)
    with pytest.raises(TokenRateExceeded) as caught:
        await cut.limiter.reserve(held, [Claim(TOKENS, 900)], NO_PRICE)
    assert caught.value.retry_after_s
    await cut.shared.close()


async def test_budgets_are_closed() -> None:
    cut = Cut()
    held = await cut.limiter.admit("t", "r", ())
    with pytest.raises(Unavailable, match="the budget cannot be checked") as caught:
        await cut.limiter.reserve(held, [Claim(TOKENS, 10), Claim(MONTH, 10)], NO_PRICE)
    assert caught.value.retry_after_s
    assert caught.value.metadata["kind"] == "month_micros"
    assert cut.decided == {(LimitKind.MONTH_MICROS, False): 1}
    await cut.limiter.reserve(held, [Claim(Limit(LimitKind.MONTH_MICROS, 0), 10)], NO_PRICE)
    await cut.shared.close()


@pytest.mark.parametrize("kind", [LimitKind.REQUESTS, LimitKind.CONCURRENCY, *TOKEN_RATES])
async def test_a_kind_is_closed_where_the_operator_wants_it(kind: LimitKind) -> None:
    cut = Cut(closed=[kind])
    limit = Limit(kind, 5)
    with pytest.raises(Unavailable, match="cannot be checked while the quota store is away"):
        if kind in TOKEN_RATES:
            held = await cut.limiter.admit("t", "r", ())
            await cut.limiter.reserve(held, [Claim(limit, 1)], NO_PRICE)
        else:
            await cut.limiter.admit("t", "r", [limit])
    assert cut.decided == {(kind, False): 1}
    await cut.limiter.admit("other", "r", [Limit(kind, 0)])
    await cut.shared.close()

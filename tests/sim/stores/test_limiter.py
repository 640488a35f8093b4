"""The limits' arithmetic against an exact model, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import ConcurrencyExceeded, RequestRateExceeded
from services.core.generation import Usage
from services.ports.limiter import Reservation
from simulator.stores.limiter import MemoryLimiter
from tests.support.metered import limits


class TurnedClock:
    def __init__(self) -> None:
        self.now_us = 1_000_000_000

    def monotonic_s(self) -> float:
        return self.now_us / 1e6

    def unix_s(self) -> float:
        return self.now_us / 1e6

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a limiter does not sleep")


@settings(max_examples=150, deadline=None)
@given(
    rate=st.integers(1, 70),
    pauses_us=st.lists(st.integers(0, 3_000_000) | st.just(0) | st.integers(0, 90_000_000), max_size=120),
)
def test_a_request_is_let_in_exactly_when_there_is_room(rate: int, pauses_us: list[int]) -> None:
    """The model is a bucket of ``rate`` requests that drains ``rate`` a minute, in exact fractions."""

    async def scenario() -> None:
        clock = TurnedClock()
        limiter = MemoryLimiter(clock)
        used = Fraction(0)
        for number, pause_us in enumerate(pauses_us):
            clock.now_us += pause_us
            used = max(Fraction(0), used - Fraction(pause_us * rate, 60_000_000))
            try:
                held = await limiter.admit("t", f"r{number}", limits(rate))
            except RequestRateExceeded as error:
                exact_us = (used + 1 - rate) * 60_000_000 / rate
                assert exact_us > 0, "a false rejection"
                assert round((error.retry_after_s or 0) * 1e6) == -(-exact_us // 1)  # noqa: PT017
            else:
                used += 1
                assert used <= rate, "let in over the limit"
                await limiter.settle(held, Usage(1, 1))

    asyncio.run(scenario())


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["admit", "settle", "renew", "wait"]), st.integers(0, 5)), max_size=80
    )
)
def test_slots_are_held_by_exactly_those_that_run(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        clock = TurnedClock()
        limiter = MemoryLimiter(clock, lease_s=10.0)
        deadlines: dict[str, int] = {}
        known: set[str] = set()
        for kind, number in steps:
            name = f"r{number}"
            deadlines = {n: d for n, d in deadlines.items() if d > clock.now_us}
            if kind == "wait":
                clock.now_us += number * 2_500_000
            elif kind == "settle":
                await limiter.settle(Reservation("t", name), Usage(1, 1))
                deadlines.pop(name, None)
                known.discard(name)
            elif kind == "renew" and name in known:
                await limiter.renew([(Reservation("t", name), Usage(0, 0))])
                deadlines[name] = clock.now_us + 10_000_000
            elif kind == "admit":
                room = name in deadlines or len(deadlines) < 3
                try:
                    await limiter.admit("t", name, limits(slots=3))
                except ConcurrencyExceeded:
                    assert not room, "a false rejection"
                else:
                    assert room, "let in over the limit"
                    deadlines[name] = clock.now_us + 10_000_000
                    known.add(name)
            live = [n for n, deadline in deadlines.items() if deadline > clock.now_us]
            assert await limiter.concurrency("t") == len(live)

    asyncio.run(scenario())

"""Decisions on leased rates per second of a core, with the exact limiter on Redis behind it.

One hot tenant with a rate of requests. A decision is the admission of a request, and its settlement. The time
is the processor time of this process, which includes the refills.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.generation import Usage
from services.core.limits import Limit, LimitKind
from services.runtime.clock import SystemClock

ROUNDS: Final = 5
DECISIONS: Final = 200_000
WARM_CALLERS: Final = 64
WARM_DECISIONS: Final = 200  # of each caller
LIMITS: Final = (Limit(LimitKind.REQUESTS, 100_000_000),)
USED: Final = Usage(300, 150)


async def leased_decisions(port: int) -> dict[str, list[float]]:
    """Return ``leased_per_s_per_core``; a line per round is printed."""
    clock = SystemClock()
    inner = RedisLimiter(f"redis://127.0.0.1:{port}", clock)
    limiter = GatewayLimiter(inner, clock)
    rates: list[float] = []

    async def decide(name: str, decisions: int) -> None:
        for request in range(decisions):
            held = await limiter.admit("hot", f"{name}-{request}", LIMITS)
            await limiter.settle(held, USED)

    try:
        await asyncio.gather(*(decide(f"warm-{caller}", WARM_DECISIONS) for caller in range(WARM_CALLERS)))
        for number in range(1, ROUNDS + 1):
            began_s = time.process_time()
            await decide(str(number), DECISIONS)
            rates.append(DECISIONS / (time.process_time() - began_s))
            print(f"leased, round {number} of {ROUNDS}: {rates[-1]:.0f} decisions/s of a core", flush=True)
    finally:
        await inner.close()
    return {"leased_per_s_per_core": rates}

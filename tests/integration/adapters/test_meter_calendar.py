"""The calendar of budgets in Redis scripts is Python's: months and days of four centuries."""

from __future__ import annotations

from random import Random

import redis

from services.adapters.redis.scripts import Script
from services.core.limits import BUDGETS
from simulator.stores.limiter import period_end_s, period_of

DAY_S = 86_400


def test_periods_and_their_ends_are_those_of_the_calendar(redis_url: str) -> None:
    text = (
        Script.of(("common", "meters")).text
        + """
local found = {}
for i, s in ipairs(ARGV) do
  for j, kind in ipairs({'month_micros', 'day_micros'}) do
    local us = tonumber(s) * 1000000
    found[#found + 1] = {period_of(kind, us), period_end_us(kind, us) / 1000000}
  end
end
return found
"""
    )
    rng = Random(1)
    times = [rng.randrange(400 * 365 * DAY_S) for _ in range(1000)]
    edges = [951_782_400, 4_107_542_400, 1_709_164_800, 1_735_689_600]  # 29 February, 1 March 2100, new year
    times += [edge + step for edge in edges for step in (-1, 0, DAY_S - 1, DAY_S)]
    with redis.Redis.from_url(redis_url) as client:
        found = client.eval(text, 0, *times)
    expected = [[period_of(kind, at), int(period_end_s(kind, at))] for at in times for kind in BUDGETS]
    assert found == expected

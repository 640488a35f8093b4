"""Each rule of the queue pays: what it prevents happens as soon as the list lacks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.queue.rules import (
    PRODUCTION,
    BypassLimit,
    BypassWindow,
    HeldShare,
    LongPromptShare,
    QueueDiscipline,
    QueueRule,
)
from tests.unit.scheduler.model import BLOCK
from tests.unit.scheduler.queue_rig import Rig

ORDER = OrderPolicy(max_bypasses=4, lookahead=64)


def without(rule: type[QueueRule]) -> QueueDiscipline:
    return replace(PRODUCTION, rules=tuple(each for each in PRODUCTION.rules if each is not rule))


def rounds_until_started(discipline: QueueDiscipline) -> int:
    """Return after how many rounds a large placement starts beside small ones of its tenant; 200 for none."""
    rig = Rig(10, order=ORDER, discipline=discipline)
    for _ in range(10):
        rig.ask(1)
    rig.turn()
    large = rig.ask(10)
    for number in range(200):
        rig.ask(1)
        rig.free(0, min(1, rig.reserved[0]))
        if large in rig.turn():
            return number
    return 200


def test_without_the_bypass_limit_a_large_placement_starves() -> None:
    assert rounds_until_started(PRODUCTION) < 20
    assert rounds_until_started(without(BypassLimit)) == 200


@pytest.mark.parametrize(("discipline", "passed"), [(PRODUCTION, 3), (without(BypassWindow), 10)])
def test_without_the_bypass_window_a_tenant_gets_ahead_by_all_the_room(
    discipline: QueueDiscipline, passed: int
) -> None:
    order = replace(ORDER, max_bypasses=100, bypass_window_tokens=3 * BLOCK)
    rig = Rig(20, order=order, discipline=discipline)
    rig.ask(10, tenant="large")
    rig.turn()
    rig.ask(20, tenant="large")
    for _ in range(30):
        rig.ask(1, tenant="small")
    assert len(rig.turn()) == passed


LONG = 260  # blocks of a long prompt


@pytest.mark.parametrize(("discipline", "started"), [(PRODUCTION, 2), (without(LongPromptShare), 3)])
def test_without_their_share_the_long_prompts_of_a_tenant_fill_the_pool(
    discipline: QueueDiscipline, started: int
) -> None:
    """The workers hold four such prompts; two are half of the pool."""
    rig = Rig(2 * LONG, 2 * LONG, limits=QueueLimits(), order=ORDER, discipline=discipline)
    for _ in range(3):
        rig.ask(LONG - 1)
    assert len(rig.turn()) == started


def test_without_held_shares_a_standing_queue_takes_all_room_at_once() -> None:
    def granted(discipline: QueueDiscipline) -> int:
        rig = Rig(10_000, 10_000, order=ORDER, discipline=discipline)
        rig.ask(1, tenant="minnow")
        rig.turn()
        asked = [rig.ask(50, tenant="whale") for _ in range(60)]
        found = rig.turn()
        return sum(number in found for number in asked)

    assert 2 <= granted(PRODUCTION) < granted(without(HeldShare))

"""Alerts are sent when they change and again each minute, by the leader alone, less often after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from services.controlplane.alert_sender import MAX_BACKOFF_S, RESEND_S, AlertSender, alert_posts
from services.controlplane.policy.paging import AlertBook, PagedAlert
from services.core.errors import Unavailable
from services.runtime.telemetry.metrics import Metrics
from tests.support.clocks import HandClock

ALERT = PagedAlert((("alertname", "A"),))


class Rig:
    """A sender on a clock that its sleeps move. The Alertmanager fails while ``failing``."""

    def __init__(self) -> None:
        self.clock, self.book, self.metrics = HandClock(), AlertBook(), Metrics()
        self.leads, self.failing = True, False
        self.calls: list[float] = []  # times of calls
        self.taken: list[Sequence[dict[str, Any]]] = []
        posts = alert_posts(self.metrics)
        self.sender = AlertSender(self.book, self.post, self.clock, leads=lambda: self.leads, posts=posts)

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        self.calls.append(self.clock.now_s)
        if self.failing:
            raise Unavailable("http://a/: it answers 400")
        self.taken.append(alerts)

    async def pass_s(self, seconds: float) -> None:
        """Run the sender for that long."""
        until_s = self.clock.now_s + seconds
        task = asyncio.ensure_future(self.sender.run())
        while self.clock.now_s < until_s:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_change_is_sent_at_once_and_all_again_each_minute() -> None:
    rig = Rig()
    rig.book.replace("x", [ALERT])
    await rig.pass_s(2 * RESEND_S + 10)
    gaps = [later - before for before, later in zip(rig.calls, rig.calls[1:], strict=False)]
    assert gaps == [RESEND_S, RESEND_S]
    assert all(len(alerts) == 1 for alerts in rig.taken)


async def test_nothing_is_sent_without_alerts_or_without_leading() -> None:
    rig = Rig()
    await rig.pass_s(200.0)
    assert rig.calls == []
    rig.leads = False
    rig.book.replace("x", [ALERT])
    await rig.pass_s(200.0)
    assert rig.calls == []
    rig.leads = True
    await rig.pass_s(200.0)
    assert rig.calls == [], "what was found in the term before is not this leader's"


async def test_after_failures_the_present_state_is_sent_with_growing_pauses() -> None:
    rig = Rig()
    rig.failing = True
    rig.book.replace("x", [ALERT])
    await rig.pass_s(1100 * MAX_BACKOFF_S)  # more failures than a power of two has a float for
    gaps = [later - before for before, later in zip(rig.calls, rig.calls[1:], strict=False)]
    assert gaps[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(gaps[5:]) == {MAX_BACKOFF_S}
    assert "http://a/" in rig.sender.problem()
    rig.failing = False
    other = PagedAlert((("alertname", "B"),))
    rig.book.replace("x", [other])
    await rig.pass_s(30.0)
    assert [[one["labels"]["alertname"] for one in alerts] for alerts in rig.taken] == [["B", "A"]]
    assert rig.sender.problem() == ""


async def test_many_alerts_are_sent_in_several_calls() -> None:
    rig = Rig()
    rig.book.replace("x", [PagedAlert((("alertname", f"A{number}"),)) for number in range(150)])
    await rig.pass_s(5.0)
    assert [len(alerts) for alerts in rig.taken] == [64, 64, 22]

"""What the scheduler tells of its queue and of itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
from prometheus_client import generate_latest

from services.core.records import Priority
from services.runtime.telemetry.metrics import Metrics
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term
from services.scheduler.term_streams import CancelPlacements, SubmitPlacements
from tests.support.election import StaticElection
from tests.support.metrics import values
from tests.support.waiting import until
from tests.unit.scheduler.model import DIGEST, SETTINGS, ManualClock, place_spec
from tests.unit.scheduler.queue_rig import Rig

OTHER = "sha256:" + "e" * 64
DEPTH = "fairway_scheduler_queue_placements"
WAIT = "fairway_scheduler_queue_wait_seconds"


def test_placements_are_counted_by_their_end_and_timed_from_their_entry() -> None:
    rig = Rig(10)
    rig.ask(10)
    rig.turn()
    rig.ask(5, priority=Priority.INTERACTIVE)
    waiting = rig.ask(5, ttl=2.0)
    gone = rig.ask(5)
    rig.turn()
    standard = ("model", "tiny"), ("priority", "standard")
    urgent = ("model", "tiny"), ("priority", "interactive")
    assert rig.counted(DEPTH) == {standard: 2.0, urgent: 1.0}
    rig.now_s += 1.5
    rig.queue.cancel(1, gone, rig.now_s)
    rig.free(0, 5)
    rig.turn()
    rig.now_s += 1.5
    rig.report(0)
    assert list(rig.turn()) == [waiting]
    assert rig.counted(DEPTH) == {standard: 0.0, urgent: 0.0}
    assert rig.counted("fairway_scheduler_placements_total") == {
        (("model", "tiny"), ("outcome", "GRANTED")): 2.0,
        (("model", "tiny"), ("outcome", "WITHDRAWN")): 1.0,
        (("model", "tiny"), ("outcome", "QUEUE_TIMEOUT")): 1.0,
    }
    assert rig.counted(f"{WAIT}_sum") == {
        (("outcome", "GRANTED"), ("priority", "standard")): 0.0,
        (("outcome", "GRANTED"), ("priority", "interactive")): pytest.approx(1.5),
        (("outcome", "WITHDRAWN"), ("priority", "standard")): pytest.approx(1.5),
        (("outcome", "QUEUE_TIMEOUT"), ("priority", "standard")): pytest.approx(3.0),
    }


def test_what_waited_is_gone_with_the_term() -> None:
    rig = Rig(1)
    rig.ask(1)
    rig.telemetry.term_ended()
    assert rig.counted(DEPTH) == {}


async def test_a_standby_serves_and_a_leader_that_decides_nothing_does_not() -> None:
    clock, election, metrics = ManualClock(), StaticElection(), Metrics()
    service = SchedulerService(
        b"k" * 32, SETTINGS, clock, Random(1), telemetry=SchedulerTelemetry(metrics, clock)
    )
    clock.now_s += 60.0
    assert service.problem() == "", "a standby decides nothing, and is asked nothing"
    task = asyncio.ensure_future(service.run(election))
    try:
        election.turn(7)
        await until(lambda: service.term is not None)
        assert service.term is not None
        clock.now_s += 60.0
        assert service.problem() == "", "nothing waits"
        term = service.term
        session = term.streams.open_session("gateway", lambda: None)
        term.streams.send(SubmitPlacements(session, [(1, place_spec(), round(clock.now_s * 1e6))]))
        assert service.problem() == ""
        clock.now_s += 3.0  # the loop does not turn meanwhile: there is no await here
        assert service.problem() == "no decision for 3.0 s"
        levels = generate_latest(metrics.registry).decode()
        assert values(levels, "fairway_scheduler_inbox_commands") == {(): 1.0}
        assert values(levels, "fairway_scheduler_gateways") == {(): 1.0}
    finally:
        task.cancel()
        await asyncio.wait({task})


def test_how_far_tenants_that_wait_are_apart_is_told_by_model_and_class() -> None:
    name = "fairway_scheduler_counter_gap_tokens"
    clock, metrics = ManualClock(), Metrics()
    telemetry = SchedulerTelemetry(metrics, clock)
    term = Term(1, SETTINGS, clock, Random(1), telemetry=telemetry)
    telemetry.term_started(term)

    def told() -> dict[tuple[tuple[str, str], ...], float]:
        return values(generate_latest(metrics.registry).decode(), name)

    assert told() == {}
    session = term.streams.open_session("gateway", lambda: None)
    for number, (tenant, digest) in enumerate([("a", DIGEST), ("b", DIGEST), ("a", OTHER), ("b", OTHER)]):
        spec = replace(place_spec(digest=digest, tenant=tenant), request_id=f"req_{number}")
        term.streams.send(SubmitPlacements(session, [(number, spec, round(clock.now_s * 1e6))]))
    term.step()
    for digest, tokens in ((DIGEST, 300.0), (OTHER, 500.0)):
        term.queue.ledger.shares(digest)[Priority.STANDARD].charge("b", tokens, "w0")
    standard = ("model", "tiny"), ("priority", "standard")
    assert told()[standard] == 500.0, "the widest of its versions"
    term.streams.send(CancelPlacements(session, (3,)))
    term.step()
    assert told()[standard] == 300.0, "one that does not wait is owed nothing"
    assert max(gap for key, gap in told().items() if key != standard) == 0.0

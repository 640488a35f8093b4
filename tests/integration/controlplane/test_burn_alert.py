"""Indicators that burn an error budget, from the gateway's report to the pager and the rollback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import generate_latest

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import slis_pb2
from services.adapters.memory.store import MemoryStore
from services.controlplane.event_log import EventRecorder, event_of
from services.controlplane.fleet import FleetRecord, decode
from services.controlplane.objectives.alerts import ObjectiveAlerts
from services.controlplane.objectives.servicer import SliServicer
from services.controlplane.objectives.store import SliStore
from services.controlplane.reconciler import Reconciler
from services.controlplane.resources.objectives import Objectives
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.telemetry import AlertTelemetry
from services.core.arms import SliReport, SliSums
from services.core.errors import FailedPrecondition
from services.core.records import EVENTS, OBJECTIVES, ROOT, Leader, Objective, dump, leader_key, load
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.ports.store import Entry
from services.rpc.convert.slis import report_to_proto
from services.runtime.fleet_state.indexes import ObjectiveIndex
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.telemetry.metrics import Metrics
from tests.integration.controlplane.plane import Plane
from tests.integration.controlplane.test_objectives import create as create_objective
from tests.integration.rollouts.fleet import NAME, NEW, OLD, RecordedFleet
from tests.support.memory_ledger import MemoryLedger
from tests.support.promql import Scrapes, evaluate
from tests.support.slis import key_of
from tests.support.waiting import until
from tests.unit.deploy.test_rules import RULES

KEY = leader_key("controlplane")


def _objective(entry: Entry) -> Objective:
    return load(entry.value, Objective)


@dataclass
class Leading:
    """What a leading control plane runs, beside the calls of operators."""

    plane: Plane
    metrics: Metrics = field(default_factory=Metrics)
    sent: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        store, clock = self.plane.store, self.plane.clock
        informer: Informer[FleetRecord | None] = Informer(store, ROOT, decode, clock)
        promised: Informer[Objective] = Informer(store, OBJECTIVES, _objective, clock)
        election = Election(store, KEY, dump(Leader("p", "")), 60, clock)
        index = ObjectiveIndex(promised)
        self.slis = SliStore(MemoryLedger(), clock, election, lambda: index.by_class)
        recorder = EventRecorder(store, clock)
        self.alerts = ObjectiveAlerts(
            store,
            Objectives(store, clock),
            self.slis,
            election,
            clock,
            events=recorder,
            telemetry=AlertTelemetry(self.metrics, leads=lambda: election.epoch is not None),
        )
        self.election = election
        fleet = RecordedFleet(store)
        await fleet.begin()
        loops = [
            informer.run(),
            promised.run(),
            election.run(),
            self.slis.run(),
            fleet.run(),
            Reconciler(store, informer, election, clock, events=recorder).run(),
            RolloutController(store, informer, election, clock, slis=self.slis).run(),
        ]
        tasks = [asyncio.ensure_future(one) for one in loops]
        try:
            await until(lambda: self.slis.leads)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def report(self, digest: str, requests: int, errors: int) -> None:
        """Send what a gateway measured of a version, as it does."""
        self.sent += 1
        sums = SliSums(requests=requests, errors=errors, started=requests - errors)
        report = SliReport(self.plane.clock.unix_s(), {key_of(NAME, digest): sums}, {})
        request = slis_pb2.ReportSlisRequest(
            source="g", first=self.sent, oldest=1, reports=[report_to_proto(report)]
        )
        context: Any = None
        answer = await SliServicer(self.slis).ReportSlis(request, context)
        assert answer.last == self.sent

    def pages(self) -> bool:
        scrapes = Scrapes()
        text = generate_latest(self.metrics.registry).decode()
        scrapes.add(text, 15.0, job="controlplane", instance="c")
        return bool(evaluate(RULES["FairwayObjectiveBurnsFast"], scrapes))

    async def check(self) -> None:
        """Look at the objectives, as the alerts do every few seconds."""
        assert self.election.epoch is not None
        await self.alerts.check(self.election.epoch)


def canary() -> pb.Rollout:
    """Return a rollout whose gate counts nothing that burns."""
    found = pb.Rollout(
        metadata=pb.Metadata(name="r"),
        deployment=NAME,
        arms=[pb.RolloutArm(name="canary", version=NEW)],
        gate=pb.RolloutGate(metrics=["cost"]),
    )
    found.steps.add(weight_ratio=0.5).hold.FromSeconds(600)
    return found


def green(strategy: pb.RolloutStrategy.ValueType) -> pb.Rollout:
    """Return one that moves all traffic, without a wait for a baseline."""
    found = canary()
    del found.steps[:]
    found.strategy = strategy
    found.soak.FromSeconds(600)
    found.gate.patience.FromSeconds(1)
    return found


ROLLOUTS = {
    "canary": (canary(), pb.ROLLOUT_PHASE_RUNNING, 5_000),
    "blue/green": (green(pb.ROLLOUT_STRATEGY_BLUE_GREEN), pb.ROLLOUT_PHASE_SOAKING, 10_000),
    "instant": (green(pb.ROLLOUT_STRATEGY_INSTANT), pb.ROLLOUT_PHASE_SOAKING, 10_000),
}


async def state(plane: Plane) -> pb.Rollout:
    answer = await plane.call("GetRollout", pb.GetRolloutRequest(name="r"))
    assert isinstance(answer, pb.GetRolloutResponse)
    return answer.rollout


async def weight_bp(store: MemoryStore) -> int:
    """Return the candidate's weight now."""
    entry = await store.get(ROUTES + NAME)
    arms = () if entry is None else load(entry.value, ModelRoute).arms
    return sum(arm.weight_bp for arm in arms if arm.version_digest == NEW)


async def started(plane: Plane, kind: str) -> None:
    """Start a rollout once the stable version is READY, and wait until the candidate has traffic."""
    rollout, phase, weight = ROLLOUTS[kind]

    async def starts() -> bool:
        try:
            await plane.call("CreateRollout", pb.CreateRolloutRequest(rollout=rollout, request_id="once"))
        except FailedPrecondition:
            return False
        return True

    await eventually(starts)
    await eventually(lambda: has_phase(plane, phase))
    assert await weight_bp(plane.store) == weight


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30.0):
        while not await holds():
            await asyncio.sleep(0.02)


async def has_phase(plane: Plane, phase: pb.RolloutPhase.ValueType) -> bool:
    return (await state(plane)).phase == phase


async def reasons(plane: Plane) -> list[str]:
    events = [event_of(entry) for entry in (await plane.store.list(EVENTS)).entries]
    return [event.record.reason for event in events if event is not None and "BURN" in event.record.reason]


@pytest.mark.parametrize("kind", ROLLOUTS)
async def test_a_candidate_that_burns_a_budget_is_rolled_back_and_pages(plane: Plane, kind: str) -> None:
    leading = Leading(plane)
    async with leading.running():
        await create_objective(plane, model=NAME, availability=0.999)
        await started(plane, kind)
        await leading.report(OLD, 100, 0)
        await leading.report(NEW, 100, 0)
        await leading.check()
        assert not leading.pages()
        assert await weight_bp(plane.store), "nothing burns"
        await leading.report(NEW, 40, 10)
        await leading.check()
        await eventually(lambda: has_phase(plane, pb.ROLLOUT_PHASE_ABORTED))
        found = await state(plane)
        whats = [(one.what, one.arm) for one in found.history]
        assert whats[-2:] == [("BURN_RATE", "canary"), ("ABORTED", "")]
        assert "availability of standard" in found.history[-2].message
        assert await weight_bp(plane.store) == 0
        assert await reasons(plane) == ["AVAILABILITY_BURN_ACUTE"]
        assert leading.pages()


async def test_what_the_stable_version_burns_too_rolls_nothing_back_and_pages(plane: Plane) -> None:
    leading = Leading(plane)
    async with leading.running():
        await create_objective(plane, model=NAME, availability=0.999)
        await started(plane, "canary")
        await leading.report(OLD, 40, 10)
        await leading.report(NEW, 40, 10)
        await leading.check()
        await asyncio.sleep(1.0)  # four rounds
        assert await weight_bp(plane.store) == 5_000
        assert leading.pages()

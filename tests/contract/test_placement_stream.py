"""What a gateway's stream at the scheduler does without a wire."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from services.core.errors import Conflict, NoLeader, NoWorkerAvailable, PermissionDenied
from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotReturn
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import PlaceSpec
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.scheduler.service import GatewayPlacementStream, SchedulerService
from services.scheduler.slots.leases import LeaseTerms
from tests.integration.scheduler_fleet import DIGEST, SchedulerNode, place_spec
from tests.support.waiting import until


@dataclass
class Rig:
    """A scheduler without workers: every placement ends refused or waits."""

    node: SchedulerNode
    woken: list[str] = field(default_factory=list)

    @property
    def streams(self) -> SchedulerService:
        return self.node.service

    def open(self, gateway_id: str = "g1") -> GatewayPlacementStream:
        return self.streams.open(gateway_id, lambda: self.woken.append(gateway_id))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    supervisor = Supervisor(SystemClock())
    node = SchedulerNode(supervisor)
    await node.start()
    yield Rig(node)
    await node.stop()
    await supervisor.close()


async def leading(rig: Rig, epoch: int = 7) -> None:
    rig.node.election.turn(epoch)
    await until(lambda: rig.node.service.term is not None and rig.node.service.term.epoch == epoch)


def forged(**changes: object) -> PlaceSpec:
    return replace(place_spec(), ticket=b"x" * 60, **changes)  # type: ignore[arg-type]


async def test_nothing_opens_while_nobody_leads(rig: Rig) -> None:
    with pytest.raises(NoLeader) as caught:
        rig.open()
    assert caught.value.retry_after_s


async def test_a_stream_belongs_to_its_term(rig: Rig) -> None:
    await leading(rig, 7)
    stream = rig.open()
    assert stream.epoch == 7
    assert stream.take() is None, "nothing ended yet"
    rig.node.election.turn(8)
    await until(lambda: rig.woken)
    with pytest.raises(NoLeader):
        stream.take()
    with pytest.raises(NoLeader):
        stream.submit([(1, place_spec())])
    stream.close()
    await leading(rig, 8)
    assert rig.open().epoch == 8


async def test_each_placement_ends_in_one_outcome(rig: Rig) -> None:
    await leading(rig)
    stream = rig.open()
    stream.submit([(number, forged()) for number in range(5)])
    await until(lambda: rig.woken)
    frame = stream.take()
    assert frame is not None
    assert frame.epoch == 7
    assert sorted(outcome.placement_id for outcome in frame.outcomes) == list(range(5))
    assert all(isinstance(outcome.error, PermissionDenied) for outcome in frame.outcomes)  # type: ignore[union-attr]
    assert stream.take() is None, "an outcome is told once"


async def test_a_version_that_nobody_runs_is_refused(rig: Rig) -> None:
    await leading(rig)
    stream = rig.open()
    stream.submit([(1, place_spec())])
    outcomes: list[object] = []

    def took() -> bool:
        frame = stream.take()
        outcomes.extend(frame.outcomes if frame is not None else ())
        return bool(outcomes)

    await until(took)
    (outcome,) = outcomes
    assert isinstance(outcome.error, NoWorkerAvailable)  # type: ignore[attr-defined]


async def test_cancelling_what_is_unknown_or_over_is_ignored(rig: Rig) -> None:
    await leading(rig)
    stream = rig.open()
    stream.cancel([])
    stream.cancel([1, 2, 3])
    stream.submit([(4, forged())])
    stream.cancel([4])
    stream.cancel([4])
    stream.submit([(5, forged())])
    await until(lambda: rig.woken)


async def test_a_second_stream_of_one_gateway_ends_the_first(rig: Rig) -> None:
    await leading(rig)
    first = rig.open()
    second = rig.open()
    with pytest.raises(Conflict):
        first.take()
    assert second.take() is None
    other = rig.open("g2")
    assert second.take() is None
    first.close()
    first.close()
    assert second.take() is None, "the end of the old one leaves the new one alone"
    other.close()


async def test_a_closed_stream_is_woken_no_more(rig: Rig) -> None:
    await leading(rig)
    stream, other = rig.open(), rig.open("g2")
    stream.submit([(1, place_spec())])
    stream.close()
    stream.close()
    rig.woken.clear()
    other.submit([(1, forged())])
    await until(lambda: rig.woken)
    assert set(rig.woken) == {"g2"}


async def test_leases_follow_the_demand_until_it_ends(rig: Rig) -> None:
    await leading(rig)
    worker = rig.node.service.open_report(lambda: None)
    report = ReportSnapshot("w1", 3, "h:1", pools=(row_pool(8),), epoch=7)
    worker.report(1, report)
    stream = rig.open()
    stream.demand([SlotDemand(DIGEST, "acme", 3)], [])
    leases: list[SlotLease] = []

    def took() -> bool:
        frame = stream.take()
        leases.extend(frame.leases if frame is not None else ())
        return bool(leases)

    await until(took)
    (lease,) = leases
    assert (lease.worker_id, lease.incarnation, lease.epoch, lease.tenant) == ("w1", 3, 7, "acme")
    assert lease.slots == 6, "twice the demand, while nobody else wants any"

    leases.clear()
    stream.demand([SlotDemand(DIGEST, "acme", 0)], [])
    await until(took)
    assert (leases[0].slots, leases[0].number) == (0, lease.number + 1)
    term = rig.node.service.term
    assert term is not None
    assert term.slots.due_s() < math.inf, "its slots are held"
    stream.demand([], [SlotReturn("w1", DIGEST, "acme", leases[0].number)])
    await until(lambda: term.slots.due_s() == math.inf)


async def test_a_lease_is_renewed_before_it_lapses(rig: Rig) -> None:
    await leading(rig)
    worker = rig.node.service.open_report(lambda: None)
    worker.report(1, ReportSnapshot("w1", 3, "h:1", pools=(row_pool(8),), epoch=7))
    stream = rig.open()
    stream.demand([SlotDemand(DIGEST, "acme", 1)], [])
    found: list[SlotLease] = []
    at_s: list[float] = []

    def in_time() -> bool:
        frame = stream.take()
        for lease in frame.leases if frame is not None else ():
            found.append(lease)
            at_s.append(time.monotonic())
        return any(after_s - before_s < LeaseTerms().ttl_s - 0.1 for before_s, after_s in pairwise(at_s))

    await until(in_time)  # The first may come late on a machine that stands still.
    assert set(found) == {found[0]}


def row_pool(row_slots: int) -> PoolSnapshot:
    return PoolSnapshot(DIGEST, 0, 0, 1, 0, 0, 0, 0, row_slots=row_slots)

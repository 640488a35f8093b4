"""What every ``PlacementStream`` does, without a wire: as servicer and in-process client drive it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from services.core.errors import Conflict, NoLeader, NoWorkerAvailable, PermissionDenied
from services.core.generation import PlaceSpec
from services.ports.streams.placement_stream import PlacementStream, PlacementStreams
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.integration.scheduler_fleet import SchedulerNode, place_spec
from tests.support.waiting import until


@dataclass
class Rig:
    """A scheduler without workers: every placement ends refused or waits."""

    node: SchedulerNode
    woken: list[str] = field(default_factory=list)

    @property
    def streams(self) -> PlacementStreams:
        return self.node.service

    def open(self, gateway_id: str = "g1") -> PlacementStream:
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

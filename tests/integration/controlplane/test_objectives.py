"""Objectives from create to delete, what was measured of them, and their alerts across leaders."""

from __future__ import annotations

import pytest

from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.event_log import EventRecorder, event_of
from services.controlplane.objectives.alerts import ObjectiveAlerts
from services.controlplane.objectives.policy.burn import EventCounts
from services.controlplane.resources.objectives import Objectives
from services.core.errors import (
    AlreadyExists,
    EtagMismatch,
    FailedPrecondition,
    InvalidInput,
    NotFound,
)
from services.core.records import EVENTS, OBJECTIVE_STATUS, Leader, Priority, Sli, dump
from services.ports.store import Put
from tests.integration.controlplane.plane import Plane
from tests.support.election import StaticElection

LEADER = "/fairway/v1/leaders/controlplane/0"


async def create(plane: Plane, name: str = "chat", request_id: str = "", **fields: object) -> pb.Objective:
    wanted = {"model": "chat", "availability": 0.99, **fields}
    objective = pb.Objective(metadata=pb.Metadata(name=name), **wanted)  # type: ignore[arg-type]
    request = pb.CreateObjectiveRequest(objective=objective, request_id=request_id)
    answer = await plane.call("CreateObjective", request)
    assert isinstance(answer, pb.CreateObjectiveResponse)
    return answer.objective


async def get(plane: Plane, name: str = "chat") -> pb.Objective:
    answer = await plane.call("GetObjective", pb.GetObjectiveRequest(name=name))
    assert isinstance(answer, pb.GetObjectiveResponse)
    return answer.objective


async def test_create_get_list_update_delete(plane: Plane) -> None:
    made = await create(plane, ttft=pb.LatencyTarget(seconds=2.0), request_id="one")
    assert made == await create(plane, ttft=pb.LatencyTarget(seconds=2.0), request_id="one")
    assert (made.priority, made.ttft.quantile) == (common_pb2.PRIORITY_STANDARD, 0.95)
    assert not made.HasField("itl")
    assert await get(plane) == made
    await create(plane, "batch", priority=common_pb2.PRIORITY_BATCH)
    listed = await plane.call("ListObjectives", pb.ListObjectivesRequest())
    assert isinstance(listed, pb.ListObjectivesResponse)
    assert [one.metadata.name for one in listed.objectives] == ["batch", "chat"]
    made.availability = 0.999
    answer = await plane.call("UpdateObjective", pb.UpdateObjectiveRequest(objective=made))
    assert isinstance(answer, pb.UpdateObjectiveResponse)
    assert answer.objective.availability == 0.999
    with pytest.raises(EtagMismatch):
        await plane.call("UpdateObjective", pb.UpdateObjectiveRequest(objective=made))
    request = pb.DeleteObjectiveRequest(name="chat", request_id="gone")
    await plane.call("DeleteObjective", request)
    await plane.call("DeleteObjective", request)
    with pytest.raises(NotFound):
        await get(plane)
    await create(plane, "again")  # model and class are free


async def test_what_shapes_serving_is_stored_and_warned_of_when_it_changes(plane: Plane) -> None:
    made = await create(plane, ttft=pb.LatencyTarget(seconds=0.02))
    assert (made.shapes_serving, list(made.warnings)) == (False, [])
    made.shapes_serving = True
    answer = await plane.call("UpdateObjective", pb.UpdateObjectiveRequest(objective=made))
    assert isinstance(answer, pb.UpdateObjectiveResponse)
    (warning,) = answer.objective.warnings
    assert "predicted wait exceeds 0.02 s" in warning
    found = await get(plane)
    assert (found.shapes_serving, list(found.warnings)) == (True, [])
    ttft = pb.LatencyTarget(seconds=1.0)
    batch = await create(plane, "batch", priority=common_pb2.PRIORITY_BATCH, ttft=ttft, shapes_serving=True)
    (warning,) = batch.warnings
    assert warning.startswith("batch requests of chat")


async def test_a_model_and_class_have_one_objective(plane: Plane) -> None:
    await create(plane)
    with pytest.raises(FailedPrecondition, match="chat has an objective for standard requests: chat"):
        await create(plane, "second")
    with pytest.raises(AlreadyExists):
        await create(plane, priority=common_pb2.PRIORITY_BATCH)
    made = await get(plane)
    made.model = "other"
    with pytest.raises(InvalidInput, match="never change"):
        await plane.call("UpdateObjective", pb.UpdateObjectiveRequest(objective=made))
    with pytest.raises(InvalidInput, match="promises"):
        await create(plane, "empty", model="m", availability=0.0)


class Measured:
    """The sums of a leader, as far as the alerts read them."""

    def __init__(self) -> None:
        self.bad = 0

    def events_of(self, model: str, priority: Priority, sli: Sli, window_s: float) -> EventCounts:
        return EventCounts(100, self.bad)


async def lead(plane: Plane, leader: str, measured: Measured) -> tuple[ObjectiveAlerts, int]:
    await plane.store.commit([Put(LEADER, dump(Leader(leader, "h:1")))])
    entry = await plane.store.get(LEADER)
    assert entry is not None
    objectives = Objectives(plane.store, plane.clock)
    recorder = EventRecorder(plane.store, plane.clock)
    led = StaticElection(entry.create_revision)
    alerts = ObjectiveAlerts(plane.store, objectives, measured, led, plane.clock, events=recorder)
    return alerts, entry.create_revision


async def alerted(plane: Plane) -> list[str]:
    events = [event_of(entry) for entry in (await plane.store.list(EVENTS)).entries]
    return [event.record.reason for event in events if event is not None]


async def test_an_alert_is_reported_once_by_any_leader(plane: Plane) -> None:
    await create(plane)
    measured = Measured()
    alerts, epoch = await lead(plane, "a", measured)
    await alerts.check(epoch)
    (sli,) = (await get(plane)).status.slis
    assert (sli.sli, sli.budget_left_ratio, sli.alert) == (pb.SLI_AVAILABILITY, 1.0, pb.BURN_ALERT_NONE)
    measured.bad = 50
    for _ in range(2):
        await alerts.check(epoch)
    other, later = await lead(plane, "b", measured)
    await other.check(later)
    assert await alerted(plane) == ["AVAILABILITY_BURN_ACUTE"]
    (sli,) = (await get(plane)).status.slis
    assert (sli.budget_left_ratio, sli.alert) == (-49.0, pb.BURN_ALERT_ACUTE)
    measured.bad = 0
    await other.check(later)
    assert await alerted(plane) == ["AVAILABILITY_BURN_ACUTE", "AVAILABILITY_BURN_ENDED"]


async def test_a_deposed_leader_writes_nothing(plane: Plane) -> None:
    await create(plane)
    measured = Measured()
    alerts, epoch = await lead(plane, "a", measured)
    measured.bad = 50
    await alerts.check(epoch - 1)
    assert (
        (await plane.store.list(OBJECTIVE_STATUS)).entries == (await plane.store.list(EVENTS)).entries == ()
    )
    await alerts.check(epoch)
    assert await alerted(plane) == ["AVAILABILITY_BURN_ACUTE"]


async def test_a_new_objective_of_a_used_name_has_no_old_status(plane: Plane) -> None:
    await create(plane)
    alerts, epoch = await lead(plane, "a", Measured())
    await alerts.check(epoch)
    assert (await get(plane)).HasField("status")
    status = (await plane.store.list(OBJECTIVE_STATUS)).entries[0]
    await plane.call("DeleteObjective", pb.DeleteObjectiveRequest(name="chat"))
    await plane.store.commit([Put(status.key, status.value)])
    await create(plane)
    assert not (await get(plane)).HasField("status")

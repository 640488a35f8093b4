"""The quarantine as operators see it: listed, lifted once per request, and in the events."""

from __future__ import annotations

import asyncio

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.adapters.quarantine import StoreQuarantine
from services.controlplane.event_log import EventRecorder, event_of
from services.core.errors import Conflict, InvalidInput, NotFound
from services.core.records import EVENTS, QUARANTINE, load, quarantine_key
from services.ports.poison.quarantine import Quarantined
from services.runtime.fleet_state.informer import Informer
from services.runtime.supervisor import Supervisor
from tests.integration.controlplane.plane import DIGEST, OTHER, Plane
from tests.support.waiting import until


def fingerprint(number: int) -> str:
    return f"{number:032x}"


async def put(plane: Plane, digest: str, number: int, model: str = "chat", left_s: float = 60.0) -> None:
    entry = Quarantined(digest, fingerprint(number), model, 2, plane.clock.unix_s() + left_s)
    await plane.put(quarantine_key(digest, entry.fingerprint), entry)


async def listed(plane: Plane, **fields: object) -> pb.ListQuarantinedResponse:
    answer = await plane.call("ListQuarantined", pb.ListQuarantinedRequest(**fields))  # type: ignore[arg-type]
    assert isinstance(answer, pb.ListQuarantinedResponse)
    return answer


async def lift(plane: Plane, number: int, request_id: str = "", digest: str = DIGEST) -> None:
    request = pb.DeleteQuarantinedRequest(
        version_digest=digest, fingerprint=fingerprint(number), request_id=request_id
    )
    await plane.call("DeleteQuarantined", request)


async def test_entries_are_listed_by_model_and_version(plane: Plane) -> None:
    before_s = plane.clock.unix_s()
    await put(plane, DIGEST, 1)
    after_s = plane.clock.unix_s()
    await put(plane, DIGEST, 2, model="twin")
    await put(plane, OTHER, 3)
    await put(plane, OTHER, 4, left_s=-1.0)  # its lease has not ended yet
    (one,) = (await listed(plane, version_digest=DIGEST, model="chat")).inputs
    assert (one.version_digest, one.fingerprint, one.model, one.deaths) == (DIGEST, fingerprint(1), "chat", 2)
    assert before_s + 59 <= one.expire_time.seconds <= after_s + 60  # The RPC cuts it to whole seconds.
    assert {one.fingerprint for one in (await listed(plane)).inputs} == set(map(fingerprint, (1, 2, 3)))
    assert [one.fingerprint for one in (await listed(plane, model="twin")).inputs] == [fingerprint(2)]
    assert not (await listed(plane, model="none")).inputs
    with pytest.raises(InvalidInput):
        await listed(plane, version_digest="sha256:1")


async def test_pages_hold_every_entry_once(plane: Plane) -> None:
    for number in range(5):
        await put(plane, DIGEST if number % 2 else OTHER, number)
    found: list[str] = []
    token = ""
    while True:
        page = await listed(plane, page_size=2, page_token=token)
        found += [one.fingerprint for one in page.inputs]
        token = page.next_page_token
        if not token:
            break
    assert sorted(found) == [fingerprint(number) for number in range(5)]


async def test_a_lift_is_applied_once_per_request(plane: Plane) -> None:
    await put(plane, DIGEST, 1)
    await put(plane, OTHER, 1)
    await lift(plane, 1, "one")
    assert [one.version_digest for one in (await listed(plane)).inputs] == [OTHER]
    await put(plane, DIGEST, 1)  # it ended further engines
    await lift(plane, 1, "one")
    assert len((await listed(plane)).inputs) == 2, "the request was answered"
    with pytest.raises(Conflict, match="request_id"):
        await lift(plane, 2, "one")
    await lift(plane, 1, "two")
    with pytest.raises(NotFound):
        await lift(plane, 1, "three")
    with pytest.raises(InvalidInput):
        await plane.call(
            "DeleteQuarantined", pb.DeleteQuarantinedRequest(version_digest=DIGEST, fingerprint="/")
        )


async def test_the_gateway_that_condemned_it_admits_a_lifted_input(plane: Plane) -> None:
    """Though it looked at nothing between the two."""
    supervisor = Supervisor(plane.clock)
    entries = Informer(plane.store, QUARANTINE, lambda entry: load(entry.value, Quarantined), plane.clock)
    supervisor.spawn("entries", entries.run())
    await entries.wait_synced(10.0)
    quarantine = StoreQuarantine(plane.store, entries, plane.clock)
    await quarantine.add(DIGEST, fingerprint(1), model="chat", deaths=2)
    await lift(plane, 1)
    await until(lambda: quarantine.find(DIGEST, fingerprint(1)) is None)
    assert not quarantine.holds(DIGEST)
    await quarantine.add(DIGEST, fingerprint(1), model="chat", deaths=3)
    assert quarantine.count(DIGEST) == 1
    await supervisor.close()


async def test_events_say_what_is_refused_and_admitted_again(plane: Plane) -> None:
    supervisor, recorder = Supervisor(plane.clock), EventRecorder(plane.store, plane.clock)
    supervisor.spawn("recorder", recorder.run())
    await until(lambda: recorder.revision > 0)
    await put(plane, DIGEST, 1)
    await lift(plane, 1)
    wanted = ["INPUT_QUARANTINED", "INPUT_RELEASED"]
    found: list[str] = []
    async with asyncio.timeout(20.0):
        while len(found) < len(wanted):
            events = [event_of(entry) for entry in (await plane.store.list(EVENTS)).entries]
            found = [one.record.reason for one in events if one is not None and one.record.resource == "chat"]
            await asyncio.sleep(0.01)
    assert found == wanted
    await supervisor.close()

"""Containers are killed, frozen, restarted and cut off; what was accepted ends, and nothing stays taken."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import pytest

from tests.compose.fleet import SERVICES, Fleet, wait
from tests.compose.load import STREAMS, Outcome, served, stream, streams

WHOLE_WORKER = ("fleet", "state")


def back_to_rest(fleet: Fleet) -> None:
    """Return once every container is healthy, the workers hold nothing, and no slot is taken."""
    fleet.wait_healthy(*SERVICES)
    wait("the workers are at rest", fleet.at_rest)
    wait("no slot is taken", lambda: fleet.redis("zcard", "fw:{default}:slots").strip() == "0", 90)


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[list[int]]:
    outcomes = asyncio.run(streams(fleet))
    assert all(outcome.complete for outcome in outcomes), outcomes
    return [outcome.ids for outcome in outcomes]


def assert_all_went_on(outcomes: list[Outcome], undisturbed: list[list[int]]) -> None:
    """Every stream is complete and says what it says undisturbed, and some were resumed."""
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert all(outcome.complete for outcome in outcomes)
    assert any(outcome.finished.resumes for outcome in outcomes if outcome.finished), "nothing was disturbed"
    parted = [number for number in range(STREAMS) if outcomes[number].ids != undisturbed[number]]
    assert parted == []


async def disturbed(
    fleet: Fleet, undisturbed: list[list[int]], fault: Callable[[str], object], mend: Callable[[str], object]
) -> None:
    """A fault of a worker that has streams takes none of them along; ``mend`` ends it whatever happened."""
    hit: list[str] = []

    def disturb() -> None:
        hit.append(fleet.busy())
        fault(hit[0])

    try:
        outcomes = await streams(fleet, disturb, followed=True)
    finally:
        for worker in hit:
            mend(worker)
    assert_all_went_on(outcomes, undisturbed)
    back_to_rest(fleet)


async def test_a_killed_worker_takes_no_stream_along(fleet: Fleet, undisturbed: list[list[int]]) -> None:
    await disturbed(
        fleet, undisturbed, lambda worker: fleet.do("kill", worker), lambda worker: fleet.do("start", worker)
    )


async def test_a_worker_that_crashes_is_started_again(fleet: Fleet, undisturbed: list[list[int]]) -> None:
    await disturbed(fleet, undisturbed, fleet.crash, lambda worker: None)


async def test_a_paused_worker_takes_no_stream_along(fleet: Fleet, undisturbed: list[list[int]]) -> None:
    await disturbed(
        fleet,
        undisturbed,
        lambda worker: fleet.do("pause", worker),
        lambda worker: fleet.do("unpause", worker),
    )


@pytest.mark.parametrize("networks", [WHOLE_WORKER, ("fleet",)], ids=["all", "fleet"])
async def test_a_worker_off_the_network_takes_no_stream_along(
    fleet: Fleet, undisturbed: list[list[int]], networks: tuple[str, ...]
) -> None:
    cut = fleet.cut_off("worker-1", *networks)

    def disturb() -> None:
        # After the fault before this one streams come back to the worker by and by.
        wait("worker-1 has a stream", lambda: fleet.runs("worker-1"))
        cut.__enter__()

    try:
        outcomes = await streams(fleet, disturb, followed=True)
    finally:
        cut.__exit__(None, None, None)
    assert_all_went_on(outcomes, undisturbed)
    back_to_rest(fleet)


async def test_a_stopped_worker_drains(fleet: Fleet, undisturbed: list[list[int]]) -> None:
    outcomes = await streams(fleet, lambda: fleet.do("stop", "worker-0"), followed=True)
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert all(outcome.complete for outcome in outcomes)
    assert fleet.inspect("worker-0")["State"]["ExitCode"] == 0
    fleet.do("start", "worker-0")
    back_to_rest(fleet)


async def test_a_gateway_that_crashes_leaves_nothing_taken(fleet: Fleet) -> None:
    outcomes = await streams(fleet, lambda: fleet.crash("gateway"))
    assert all(outcome.complete != (outcome.error is not None) for outcome in outcomes)
    assert any(outcome.error for outcome in outcomes), "nothing was disturbed"
    await served(fleet)
    back_to_rest(fleet)


@pytest.mark.parametrize("service", ["scheduler", "registry", "controlplane"])
async def test_streams_do_not_see_a_crash_beside_their_path(fleet: Fleet, service: str) -> None:
    outcomes = await streams(fleet, lambda: fleet.crash(service))
    assert all(outcome.complete for outcome in outcomes), outcomes
    await served(fleet)
    back_to_rest(fleet)


@pytest.mark.parametrize("service", ["etcd", "redis"])
async def test_streams_do_not_see_a_killed_store(fleet: Fleet, service: str) -> None:
    outcomes = await streams(fleet, lambda: fleet.do("kill", service))
    assert all(outcome.complete for outcome in outcomes), outcomes
    fleet.do("start", service)
    await served(fleet)
    back_to_rest(fleet)


async def test_requests_wait_out_a_paused_store(fleet: Fleet) -> None:
    for service in ("redis", "etcd"):
        fleet.do("pause", service)
        try:
            started = asyncio.create_task(stream(fleet, 1, tokens=16))
            await asyncio.sleep(5)
        finally:
            fleet.do("unpause", service)
        async with asyncio.timeout(120):
            outcome = await started
        assert outcome.complete != (outcome.error is not None), "neither an end nor an error"
        await served(fleet)
    back_to_rest(fleet)


def test_changes_are_taken_after_all_that(fleet: Fleet) -> None:
    name = f"after-{uuid.uuid4().hex[:8]}"
    fleet.cli("tenants", "create", name)
    assert name in fleet.cli("tenants", "list")

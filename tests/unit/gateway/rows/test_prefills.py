"""Rows of a decoder that embeds: placed as sequences, run again after losses, condemned after faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from services.core.errors import DeadlineExceeded, NoWorkerAvailable, PoisonedInput, StaleRoute
from services.core.fixed_cost.rows import RowsRequest
from services.core.generation import (
    FinishReason,
    Grant,
    NotAdmittedReason,
    PlaceSpec,
    SequenceEnd,
    StartSpec,
)
from services.core.poison.suspicion import LossCause, StepRole
from services.core.records import Priority
from services.gateway.catalog import Waking
from services.gateway.rows.inputs import token_tensor
from services.gateway.rows.prefills import MAX_AT_ONCE, PrefilledRows
from services.gateway.service_types import Ports
from services.ports.worker import SequenceSink
from services.rpc.status import by_reason
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter

CLOCK = SystemClock()
FAULT = SequenceEnd(FinishReason.ENGINE_LOST, loss_cause=LossCause.FAULT, step_role=StepRole.ALONE)
KILLED = SequenceEnd(FinishReason.ENGINE_LOST)
Act = Callable[[StartSpec, SequenceSink], None]


def embedded(start: StartSpec, sink: SequenceSink) -> None:
    """Answer with the ids of the row."""
    vector = np.array(start.generation.prompt.ids, np.float32).tobytes()
    sink.on_accepted()
    sink.on_finished(SequenceEnd(FinishReason.LENGTH, device_us=500_000, embedding=vector))


def ends(end: SequenceEnd) -> Act:
    def act(start: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_finished(end)

    return act


def refuses(reason: NotAdmittedReason) -> Act:
    return lambda start, sink: sink.on_not_admitted(reason)


class Fleet:
    """Implements ``PlacementClient`` and ``WorkerClient``: a start does the next of ``acts``, or embeds."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.places: list[PlaceSpec] = []
        self.starts: list[StartSpec] = []
        self.live = self.most = self.cancelled = 0
        self.error: Exception | None = None

    async def place(self, spec: PlaceSpec) -> Grant:
        self.places.append(spec)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.live += 1
        self.most = max(self.most, self.live)
        return Grant("w1", "w:1", 1, 1, len(self.places), 1, 5.0, spec.version_digest)

    def over(self, grant: Grant, refusal: NotAdmittedReason | None = None) -> None:
        self.live -= 1

    def give_back(self, grant: Grant) -> None:
        raise AssertionError("every grant is used")

    def start(self, spec: StartSpec, sink: SequenceSink) -> Any:
        self.starts.append(spec)
        act = self.acts.pop(0) if self.acts else embedded
        asyncio.get_running_loop().call_soon(act, spec, sink)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def credit(self, tokens: int) -> None:
        raise AssertionError("there is no output")


def runner(fleet: Fleet, **more: Any) -> PrefilledRows:
    client: Any = fleet
    ports = Ports(
        limiter=MemoryLimiter(CLOCK),
        placement=client,
        workers=client,
        clock=CLOCK,
        supervisor=Supervisor(CLOCK),
        rng=Random(0),
        sign_ticket=lambda ticket: f"{ticket.reserved_tokens} {ticket.choices}".encode(),
        new_incident=lambda: "inc",
        error_of=by_reason,
        **more,
    )
    return PrefilledRows(ports)


def request(*rows: list[int]) -> RowsRequest:
    tensors = tuple((token_tensor("input_ids", np.array(row, np.int64).tobytes()),) for row in rows)
    deadline_s = CLOCK.monotonic_s() + 30
    return RowsRequest("req_1", "acme", "m", "sha256:1", tensors, Priority.STANDARD, deadline_s=deadline_s)


async def test_each_row_is_a_sequence_without_output_and_ends_in_order() -> None:
    fleet = Fleet()
    found = await runner(fleet).run(request([7, 8], [9], [1, 2, 3]))
    assert [np.frombuffer(end.outputs[0].data, np.float32).tolist() for end in found] == [
        [7, 8],
        [9],
        [1, 2, 3],
    ]
    assert [end.device_s for end in found] == [0.5] * 3
    assert {(place.choice, place.prompt_tokens, place.max_output_tokens) for place in fleet.places} == {
        (0, 2, 0),
        (1, 1, 0),
        (2, 3, 0),
    }
    assert {place.ticket for place in fleet.places} == {b"3 3"}
    assert all(start.embed and start.generation.limits.max_tokens == 0 for start in fleet.starts)
    assert fleet.live == 0


async def test_a_row_carries_the_tier_and_the_kv_budget_of_its_tenant() -> None:
    fleet = Fleet()
    tier: dict[str, Any] = {"node_group": "dedicated/acme", "isolation_waits": True, "kv_share": 0.25}
    await runner(fleet).run(msgspec.structs.replace(request([7, 8]), **tier))
    (place,), (start,) = fleet.places, fleet.starts
    assert {name: getattr(place, name) for name in tier} == tier
    assert (start.node_group, start.kv_share) == ("dedicated/acme", 0.25)


async def test_a_held_row_ends_with_the_reason_why_the_start_failed() -> None:
    class Waits(Fleet):
        async def place(self, spec: PlaceSpec) -> Grant:
            self.places.append(spec)
            return await asyncio.Future[Grant]()

    def waking(model: str) -> Waking:
        return Waking(600.0, NoWorkerAvailable("m: no tensor x") if fleet.places else None)

    fleet = Waits()
    async with asyncio.timeout(60.0):
        with pytest.raises(NoWorkerAvailable, match="no tensor x"):
            await runner(fleet, waking=waking).run(request([7, 8], [9]))


async def test_a_large_request_holds_a_bounded_number_of_grants() -> None:
    fleet = Fleet()
    assert len(await runner(fleet).run(request(*[[1]] * 300))) == 300
    assert fleet.most <= MAX_AT_ONCE


async def test_a_row_runs_again_after_each_passing_end() -> None:
    fleet = Fleet(
        refuses(NotAdmittedReason.NO_ROOM),
        ends(SequenceEnd(FinishReason.PREEMPTED, device_us=250_000)),
        lambda start, sink: sink.on_lost("the connection broke"),
        ends(KILLED),
    )
    (end,) = await runner(fleet).run(request([5]))
    assert (end.error, end.device_s) == (None, 0.75)
    assert len(fleet.starts) == 5
    assert fleet.live == 0


async def test_an_input_that_ends_engines_alone_is_condemned_and_others_are_answered() -> None:
    fleet = Fleet(ends(FAULT), ends(FAULT), ends(FAULT))
    (end,) = await runner(fleet).run(request([5]))
    assert isinstance(end.error, PoisonedInput)
    assert int(end.error.metadata["deaths"]) >= 2
    assert any(start.apart_tokens for start in fleet.starts)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (ends(SequenceEnd(FinishReason.DEADLINE)), DeadlineExceeded),
        (ends(SequenceEnd(FinishReason.ERROR, error_reason="DEADLINE_EXCEEDED")), DeadlineExceeded),
    ],
)
async def test_an_error_of_a_row_is_its_end(act: Act, error: type[Exception]) -> None:
    found = await runner(Fleet(act)).run(request([5], [6]))
    assert isinstance(found[0].error, error)
    assert found[1].error is None


async def test_what_fails_the_request_leaves_no_grant() -> None:
    fleet = Fleet(refuses(NotAdmittedReason.STALE_ROUTE))
    with pytest.raises(StaleRoute):
        await runner(fleet).run(request([5], [6]))
    assert fleet.live == 0
    fleet = Fleet()
    fleet.error = NoWorkerAvailable("none")
    with pytest.raises(NoWorkerAvailable):
        await runner(fleet).run(request([5]))


async def test_cancelling_ends_the_sequences() -> None:
    fleet = Fleet(lambda start, sink: None, lambda start, sink: None)
    call = asyncio.create_task(runner(fleet).run(request([5], [6])))
    while len(fleet.starts) < 2:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (fleet.cancelled, fleet.live) == (2, 0)

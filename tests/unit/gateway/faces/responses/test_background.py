"""Runs in the background that may no longer run, and how many a gateway drives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from fairway.formats.answers import ContentText
from services.core.errors import ConcurrencyExceeded, InternalError
from services.core.generation import FinishReason, Principal, StageClock, Usage
from services.core.records import KeyRole
from services.gateway.events import Accepted, ChoiceResult, Event, Finished, Tokens
from services.gateway.faces.responses import background
from services.gateway.faces.responses.background import BackgroundResponses, ResponseParts, response_of
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.responses.store import BegunResponse
from services.ports.idempotency import RecordLimits
from services.runtime.clock import SystemClock
from tests.support.stored_responses import memory_responses

CALLER = Principal("k", KeyRole.TENANT, "acme")
REQUEST = responses_request(responses_body(b'{"model":"m","input":"hi","background":true}'), b"[]")
CLOCK = SystemClock()


class Silent:
    """A service whose requests have no end."""

    def __init__(self) -> None:
        self.runs = 0

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Event, None]:
        self.runs += 1
        await asyncio.sleep(3600)
        yield  # type: ignore[misc]


class Talkative:
    """A service whose requests have much output, of which a record has no room."""

    def __init__(self) -> None:
        self.runs = 0

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Event, None]:
        self.runs += 1
        yield Accepted("r", "m", "d", 1, 0, 1)
        yield Tokens(0, 0, [1], "x", parts=[ContentText("x" * 3000)])
        yield Finished((ChoiceResult(0, FinishReason.STOP, "", 1),), Usage(1, 1), StageClock(1))


class Crashing:
    """A service that has a bug, before or after the acceptance."""

    def __init__(self, *, accepts: bool) -> None:
        self._accepts = accepts

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Event, None]:
        if self._accepts:
            yield Accepted("r", "m", "d", 1, 0, 1)
        raise RuntimeError("the secret of a bug")


def driver(service: Any, parts: ResponseParts) -> BackgroundResponses:
    return BackgroundResponses(service, replace(parts, remembered_s=100.0), CLOCK)


def begun(created_unix_s: float) -> BegunResponse:
    head = structs.replace(REQUEST.head, id="r", created_at=int(created_unix_s), status="queued")
    generation = REQUEST.generation.SerializeToString()
    return BegunResponse("r", "m", "", True, msgspec.json.encode(head), b"[]", generation)


async def test_a_response_whose_key_may_be_forgotten_fails_instead_of_running_twice() -> None:
    service = Silent()
    async with memory_responses(CLOCK) as parts:
        runs = driver(service, parts)
        old = begun(CLOCK.unix_s() - 60)
        await parts.store.begin("acme", "r", old)
        run = runs.drive(CALLER, "r", old, is_new=False)
        await asyncio.wait_for(run.over.wait(), 30)
        stored = await parts.store.find("acme", "r")
        assert stored is not None
        assert stored.answer is not None
        found = response_of(stored.answer.response)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "result_expired")
        assert service.runs == 0


async def test_a_gateway_drives_as_many_of_a_tenant_as_it_may() -> None:
    most = background.MAX_TENANT_RUNS
    service = Silent()
    async with memory_responses(CLOCK) as parts:
        runs = driver(service, parts)
        fresh = begun(CLOCK.unix_s())
        for number in range(most):
            runs.drive(CALLER, str(number), fresh, is_new=True)
        assert runs.drive(CALLER, "0", fresh, is_new=True) is runs.drive(CALLER, "0", fresh, is_new=True)
        with pytest.raises(ConcurrencyExceeded):
            runs.drive(CALLER, "more", fresh, is_new=True)
        runs.drive(Principal("k", KeyRole.TENANT, "other"), "0", fresh, is_new=True)
        runs.stop("acme", "0")
        async with asyncio.timeout(10):
            while True:
                try:
                    runs.drive(CALLER, "more", fresh, is_new=True)
                    break
                except ConcurrencyExceeded:
                    await asyncio.sleep(0.01)


async def test_a_bug_before_the_acceptance_is_the_creators_error_and_not_the_process_s() -> None:
    async with memory_responses(CLOCK) as parts:
        runs = driver(Crashing(accepts=False), parts)
        run = runs.drive(CALLER, "r", begun(CLOCK.unix_s()), is_new=True)
        await asyncio.wait_for(run.over.wait(), 30)
        assert isinstance(run.failure, InternalError)
        assert run.failure.metadata["incident"] == "inc_1"
        assert "secret" not in str(run.failure)
        assert parts.supervisor.healthy


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_bug_of_a_run_ends_its_response_and_not_the_process(is_new: bool) -> None:
    """``is_new``: its creator was answered at the acceptance, so nobody but the store has the failure."""
    async with memory_responses(CLOCK) as parts:
        fresh = begun(CLOCK.unix_s())
        await parts.store.begin("acme", "r", fresh)
        run = driver(Crashing(accepts=is_new), parts).drive(CALLER, "r", fresh, is_new=is_new)
        await asyncio.wait_for(run.over.wait(), 30)
        stored = await parts.store.find("acme", "r")
        assert stored is not None
        assert stored.answer is not None
        found = response_of(stored.answer.response)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "server_error")
        assert "secret" not in found.error.message
        assert parts.supervisor.healthy


async def test_an_answer_without_room_is_a_failure_by_name_and_runs_once() -> None:
    service = Talkative()
    async with memory_responses(CLOCK, RecordLimits(max_record_bytes=4000)) as parts:
        fresh = begun(CLOCK.unix_s())
        await parts.store.begin("acme", "r", fresh)
        run = driver(service, parts).drive(CALLER, "r", fresh, is_new=True)
        await asyncio.wait_for(run.over.wait(), 30)
        stored = await parts.store.find("acme", "r")
        assert stored is not None
        assert stored.answer is not None
        found = response_of(stored.answer.response)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "over_quota")
        assert service.runs == 1
